"""The SPLADE objective, for sparse vectors with a weight for each token of the vocabulary."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal, TypeVar

import jax.numpy as jnp

from ....data.common.fields import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    field_names,
    require,
    require_default,
)
from ....data.embedding.embedding_data import EmbeddingData
from ....data.embedding.embedding_examples import ScoreForm
from ....models.greatest_logits import greatest_logits
from ....models.hf.sparse_encoder import SparseActivation, SparseSettings
from ....models.nn.typing import Array, Bool, Float
from ...losses.embedding.sparse import flops
from ...losses.embedding.text_rows import TextRows
from ...losses.embedding.vectors import Real, Similarity, Vectors
from ...losses.objective import Batch, Objective, RunModel, Terms
from ...objective_config import ObjectiveConfig
from .base import EmbeddingObjective
from .in_batch import MultipleNegativesConfig
from .ranked import DistillationConfig, MarginMSEConfig

if TYPE_CHECKING:
    from ....models.hf.sparse_encoder import VectorSettings

S = TypeVar("S", bound="SpladeConfig")
Ranking = Literal["multiple_negatives", "margin_mse", "distillation"]
RANKINGS: dict[Ranking, type[EmbeddingObjective]] = {
    "multiple_negatives": MultipleNegativesConfig,
    "margin_mse": MarginMSEConfig,
    "distillation": DistillationConfig,
}
"""The ranking losses. Each of them can compare sparse vectors."""
REMEDIES: dict[ScoreForm, Ranking] = {
    "none": "multiple_negatives",
    "pairs": "margin_mse",
    "documents": "distillation",
}
"""The ranking loss that a message suggests for each form of scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpladeConfig(MultipleNegativesConfig):
    """A ranking loss that compares sparse vectors by dot product, with a regularizer.

    The weight of token v is log(1 + max(0, z_v)), where z_v is the maximum of the logits of v over
    all positions of a text. The regularizer keeps most weights at 0 (Formal et al. 2021,
    "SPLADE v2", section 3).
    """

    kind = "splade"
    packs = False
    head_names = ("masked_lm",)
    progress_metrics = ("accuracy", "ndcg@10", "query_active_dims", "document_active_dims")
    measured = ("accuracy", "query_active_dims", "document_active_dims")
    compares_by_dot = True

    ranking: Ranking = "multiple_negatives"
    """The ranking loss. margin_mse and distillation learn from a teacher model's scores, which the
    data must contain."""
    temperature: Positive = 1.0
    """For distillation: the temperature that divides the similarities and the scores."""
    scale: Positive = 1.0
    """The factor that multiplies the similarities."""
    similarity: Similarity = "dot"
    """The similarity of two vectors: dot for the scalar product, or cosine."""
    activation: SparseActivation | None = None
    """The formula for a token's weight. relu: log(1 + max(0, logit)). log1p_relu: log(1 + log(1 +
    max(0, logit))). Defaults to the setting of `init_from`, else relu."""
    document_weight: NonNegative = 3e-5
    """The weight of the regularizer for the vectors of documents."""
    query_weight: NonNegative = 5e-5
    """The weight of the regularizer for the vectors of anchors."""
    ramp_fraction: Fraction = 1 / 3
    """The fraction of the run during which the weights of the regularizers grow quadratically from
    0."""
    ramp_steps: NonNegativeInt = 0
    """Number of steps until the regularizers have their full weights; 0: derived from
    `ramp_fraction`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        dense = ("pooling", "normalize", "matryoshka_dims")
        for name in dense:
            require(
                not getattr(self, name),
                f"{name} requires dense vectors, but objective splade learns sparse vectors: leave "
                f"{name} out",
            )
        require(
            self.ranking == "distillation" or self.temperature == 1,
            f"temperature {self.temperature} requires ranking distillation, got ranking "
            f"{self.ranking}: leave temperature out",
        )
        settings = {"scale", "directions", "partition", "hardness", "hardness_strength"}
        unused = settings - field_names(RANKINGS[self.ranking])
        require_default(
            self, sorted(unused), f"requires ranking multiple_negatives, got {self.ranking}"
        )

    @functools.cached_property
    def _ranked(self) -> EmbeddingObjective:
        """The objective that computes the ranking loss, with the settings of this objective."""
        ranking_class = RANKINGS[self.ranking]
        shared = field_names(ranking_class) & field_names(self)
        return ranking_class(**{name: getattr(self, name) for name in shared})

    @property
    def accepted_scores(self) -> tuple[ScoreForm, ...]:
        """The forms of scores that the ranking loss accepts."""
        return self._ranked.accepted_scores

    @property
    def accepted_documents(self) -> tuple[int, int | float]:
        """The smallest and the largest number of documents that the ranking loss accepts."""
        return self._ranked.accepted_documents

    def remedy(self, form: ScoreForm) -> str:
        """Returns the command-line option that selects a ranking loss for this form of scores."""
        chosen = REMEDIES.get(form)
        return f"--objective.ranking {chosen}" if chosen else "data without labels"

    def of_data(self, data: EmbeddingData, *, is_default: bool) -> ObjectiveConfig[EmbeddingData]:
        """See `ObjectiveConfig`; the objective of the ranking loss checks the scores."""
        require(
            not data.sets,
            f"objective splade learns from one data set, but {data.source_name!r} has "
            f"{len(data.sets)}: give one data set",
        )
        chosen = super().of_data(data, is_default=False)
        self._ranked.of_data(data, is_default=False)
        return chosen

    def losses(self, vectors: Vectors, batch: Batch) -> Array:
        """Returns the ranking loss of each item."""
        return self._ranked.losses(vectors, batch)

    def items(self, real: Real) -> Bool[Array, "..."]:
        """Returns a mask of the items in the ranking loss that are not filler."""
        return self._ranked.items(real)

    def build(self, data: EmbeddingData) -> Objective:
        """Returns the objective. Its terms are the ranking loss `splade` and two regularizers."""
        ranking = super().build(data)
        weights = {"query_flops": self.query_weight, "document_flops": self.document_weight}

        def counts(batch: Batch) -> Terms:
            # A regularizer has one value for the whole batch, so its count is 1.
            one = jnp.any(Real.of(batch).pairs).astype(jnp.float32)
            return {**ranking.counts(batch), **dict.fromkeys(weights, one)}

        def terms(vectors: Vectors, batch: Batch) -> Terms:
            real, size = Real.of(batch), vectors.anchors.shape[-1]
            return {
                **ranking.terms(vectors, batch),
                "query_flops": flops(vectors.anchors, real.anchors),
                # Treat each document as a separate text: [B, C, V] to [B · C, V].
                "document_flops": flops(
                    vectors.documents.reshape(-1, size), real.documents.reshape(-1)
                ),
            }

        return dataclasses.replace(
            ranking,
            coefficients={**ranking.coefficients, **weights},
            counts=counts,
            terms=terms,
            regularizers=tuple(weights),
            # Only the weights of the regularizers grow. The weight of the ranking loss is constant.
            ramps=dict.fromkeys(weights, self.ramp_steps) if self.ramp_steps else {},
        )

    def embed(self, run: RunModel, rows: TextRows) -> Float[Array, "R V"]:
        """Returns the weight of each token without storing the logits of all positions at once."""
        weights = SparseSettings(activation=self.activation or "relu")
        return weights(
            greatest_logits(run(**rows.inputs).projection, rows.inputs["attention_mask"])
        )

    def measures(self, vectors: Vectors, real: Real) -> dict[str, Array]:
        """Also returns the number of nonzero weights of each anchor and of its positive."""
        texts = {"query": vectors.anchors, "document": vectors.documents[:, 0]}
        active = {
            f"{name}_active_dims": jnp.sum(x != 0, axis=-1, dtype=jnp.float32)
            for name, x in texts.items()
        }
        return {**self._ranked.measures(vectors, real), **active}

    def loss_note(self, data: EmbeddingData) -> None:
        """Returns None, because evaluations compare sparse vectors by dot product."""

    def in_steps(self, steps: int) -> "SpladeConfig":
        """See `ObjectiveConfig`."""
        if self.ramp_steps or not self.ramp_fraction:
            return self
        return dataclasses.replace(self, ramp_steps=max(1, int(self.ramp_fraction * steps)))

    def initialized_from(
        self: S, data: EmbeddingData, settings: "VectorSettings"
    ) -> tuple[S, EmbeddingData]:
        """See `ObjectiveConfig`; `activation` defaults to the setting of the initial model."""
        known = settings if isinstance(settings, SparseSettings) else SparseSettings()
        activation = self.activation or known.activation
        data = self._with_prompts(data, settings.texts)
        return dataclasses.replace(self, activation=activation), data

    def vector_settings(
        self, data: EmbeddingData, settings: "VectorSettings | None"
    ) -> SparseSettings:
        """See `ObjectiveConfig`."""
        texts = super().vector_settings(data, settings).texts
        return SparseSettings(activation=self.activation or "relu", texts=texts)
