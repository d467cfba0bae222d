"""Objectives that use the texts of the other examples in a batch as negatives."""

import dataclasses
from typing import Literal

from ....data.common.fields import NonNegative, Positive, require
from ....models.nn.typing import Array, Float
from ...losses.embedding.in_batch import (
    Direction,
    Hardness,
    Partition,
    gist,
    is_nearest,
    multiple_negatives,
)
from ...losses.embedding.vectors import Real, Similarity, Vectors
from ...losses.objective import Batch
from .base import EmbeddingObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleNegativesConfig(EmbeddingObjective):
    """The settings of multiple negatives ranking; see `train.losses.embedding.in_batch`."""

    kind = "multiple_negatives"
    whole_batch = True

    scale: Positive = 20.0
    """The factor that multiplies the similarities, which is 1 / temperature."""
    similarity: Similarity = "cosine"
    """The similarity of two vectors: cosine, or dot for the scalar product."""
    directions: tuple[Direction, ...] = ("query_to_doc",)
    """The kinds of texts that the loss compares; query_to_doc compares anchors with documents. The
    loss of GTE uses all four directions."""
    partition: Partition = "joint"
    """joint: one softmax over all candidates. per_direction: one softmax for each direction, and
    the loss is the mean over directions. For query_to_doc and doc_to_query, this mean is the
    symmetric loss."""
    hardness: Hardness = "none"
    """The negatives whose logits are raised, in proportion to their similarity."""
    hardness_strength: NonNegative = 0.0
    """α: the logits of the negatives of `hardness` are raised by α times their similarity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "query_to_doc" in self.directions and len({*self.directions}) == len(self.directions),
            f"directions {' '.join(self.directions)} must have query_to_doc, which has the "
            "positives, and each direction only once",
        )
        alone = {"query_to_query", "doc_to_doc"} & {*self.directions}
        require(
            self.partition == "joint" or not alone,
            f"directions {' '.join(sorted(alone))} have no positive, but partition per_direction "
            "requires a positive in each direction: choose partition joint",
        )
        require(
            (self.hardness == "none") == (self.hardness_strength == 0),
            f"hardness {self.hardness} and hardness_strength {self.hardness_strength} "
            f"require each other: give both or neither",
        )

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, " B"]:
        """Returns the loss of each pair."""
        return multiple_negatives(
            vectors,
            Real.of(batch),
            scale=self.scale,
            similarity=self.similarity,
            directions=self.directions,
            partition=self.partition,
            hardness=self.hardness,
            hardness_strength=self.hardness_strength,
        )

    def measures(self, vectors: Vectors, real: Real) -> dict[str, Array]:
        """Returns whether the positive is the most similar document to its anchor."""
        return {"accuracy": is_nearest(vectors, real, self.similarity)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GISTConfig(EmbeddingObjective):
    """The settings of GIST, where a guide model excludes negatives that are probably positives."""

    kind = "gist"
    whole_batch = True

    guide: str = ""
    """The folder of the guide, which is an embedding model with the same tokenizer. The guide is
    not trained."""
    temperature: Positive = 0.01
    """The temperature that divides the cosine similarities."""
    margin: NonNegative = 0.0
    """The minimum difference between the positive's similarity and a negative's similarity, both
    computed by the guide. A negative with a smaller difference is left out."""
    margin_strategy: Literal["absolute", "relative"] = "absolute"
    """Whether `margin` is an absolute difference, or a fraction of the similarity of the
    positive."""
    contrast_anchors: bool = True
    """Whether the anchors of other examples are also negatives."""
    contrast_positives: bool = True
    """Whether each positive is also compared with the positives of other examples, as negatives."""

    def losses(self, vectors: Vectors, batch: Batch) -> Float[Array, " B"]:
        """Returns the loss of each pair."""
        return gist(
            vectors,
            Real.of(batch),
            temperature=self.temperature,
            margin=self.margin,
            margin_strategy=self.margin_strategy,
            contrast_anchors=self.contrast_anchors,
            contrast_positives=self.contrast_positives,
        )

    def measures(self, vectors: Vectors, real: Real) -> dict[str, Array]:
        """Returns whether the positive has the largest cosine similarity of all documents."""
        return {"accuracy": is_nearest(vectors, real)}

    @property
    def guide_model(self) -> str:
        """The folder of the guide."""
        require(self.guide, "objective gist needs a guide: give --objective.guide FOLDER")
        return self.guide

    def for_evaluation(self) -> MultipleNegativesConfig:
        """Returns a loss without a guide, because an evaluation has no frozen parameters."""
        return MultipleNegativesConfig(**self.shared_settings, scale=1 / self.temperature)
