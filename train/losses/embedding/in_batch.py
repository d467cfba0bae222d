"""Losses with in-batch negatives, which are the texts of the other examples of a batch.

The similarities of a text to its candidates are classification logits. The positive is the correct
class.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from ....models.nn.typing import Array, Bool, Float
from .vectors import Real, Similarity, Vectors, each_to_each, to_documents

Direction: TypeAlias = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Partition: TypeAlias = Literal["joint", "per_direction"]
Hardness: TypeAlias = Literal["none", "in_batch_negatives", "hard_negatives", "all_negatives"]
MASKED = -1e30
"""The logit of a text that is not a candidate: its exp is 0, and its gradient is finite."""


def multiple_negatives(
    vectors: Vectors,
    real: Real,
    *,
    scale: float = 20.0,
    similarity: Similarity = "cosine",
    directions: Sequence[Direction] = ("query_to_doc",),
    partition: Partition = "joint",
    hardness: Hardness = "none",
    hardness_strength: float = 0.0,
) -> Float[Array, " B"]:
    """Returns the loss of each pair among all texts of the batch (InfoNCE).

    The loss of pair i is log Σ_d exp(s · sim(q_i, d)) - s · sim(q_i, d_i) (van den Oord et al.
    2018, equation 4; Henderson et al. 2017, section 4). In this formula s is the scale, q_i is an
    anchor, d_i is its positive, and d runs over all documents of the batch, which are the positives
    and the negatives. Further directions add candidates:

    - `doc_to_query`: all anchors, compared with d_i;
    - `query_to_query`: the other anchors, compared with q_i;
    - `doc_to_doc`: the documents of other examples, compared with d_i.

    With `partition` "joint", one sum contains all candidates (Li et al. 2023, "GTE", equation 4,
    uses all four directions). With "per_direction", the loss is the mean over the directions
    (Günther et al. 2023, equation 2, is the symmetric loss).

    The option `hardness` selects negatives d and adds α · sim(q_i, d) to their logits. This term
    has no gradient (Lan et al. 2025, "LLaVE", equation 5). In Schechter Vera et al. 2025,
    "EmbeddingGemma", only the hard negatives of an example get this term.

    Args:
        vectors: the vectors of the batch.
        real: masks of the real texts; only real texts are candidates.
        scale: s, the inverse of the temperature.
        similarity: cosine, or the scalar product.
        directions: the pairs of text kinds that are compared, such as query_to_doc.
        partition: whether there is one softmax for all directions, or one softmax per direction.
        hardness: the negatives whose logits are raised, from other examples, the same example, or
            both.
        hardness_strength: α.

    Returns:
        The losses in nats, which are arbitrary but finite for filler.
    """
    anchors, positives = vectors.anchors, vectors.documents[:, 0]
    batch, num_documents = real.documents.shape
    # [B, C, D] to [B · C, D]: each document of the batch is a candidate.
    documents = vectors.documents.reshape(batch * num_documents, -1)
    real_documents = real.documents.reshape(1, -1)
    same = jnp.eye(batch, dtype=bool)
    same_example = jnp.repeat(same, num_documents, axis=1)  # [B, B · C]
    # For each direction, the texts to classify, their candidates, and a mask of the real
    # candidates.
    pools: dict[Direction, tuple[Array, Array, Bool[Array, "_ N"]]] = {
        "query_to_doc": (anchors, documents, real_documents),
        "query_to_query": (anchors, anchors, real.anchors[None] & ~same),
        "doc_to_query": (positives, anchors, real.anchors[None]),
        "doc_to_doc": (positives, documents, real_documents & ~same_example),
    }
    # The positive is the first document of each example.
    is_positive = jnp.arange(batch * num_documents) % num_documents == 0
    # The negatives whose logits are raised, [B, B · C].
    harder = {
        "none": False,
        "in_batch_negatives": ~same_example,
        "hard_negatives": same_example & ~is_positive,
        "all_negatives": ~(same_example & is_positive),
    }[hardness]

    def logits(direction: Direction) -> Array:
        texts, candidates, counted = pools[direction]
        similar = each_to_each(texts, candidates, similarity)
        scaled = scale * similar
        if direction == "query_to_doc" and hardness != "none":
            scaled += hardness_strength * jnp.where(harder, jax.lax.stop_gradient(similar), 0.0)
        return jnp.where(counted, scaled, MASKED)

    every = list(map(logits, directions))
    # Compute one softmax over all candidates, or a softmax for each direction.
    softmaxes = [jnp.concatenate(every, axis=1)] if partition == "joint" else every
    normalizer = sum(jax.nn.logsumexp(x, axis=1) for x in softmaxes) / len(softmaxes)
    # The positive has the same logit in each softmax, so subtract it once from the mean.
    return normalizer - scale * to_documents(vectors, similarity)[:, 0]


def gist(
    vectors: Vectors,
    real: Real,
    *,
    temperature: float = 0.01,
    margin: float = 0.0,
    margin_strategy: Literal["absolute", "relative"] = "absolute",
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
) -> Float[Array, " B"]:
    """Returns the loss of each pair, with the texts that a guide model considers to be negatives.

    The candidates for the pair of anchor q_i and positive d_i are all documents d, with the
    similarity sim(q_i, d); all other anchors q_j, with sim(q_i, q_j); and all other positives d_j,
    with sim(d_i, d_j). All similarities are cosines divided by the temperature. A candidate is left
    out if the guide's similarity for it exceeds the guide's sim(q_i, d_i) - margin, because the
    candidate is then probably another positive (Solatorio 2024, "GISTEmbed", section 3).

    Args:
        vectors: the vectors of the batch, and the guide's vectors of the same texts.
        real: masks of the real texts; only real texts are candidates.
        temperature: divides the similarities.
        margin: the smallest difference, computed by the guide, between the similarity of the pair
          and the similarity of a candidate.
        margin_strategy: whether `margin` is an absolute difference, or a fraction of the pair's
          similarity.
        contrast_anchors: whether other anchors are candidates.
        contrast_positives: whether other positives are candidates.

    Returns:
        The losses in nats, which are arbitrary but finite for filler.
    """
    guide = vectors.guide
    assert guide is not None
    batch, num_documents = real.documents.shape
    same = jnp.eye(batch, dtype=bool)
    is_positive = jnp.arange(batch * num_documents) % num_documents == 0
    # Whether a document is the positive of an anchor, [B, B · C].
    is_same = jnp.repeat(same, num_documents, axis=1) & is_positive
    # The largest similarity, computed by the guide, that a negative may have.
    pair = to_documents(guide, "cosine")[:, :1]
    largest = pair - margin * (1.0 if margin_strategy == "absolute" else jnp.abs(pair))
    # For each pool of candidates: a function that returns the two compared arrays of vectors, a
    # mask of the real candidates, and a mask of the candidates that the guide cannot exclude.
    pools: list[tuple[Callable[[Vectors], tuple[Array, Array]], Array, Array | bool]] = [
        (
            lambda x: (x.anchors, x.documents.reshape(batch * num_documents, -1)),
            real.documents.reshape(1, -1),
            is_same,
        )
    ]
    if contrast_anchors:
        pools.append((lambda x: (x.anchors, x.anchors), real.anchors[None] & ~same, False))
    if contrast_positives:
        positives = real.documents[None, :, 0]
        pools.append((lambda x: (x.documents[:, 0], x.documents[:, 0]), positives & ~same, False))

    logits = []
    for texts, counted, always in pools:
        similar, guided = (each_to_each(*texts(x), "cosine") for x in (vectors, guide))
        kept = always | (counted & (guided <= largest))
        logits.append(jnp.where(kept, similar / temperature, MASKED))
    # A single softmax over the candidates of all pools.
    normalizer = jax.nn.logsumexp(jnp.concatenate(logits, axis=1), axis=1)
    return normalizer - to_documents(vectors, "cosine")[:, 0] / temperature


def is_nearest(
    vectors: Vectors, real: Real, similarity: Similarity = "cosine"
) -> Float[Array, " B"]:
    """Returns 1 if the positive is the most similar document to its anchor, else 0.

    If n documents are equally similar to the anchor and no document is more similar, the value is
    1/n. A model that gives the same vector to all texts is therefore not counted as correct.
    """
    size = vectors.documents.shape[-1]
    similar = each_to_each(vectors.anchors, vectors.documents.reshape(-1, size), similarity)
    similar = jnp.where(real.documents.reshape(1, -1), similar, MASKED)
    # Equal vectors may have similarities that are rounded differently, so allow a small difference.
    positive = to_documents(vectors, similarity)[:, 0]
    tolerance = 1e-6 * jnp.maximum(1.0, jnp.abs(positive))
    num_nearest = jnp.sum(similar >= (positive - tolerance)[:, None], axis=1)
    is_largest = positive >= jnp.max(similar, axis=1) - tolerance
    return jnp.where(is_largest, 1 / jnp.maximum(num_nearest, 1), 0.0)
