"""The base of objectives that learn vectors of texts.

The model runs on the anchors and on the documents; pooling and normalization make vectors. The loss
depends on the vectors alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import jax.numpy as jnp

from ...data.common.fields import require
from ...data.dataset import DataSplit
from ...data.embedding.embedding_data import EmbeddingData
from ...models.nn.pooling import PoolingMode, pool
from ...models.nn.typing import Array, Float
from ..losses.eval_step import Evaluation
from ..losses.objective import Batch, Inputs, Outputs, RunModel
from ..objective_config import ObjectiveConfig, Scores

if TYPE_CHECKING:
    from ...models.hf.sentence_embedding import EmbeddingSettings

S = TypeVar("S", bound="EmbeddingObjective")


class Vectors(NamedTuple):
    """The vectors of a batch."""

    anchors: Float[Array, "B D"]
    documents: Float[Array, "B C D"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingObjective(ObjectiveConfig[EmbeddingData]):
    """How the vector of a text is computed, for all objectives on vectors."""

    data_kinds = (EmbeddingData,)
    head_names = ("none", "causal_lm")
    progress_metrics = ("accuracy", "ndcg@10", "spearman")
    next_command = "embed {run} --input FILE --output vectors.npy"
    compares_with_start = True

    pooling: tuple[PoolingMode, ...] | None = None
    """How the hidden states of a text become one vector; see `flaxzoo embed`. Defaults to the
    setting of `init_from`, or mean."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. Defaults to the setting of `init_from`, or no."""

    def begun_with(
        self: S, data: EmbeddingData, settings: "EmbeddingSettings"
    ) -> tuple[S, EmbeddingData]:
        """See `ObjectiveConfig`."""
        kinds = [type(layer).__name__ for layer in settings.layers]
        require(
            "Dense" not in kinds,
            "the model of init_from has a Dense layer after its pooling, which has no training "
            "here: begin with a model without one",
        )
        normalize = "Normalize" in kinds if self.normalize is None else self.normalize
        pooling = self.pooling or settings.pooling
        prompts = {
            "query_prompt": settings.prompt(settings.query_prompt),
            "document_prompt": settings.prompt(settings.document_prompt),
            "lowercase": settings.lowercase,
        }
        unset = {name: x for name, x in prompts.items() if getattr(data, name) is None}
        data = dataclasses.replace(data, **unset)
        require(
            settings.pool_prompt or not (data.query_prompt or data.document_prompt),
            "the model of init_from does not pool the tokens of its prompts (include_prompt), "
            "which has no training here: begin with another model, or give empty prompts "
            "(--data.query-prompt '' --data.document-prompt '')",
        )
        return dataclasses.replace(self, pooling=pooling, normalize=normalize), data

    def embedding_settings(
        self, data: EmbeddingData, settings: "EmbeddingSettings | None"
    ) -> "EmbeddingSettings":
        """See `ObjectiveConfig`; prompts have the names `query` and `document`."""
        from ...models.hf.sentence_embedding import EmbeddingSettings

        settings = settings or EmbeddingSettings()
        own = {"query": data.query_prompt, "document": data.document_prompt}
        prompts = {**settings.prompts, **{name: text for name, text in own.items() if text}}
        return dataclasses.replace(
            settings.normalized(bool(self.normalize)),
            pooling=self.pooling or settings.pooling,
            lowercase=bool(data.lowercase),
            prompts=prompts,
        )

    def vectors(self) -> Callable[[Mapping[str, RunModel], Batch], Vectors]:
        """Returns the `forward` of an objective, which computes the vectors of a batch."""
        modes, normalize = self.pooling or ("mean",), bool(self.normalize)

        def embed(run: Mapping[str, RunModel], inputs: Inputs) -> Float[Array, "R D"]:
            hidden = run["model"](**inputs).last_hidden_state
            x = pool(hidden, inputs["attention_mask"], modes)
            return unit(x) if normalize else x

        def forward(run: Mapping[str, RunModel], batch: Batch) -> Vectors:
            anchors, documents = (embed(run, inputs) for inputs in embedding_inputs(batch))
            return Vectors(anchors, documents.reshape(len(anchors), -1, anchors.shape[-1]))

        return forward

    def to_minimize(self, scores: Scores) -> float:
        """Returns the negative of nDCG@10 or of the rank correlation."""
        for name in ("ndcg@10", "spearman"):
            if name in scores:
                return -float(cast(float, scores[name]))
        return super().to_minimize(scores)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: EmbeddingData) -> Scores:
        """Returns the measures, and the number of examples."""
        del data
        return {**evaluation.means, "examples": split.examples.num_examples}


def embedding_inputs(batch: Batch) -> tuple[Inputs, Inputs]:
    """Returns the model's inputs for the anchors `[B, Q]` and the documents `[B · C, T]`."""
    anchors = {"input_ids": batch["anchor_ids"], "attention_mask": batch["anchor_mask"]}
    names = ("input_ids", "attention_mask")
    return anchors, {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names}


def anchor_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each example, 0 for filler."""
    return (batch["anchor_mask"][:, 0] != 0).astype(jnp.float32)


def document_mask(batch: Batch) -> Array:
    """Returns whether each document is present, bool `[B, C]`."""
    return jnp.any(batch["attention_mask"] != 0, axis=-1)


def unit(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns vectors of length 1; vectors of length 0 are unchanged, without a gradient."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # The gradient of a square root at 0 is not finite.
    return x / jnp.sqrt(jnp.where(square > 0, square, 1.0))


def vector_predictions(outputs: Outputs) -> dict[str, Array]:
    """Returns the vectors, which an evaluation keeps."""
    return {"anchors": outputs.anchors, "documents": outputs.documents}
