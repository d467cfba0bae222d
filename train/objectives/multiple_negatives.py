"""Multiple negatives ranking: the other documents of a batch are negatives."""

import dataclasses

import jax
import jax.numpy as jnp

from ...data.common.fields import Positive, require
from ...data.embedding.embedding_data import EmbeddingData
from ..losses.objective import Batch, Objective, Terms
from .embedding import (
    EmbeddingObjective,
    Vectors,
    anchor_weights,
    document_mask,
    embedding_inputs,
    unit,
    vector_predictions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleNegativesConfig(EmbeddingObjective):
    """The settings of multiple negatives ranking."""

    kind = "multiple_negatives"

    scale: Positive = 20.0
    """The factor of the cosine similarities, 1 / temperature."""

    def build(self, data: EmbeddingData) -> Objective:
        """Returns `multiple_negatives`."""
        del data
        return multiple_negatives(self)


def multiple_negatives(settings: MultipleNegativesConfig = MultipleNegativesConfig()) -> Objective:
    """Returns the loss of a search over the documents of a batch (Henderson et al. 2017).

    The loss of an anchor i is -log(exp S_ii / Σ_j exp S_ij), where S_ij is `scale` times the cosine
    of the vectors of anchor i and document j, over the positives and the negatives of all examples.
    See `EmbeddingData` for the arrays of a batch.

    Measures: `accuracy`, the share of anchors whose positive is the most similar document.

    Args:
        settings: the hyperparameters.
    """

    def counts(batch: Batch) -> Terms:
        require(
            "scores" not in batch,
            "objective multiple_negatives takes every pair for a positive one, and the data have "
            "scores: name the other columns after a #, as #anchor,positive, or choose an objective "
            "that learns scores",
        )
        return dict.fromkeys(("ranking", "accuracy"), jnp.sum(anchor_weights(batch)))

    def terms(outputs: Vectors, batch: Batch) -> Terms:
        anchors, documents = unit(outputs.anchors), unit(outputs.documents)
        weights, present = anchor_weights(batch), document_mask(batch)
        scores = settings.scale * jnp.einsum(
            "ad,bcd->abc", anchors, documents, precision="highest"
        )  # [B, B, C]
        # Absent documents are not candidates.
        scores = jnp.where(present, scores, -jnp.inf)
        own = jnp.diagonal(scores[..., 0])  # [B]
        own = jnp.where(weights > 0, own, 0.0)
        number = jax.nn.logsumexp(scores, axis=(1, 2)) - own
        best = own >= jnp.max(scores, axis=(1, 2))
        return {
            "ranking": jnp.sum(weights * jnp.where(weights > 0, number, 0.0)),
            "accuracy": jnp.sum(weights * best),
        }

    return Objective(
        coefficients={"ranking": 1.0},
        inputs=embedding_inputs,
        counts=counts,
        terms=terms,
        predictions=vector_predictions,
        forward=settings.vectors(),
        whole_batch=True,
    )
