"""Losses of vectors: values of fixed vectors, and missing texts, which never count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.train.losses.embedding import in_batch, scored
from flaxzoo.train.losses.embedding.vectors import Real, Vectors

B, D = 6, 8
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
A, P, N1, N2 = (lambda rng: [rng.randn(B, D).astype(np.float32) for _ in range(4)])(
    np.random.RandomState(0)
)
Y = jnp.array([0.1, 0.9, 0.5, 0.5, 0, 1])


def vectors(*documents, guide=None):
    return Vectors(jnp.asarray(A), jnp.stack(documents, axis=1), guide)


def real(v):
    return Real(jnp.ones(B, bool), jnp.ones(v.documents.shape[:2], bool))


def among(**options):
    return lambda v: in_batch.multiple_negatives(v, real(v), **options)


VALUES = {  # computed with sentence-transformers 6.2
    "multiple negatives": (7.404535, (P,), among()),
    "with hard negatives": (11.374331, (P, N1, N2), among()),
    "symmetric": (
        8.108912,
        (P,),
        among(directions=("query_to_doc", "doc_to_query"), partition="per_direction"),
    ),
    "four directions": (11.649270, (P,), among(directions=DIRECTIONS)),
    "cosent": (17.328838, (P,), lambda v: scored.cosent(scored.cosine(v), Y, jnp.ones(B, bool))),
    "angle": (14.646314, (P,), lambda v: scored.cosent(scored.angle(v), Y, jnp.ones(B, bool))),
    "cosine": (0.468246, (P,), lambda v: scored.cosine_error(v, Y)),
    "triplet": (4.556762, (P, N1), scored.triplet),
    "margin": (29.363222, (P, N1), lambda v: scored.margin_error(v, Y)),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_fixed_vectors(name):
    expected, documents, loss = VALUES[name]
    assert float(jnp.mean(loss(vectors(*documents)))) == pytest.approx(expected, abs=1e-5)


GUIDE = Vectors(jnp.asarray(N1), jnp.stack((N2, A, P), axis=1))
MASKED_LOSSES = {
    "four directions": lambda v, r: in_batch.multiple_negatives(
        v, r, directions=DIRECTIONS, hardness="all_negatives", hardness_strength=5.0
    ),
    "gist": in_batch.gist,
    "distillation": lambda v, r: scored.distillation(v, jnp.stack((Y, 1 - Y, Y), axis=1), r),
    "cosent": lambda v, r: scored.cosent(scored.cosine(v), Y, r.pairs),
}


@pytest.mark.parametrize("name", MASKED_LOSSES)
def test_missing_texts_never_count(name):
    """Vectors of missing texts, of any value, change neither a loss nor a gradient."""
    loss, v = MASKED_LOSSES[name], vectors(P, N1, N2, guide=GUIDE)
    some = real(v)
    some = Real(some.anchors.at[4].set(False), some.documents.at[4].set(False).at[1, 2].set(False))

    def total(x):
        values = loss(x, some)
        return jnp.sum(jnp.where(some.pairs, values, 0.0) if values.ndim else values)

    def of(fill):
        def filled(x, mask):
            return jnp.where(mask[..., None], x, fill)

        return dataclasses.replace(
            v,
            anchors=filled(v.anchors, some.anchors),
            documents=filled(v.documents, some.documents),
            guide=Vectors(
                filled(GUIDE.anchors, some.anchors), filled(GUIDE.documents, some.documents)
            ),
        )

    (a, slope), (b, _) = (jax.value_and_grad(total)(of(fill)) for fill in (0.0, 3.0))
    assert float(a) == pytest.approx(float(b), rel=1e-6)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(slope))
    assert not np.any(slope.anchors[4])
    assert not np.any(slope.documents[4])
    assert not np.any(slope.documents[1, 2])
    # Every text that is not missing counts.
    if name != "cosent":
        assert np.all(np.any(slope.documents[0], axis=-1))
