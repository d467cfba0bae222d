"""Losses on triplets, and on text pairs that have a score or a label."""

import jax
import jax.numpy as jnp

from ....models.nn.typing import Array, Bool, Float
from .vectors import DISTANCES, Distance, Real, Similarity, Vectors, to_documents, unit


def cosent(
    similarity: Float[Array, " B"],
    scores: Float[Array, " B"],
    real: Bool[Array, " B"],
    *,
    scale: float = 20.0,
) -> Float[Array, ""]:
    """Returns log(1 + Σ exp(s · (c_k - c_i))) over all i and k with y_i > y_k.

    c_i is the similarity of pair i, y_i its score, and s the scale (Su 2022, "CoSENT"). The loss
    depends only on the order of the scores.

    Args:
        similarity: the similarity of the two texts of each pair, for example from `cosine`.
        scores: the score of each pair.
        real: a mask of the real pairs.
        scale: s.
    """
    # [B, B]: pair i is the row, pair k is the column.
    wrong = scale * (similarity[None] - similarity[:, None])
    counted = (scores[:, None] > scores[None]) & real[:, None] & real[None]
    # The appended logit 0 is the term 1 in the formula.
    logits = jnp.append(jnp.where(counted, wrong, -1e30), 0.0)
    return jax.nn.logsumexp(logits)


def cosine(vectors: Vectors) -> Float[Array, " B"]:
    """Returns the cosine of the anchor and the first document."""
    return to_documents(vectors, "cosine")[:, 0]


def angle(vectors: Vectors) -> Float[Array, " B"]:
    """Returns |cos + sin| of the anchor and the first document, for `cosent`.

    Both vectors have norm 1, and their halves x₁ and x₂ are the real and the imaginary part of a
    complex vector: sin = Σ(x₂ y₁ - x₁ y₂) (Li and Li 2024, "AnglE", section 3.4, as
    sentence-transformers computes it). Vectors with an odd number of dimensions get a further
    dimension of value 0.
    """
    # [B, D] each
    x, y = unit(vectors.anchors), unit(vectors.documents[:, 0])
    x, y = (jnp.pad(v, ((0, 0), (0, v.shape[-1] % 2))) for v in (x, y))
    # The first half of a vector is the real part, the second half the imaginary part, [B, D / 2].
    (x1, x2), (y1, y2) = (jnp.split(v, 2, axis=-1) for v in (x, y))
    return jnp.abs(jnp.sum(x * y, axis=-1) + jnp.sum(x2 * y1 - x1 * y2, axis=-1))


def cosine_error(vectors: Vectors, scores: Float[Array, " B"]) -> Float[Array, " B"]:
    """Returns (cos - y)², where y is the score.

    Reimers and Gurevych 2019, "Sentence-BERT", section 3.
    """
    return jnp.square(cosine(vectors) - scores)


def contrastive(
    vectors: Vectors,
    labels: Float[Array, " B"],
    *,
    distance: Distance = "cosine",
    margin: float = 0.5,
) -> Float[Array, " B"]:
    """Returns ½ (y d² + (1 - y) max(0, margin - d)²), where y is 1 for similar texts, else 0.

    Hadsell et al. 2006, "Dimensionality reduction by learning an invariant mapping", equation 4.

    Args:
        vectors: the vectors of the batch.
        labels: y.
        distance: d, the kind of distance between the anchor and the first document.
        margin: two dissimilar texts have the loss 0 if their distance is at least this number.
    """
    d = DISTANCES[distance](vectors.anchors, vectors.documents[:, 0])
    near = jnp.square(jax.nn.relu(margin - d))
    return (labels * jnp.square(d) + (1 - labels) * near) / 2


def triplet(
    vectors: Vectors, *, distance: Distance = "euclidean", margin: float = 5.0
) -> Float[Array, "B N"]:
    """Returns max(0, d(a, p) - d(a, n) + margin) for each negative n.

    Schroff et al. 2015, "FaceNet", equation 1, without squares, as in Reimers and Gurevych 2019.

    Args:
        vectors: the vectors of the batch.
        distance: d.
        margin: how much farther from the anchor a negative must be than the positive p.
    """
    # [B, 1, D] and [B, C, D] to [B, C].
    d = DISTANCES[distance](vectors.anchors[:, None], vectors.documents)
    return jax.nn.relu(d[:, :1] - d[:, 1:] + margin)


def margin_error(
    vectors: Vectors,
    scores: Float[Array, " B"] | Float[Array, "B C"],
    *,
    similarity: Similarity = "dot",
) -> Float[Array, "B N"]:
    """Returns (sim(q, p) - sim(q, n) - y)² for each negative n (MarginMSE).

    Hofstätter et al. 2020, "Improving efficient neural ranking models with cross-architecture
    knowledge distillation", equation 5.

    Args:
        vectors: the vectors of the batch.
        scores: `[B, C]`, a teacher's scores of the documents; y is then the score of p minus the
          score of n. Or `[B]`, y itself, for a single negative.
        similarity: sim.
    """
    similar = to_documents(vectors, similarity)
    # The value y for each negative: [B, 1], or [B, N] from the scores of the documents.
    targets = scores[:, None] if scores.ndim == 1 else scores[:, :1] - scores[:, 1:]
    return jnp.square(similar[:, :1] - similar[:, 1:] - targets)


def distillation(
    vectors: Vectors,
    scores: Float[Array, "B C"],
    real: Real,
    *,
    similarity: Similarity = "dot",
    temperature: float = 1.0,
) -> Float[Array, " B"]:
    """Returns τ² KL(softmax(y / τ) ‖ softmax(sim(q, d) / τ)) over the documents d of each example.

    Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2; for rankings Lin
    et al. 2021, "In-batch negatives for knowledge distillation", equation 3.

    Args:
        vectors: the vectors of the batch.
        scores: y, a teacher's scores of the documents.
        real: masks of the real texts; missing documents get the probability 0.
        similarity: sim.
        temperature: τ.

    Returns:
        The losses in nats, which are arbitrary but finite for filler.
    """
    log_p, log_q = (
        jax.nn.log_softmax(jnp.where(real.documents, x / temperature, -1e30))
        for x in (scores, to_documents(vectors, similarity))
    )
    # exp(-1e30) is 0, and the difference of two such logarithms is finite.
    return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
