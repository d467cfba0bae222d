"""Objectives for text pairs that have a score or a label."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from ....data.common.fields import NonNegative, Positive
from ....data.embedding.embedding_data import EmbeddingData
from ....models.nn.typing import Array, Bool, Float
from ...losses.embedding import scored
from ...losses.embedding.vectors import Distance, Real, Vectors
from ...losses.objective import Batch
from ...objective_config import ObjectiveConfig
from .base import EmbeddingObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredPairsConfig(EmbeddingObjective):
    """The base class of objectives for pairs with a score."""

    score_forms = ("pairs",)
    num_documents = (1, 1)
    score_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    """The smallest and the largest score that the data may have."""

    def of_data(self, data: EmbeddingData, *, is_default: bool) -> ObjectiveConfig[EmbeddingData]:
        """See `ObjectiveConfig`; raises UserError for scores outside `score_range`."""
        chosen = super().of_data(data, is_default=is_default)
        data.require_scores(*self.score_range, f"objective {self.kind}")
        return chosen

    def loss_note(self, data: EmbeddingData) -> str | None:
        """Returns a message if the scores look like class labels, such as those in NLI."""
        scores = sorted({x for example in data.train_examples() for x in example.scores})
        # Scores with two values may mean "similar" and "different". Three or more values look like
        # classes.
        if len(scores) < 3 or not all(x.is_integer() for x in scores):
            return None
        shown = ", ".join(f"{x:g}" for x in scores[:4])
        return (
            f"note: the scores are whole numbers ({shown}), and the loss {self.kind} learns that a "
            "larger score means more similar texts: for classes, use flaxzoo train bert-classify"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoSENTConfig(ScoredPairsConfig):
    """The settings of CoSENT, which makes pairs with higher scores more similar."""

    kind = "cosent"
    whole_batch = True

    scale: Positive = 20.0
    """The factor that multiplies the similarities."""

    def similarity(self, vectors: Vectors) -> Float[Array, " B"]:
        """Returns the similarity of each pair."""
        return scored.cosine(vectors)

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, ""]:
        """Returns the loss of the batch as a whole."""
        pairs = Real.of(batch).pairs
        return scored.cosent(self.similarity(vectors), batch["scores"], pairs, scale=self.scale)

    def items(self, real: Real) -> Bool[Array, ""]:
        """Returns whether the batch has any real pair; the whole batch is a single item."""
        return jnp.any(real.pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AngleConfig(CoSENTConfig):
    """The settings of AnglE, which is CoSENT applied to angles in complex space."""

    kind = "angle"

    def similarity(self, vectors: Vectors) -> Float[Array, " B"]:
        """Returns the similarity of each pair."""
        return scored.angle(vectors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig(ScoredPairsConfig):
    """The squared difference between cosine and score. It has no hyperparameters."""

    kind = "cosine"
    score_range = (-1.0, 1.0)

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, " B"]:
        """Returns the loss of each pair."""
        return scored.cosine_error(vectors, batch["scores"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(ScoredPairsConfig):
    """The settings of the contrastive loss for pairs with labels 1 (similar) and 0 (different)."""

    kind = "contrastive"
    score_range = (0.0, 1.0)

    margin: NonNegative = 0.5
    """Two different texts have the loss 0 if their distance is at least this number."""
    distance: Distance = "cosine"
    """How the distance between two vectors is computed; cosine is 1 - cos."""

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, " B"]:
        """Returns the loss of each pair."""
        return scored.contrastive(
            vectors, batch["scores"], distance=self.distance, margin=self.margin
        )
