"""The vectors of a batch of texts, masks of the real texts, and similarities of vectors."""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp

from ....models.nn.typing import Array, Bool, Float
from ..objective import Batch

Similarity: TypeAlias = Literal["cosine", "dot"]
Distance: TypeAlias = Literal["cosine", "euclidean", "manhattan"]


@flax.struct.dataclass
class Vectors:
    """The vectors of a batch, float32, which are the outputs of an embedding objective.

    For packed rows, the vectors have the axes R, S in place of B until `of_examples` joins these
    axes.
    """

    anchors: Float[Array, "*B D"]
    """The vector of the first text of each example."""
    documents: Float[Array, "*B C D"]
    """The vectors of the other texts of each example; the first is the positive."""
    guide: "Vectors | None" = None
    """The vectors of a second, frozen model for the same texts, if the objective has one."""

    def of_examples(self) -> "Vectors":
        """Returns the vectors with a single axis of examples: `[R, S, …]` becomes `[R · S, …]`."""
        size, num_documents = self.anchors.shape[-1], self.documents.shape[-2]
        guide = None if self.guide is None else self.guide.of_examples()
        return Vectors(
            self.anchors.reshape(-1, size), self.documents.reshape(-1, num_documents, size), guide
        )

    def first(self, num_dimensions: int) -> "Vectors":
        """Returns the first dimensions of the vectors, scaled to norm 1, with the full guide."""
        anchors, documents = (unit(x[..., :num_dimensions]) for x in (self.anchors, self.documents))
        return Vectors(anchors, documents, self.guide)


@flax.struct.dataclass
class Real:
    """Masks of the real texts of a batch. All other texts are missing negatives or filler."""

    anchors: Bool[Array, " B"]
    documents: Bool[Array, "B C"]

    @classmethod
    def of(cls, batch: Batch) -> "Real":
        """Returns masks of the texts that have a token in `anchor_mask` or `attention_mask`.

        In packed rows, `text_mask` has the masks of the texts of all examples.
        """
        if "text_mask" in batch:
            # [R, S, 1 + C] to [R · S, 1 + C].
            texts = batch["text_mask"].reshape(-1, batch["text_mask"].shape[-1]) != 0
            return cls(texts[:, 0], texts[:, 1:])
        anchors = batch["anchor_mask"]
        # Labeled texts have no documents, so the empty mask [B, 0, 1] becomes [B, 0].
        masks = anchors, batch.get("attention_mask", jnp.zeros((len(anchors), 0, 1), jnp.int32))
        return cls(*(jnp.any(mask != 0, axis=-1) for mask in masks))

    @property
    def pairs(self) -> Bool[Array, " B"]:
        """Whether each example has both an anchor and a positive."""
        return self.anchors & self.documents[:, 0]

    @property
    def negatives(self) -> Bool[Array, "B N"]:
        """A mask of the real negatives in examples that have an anchor and a positive."""
        return self.pairs[:, None] & self.documents[:, 1:]


def unit(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns vectors scaled to norm 1. The gradient at a zero vector is finite."""
    # Divide by at least 1e-12, as `normalize` of PyTorch does.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24))


_BEFORE_DOT: Mapping[Similarity, Callable[[Array], Array]] = {"cosine": unit, "dot": lambda x: x}
"""For each similarity, the function that is applied to both vectors before the scalar product."""


def each_to_each(a: Array, b: Array, similarity: Similarity) -> Float[Array, "N M"]:
    """Returns the similarity of each vector in `a` `[N, D]` to each in `b` `[M, D]`: `[N, M]`."""
    a, b = map(_BEFORE_DOT[similarity], (a, b))
    return jnp.dot(a, b.T, precision="highest")


def to_documents(vectors: Vectors, similarity: Similarity) -> Float[Array, "B C"]:
    """Returns the similarity of each anchor to its documents."""
    a, b = map(_BEFORE_DOT[similarity], (vectors.anchors, vectors.documents))
    # [B, 1, D] and [B, C, D] to [B, C].
    return jnp.sum(a[:, None] * b, axis=-1)


def _euclidean(a: Array, b: Array) -> Array:
    squared = jnp.sum(jnp.square(a - b), axis=-1)
    # Avoid 0, because the square root has no gradient there.
    nonzero = squared > 0
    return jnp.where(nonzero, jnp.sqrt(jnp.where(nonzero, squared, 1.0)), 0.0)


DISTANCES: Mapping[Distance, Callable[[Array, Array], Array]] = {
    "cosine": lambda a, b: 1 - jnp.sum(unit(a) * unit(b), axis=-1),
    "euclidean": _euclidean,
    "manhattan": lambda a, b: jnp.sum(jnp.abs(a - b), axis=-1),
}
"""Functions that compute distances along the last axis, by the distance's name."""
