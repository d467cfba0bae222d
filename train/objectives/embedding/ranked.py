"""Objectives for anchors with several documents: triplets, and teacher-scored documents."""

import dataclasses
import math

from ....data.common.fields import NonNegative, Positive
from ....data.embedding.embedding_data import EmbeddingData
from ....data.embedding.embedding_examples import ScoreForm
from ....models.nn.typing import Array, Bool, Float
from ...losses.embedding import scored
from ...losses.embedding.vectors import Distance, Real, Similarity, Vectors, to_documents
from ...losses.objective import Batch
from ...objective_config import ObjectiveConfig
from .base import EmbeddingObjective
from .in_batch import MultipleNegativesConfig


def _is_nearer(vectors: Vectors, real: Real, similarity: Similarity = "cosine") -> Array:
    """Returns whether each anchor is more similar to its positive than to all its negatives."""
    # A missing negative counts as less similar than the positive.
    similar = to_documents(vectors, similarity)
    return ((similar[:, :1] > similar[:, 1:]) | ~real.documents[:, 1:]).all(axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TripletConfig(EmbeddingObjective):
    """The settings of the triplet loss, which makes the positive nearer than each negative."""

    kind = "triplet"
    num_documents = (2, math.inf)

    margin: NonNegative = 5.0
    """How much farther from the anchor a negative must be than the positive."""
    distance: Distance = "euclidean"
    """How the distance between two vectors is computed; cosine is 1 - cos."""

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, "B N"]:
        """Returns the loss of each negative."""
        del batch
        return scored.triplet(vectors, distance=self.distance, margin=self.margin)

    def items(self, real: Real) -> Bool[Array, "B N"]:
        """Returns a mask of the real negatives."""
        return real.negatives

    def measures(self, vectors: Vectors, real: Real) -> dict[str, Array]:
        """Returns whether the positive has the largest cosine similarity in its example."""
        return {"accuracy": _is_nearer(vectors, real)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtConfig(EmbeddingObjective):
    """The base class of objectives that learn similarities from a teacher."""

    score_forms = ("documents",)
    num_documents = (2, math.inf)

    teacher: str | None = None
    """The folder of the teacher, which is an embedding model with the same tokenizer. The teacher
    is not trained. If None, the data must have the teacher's scores."""
    similarity: Similarity = "dot"
    """The similarity of two vectors: cosine, or dot for the scalar product."""

    @property
    def accepted_scores(self) -> tuple[ScoreForm, ...]:
        """The accepted forms of scores, which is only ``none`` if a teacher computes the scores."""
        return self.score_forms if self.teacher is None else ("none",)

    def scores(self, vectors: Vectors, batch: Batch) -> Array:
        """Returns the teacher's scores, computed by the teacher or read from the data."""
        if vectors.guide is not None:
            return to_documents(vectors.guide, self.similarity)
        return batch["scores"]

    def measures(self, vectors: Vectors, real: Real) -> dict[str, Array]:
        """Returns whether the positive is the most similar document in its example."""
        return {"accuracy": _is_nearer(vectors, real, self.similarity)}

    @property
    def guide_model(self) -> str | None:
        """The folder of the teacher, if the run computes scores with a teacher."""
        return self.teacher

    def for_evaluation(self) -> EmbeddingObjective:
        """Returns a loss without a teacher, because an evaluation has no frozen parameters."""
        if self.teacher is None:
            return self
        return MultipleNegativesConfig(**self.shared_settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginMSEConfig(TaughtConfig):
    """The settings of MarginMSE, which learns the differences between a teacher's similarities."""

    kind = "margin_mse"
    score_forms = ("documents", "pairs")

    def of_data(self, data: EmbeddingData, *, is_default: bool) -> ObjectiveConfig[EmbeddingData]:
        """See `ObjectiveConfig`; an example with a single score must have a single negative."""
        chosen = super().of_data(data, is_default=is_default)
        data.require_one_negative(f"objective {self.kind}")
        return chosen

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, "B N"]:
        """Returns the loss of each negative."""
        scores = self.scores(vectors, batch)
        return scored.margin_error(vectors, scores, similarity=self.similarity)

    def items(self, real: Real) -> Bool[Array, "B N"]:
        """Returns a mask of the real negatives."""
        return real.negatives


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(TaughtConfig):
    """The settings of distillation, which learns a teacher's distribution over the documents."""

    kind = "distillation"

    temperature: Positive = 1.0
    """The temperature that divides the similarities and the scores."""

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, " B"]:
        """Returns the loss of each example."""
        return scored.distillation(
            vectors,
            self.scores(vectors, batch),
            Real.of(batch),
            similarity=self.similarity,
            temperature=self.temperature,
        )
