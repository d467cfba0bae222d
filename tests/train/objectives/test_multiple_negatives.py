"""In-batch negatives by hand, and with filler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.train.objectives.embedding import Vectors, unit

# The values of sentence-transformers 6.2 on these vectors.
A, P, N1, N2 = np.random.RandomState(0).randn(4, 6, 8).astype(np.float32)


def loss_of(anchors, documents, present=None, real=None):
    objective = train.multiple_negatives()
    B, C = documents.shape[:2]
    present = np.ones((B, C), np.int32) if present is None else present
    real = np.ones(B, np.int32) if real is None else real
    batch = {"anchor_mask": real[:, None], "attention_mask": present[..., None]}
    batch = jax.tree.map(jnp.asarray, batch)
    counts = objective.counts(batch)
    terms = objective.terms(Vectors(jnp.asarray(anchors), jnp.asarray(documents)), batch)
    return {name: float(terms[name] / counts[name]) for name in terms}


@pytest.mark.parametrize(
    ("documents", "expected"),
    [((P,), 7.404535), ((P, N1, N2), 11.374331)],
)
def test_the_loss_is_that_of_sentence_transformers(documents, expected):
    assert loss_of(A, np.stack(documents, 1))["ranking"] == pytest.approx(expected, abs=1e-5)


def test_filler_and_absent_documents_change_nothing():
    documents = np.stack([P, N1], 1)
    present = np.ones((6, 2), np.int32)
    present[:, 1] = 0
    present[5] = 0
    real = np.array([1, 1, 1, 1, 1, 0], np.int32)
    found = loss_of(A, documents, present, real)
    assert found == pytest.approx(loss_of(A[:5], P[:5, None]), abs=1e-6)


def test_a_vector_of_zeros_has_a_finite_gradient():
    gradient = jax.grad(lambda x: unit(x).sum())(jnp.zeros((2, 3)))
    assert np.isfinite(gradient).all()
