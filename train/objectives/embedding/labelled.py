"""Objectives for labeled texts: texts with the same label get similar vectors."""

import dataclasses

import jax.numpy as jnp

from ....data.common.fields import NonNegative
from ....models.nn.typing import Array, Bool, Float
from ...losses.embedding import labelled
from ...losses.embedding.vectors import Distance, Real, Vectors
from ...losses.objective import Batch
from .base import EmbeddingObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelledTextsConfig(EmbeddingObjective):
    """The base class of objectives for labeled texts."""

    score_forms = ("labels",)
    num_documents = (0, 0)
    packs = False
    whole_batch = True
    measured = ()

    distance: Distance = "euclidean"
    """How the distance between two vectors is computed; cosine is 1 - cos."""

    def distances(self, vectors: Vectors) -> Float[Array, "B B"]:
        """Returns the distances between all pairs of texts in the batch."""
        return labelled.TO_EACH[self.distance](vectors.anchors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchAllTripletConfig(LabelledTextsConfig):
    """The settings of the triplet loss that uses all triplets of a batch."""

    kind = "batch_all_triplet"

    margin: NonNegative = 5.0
    """How much farther apart texts with different labels must be than texts with the same label."""

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, ""]:
        """Returns the loss of the batch."""
        real = Real.of(batch).anchors
        distances = self.distances(vectors)
        return labelled.batch_all_triplet(distances, batch["labels"], real, margin=self.margin)

    def items(self, real: Real) -> Bool[Array, ""]:
        """Returns whether the batch has any real text; the whole batch is a single item."""
        return jnp.any(real.anchors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchHardSoftMarginConfig(LabelledTextsConfig):
    """The settings of the soft-margin loss that uses the hardest triplet of each text."""

    kind = "batch_hard_soft_margin"

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, " B"]:
        """Returns the loss of the hardest triplet of each text."""
        real = Real.of(batch).anchors
        return labelled.batch_hard_soft_margin(self.distances(vectors), batch["labels"], real)

    def items(self, real: Real) -> Bool[Array, " B"]:
        """Returns a mask of the real texts."""
        return real.anchors
