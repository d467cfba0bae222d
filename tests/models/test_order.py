"""What the order of tokens means to a model: nothing, unless something tells their positions.

Bloem, "Machine Learning at VU", lecture 10; Borealis AI, "Transformers I", section 4.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.models.bert import BertLayer
from flaxzoo.models.nn.attention import MultiHeadAttention
from flaxzoo.models.nn.layers import FeedForward
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.models.nn.stack import LayerInputs, make_layer_context

RNG = np.random.default_rng(0)
IDS = RNG.integers(5, 29, (3, 12))
MASK = (np.arange(12) < [[12], [7], [3]]).astype(np.int32)
BLIND = {
    "family": "bert",
    "head": "sequence_classification",
    "labels": ("no", "yes"),
    "init_std": 0.5,
}


@pytest.fixture
def classifier(tiny):
    """`classifier(**fields)`: a tiny classifier of sequences."""
    return lambda **fields: tiny(**{**BLIND, "num_token_types": 0, **fields})


def shuffled(rng):
    """The real tokens of each sequence in another order, padding where it was."""
    ids = IDS.copy()
    for row, n in enumerate(MASK.sum(axis=1)):
        ids[row, :n] = ids[row, rng.permutation(n)]
    return ids


BLIND_MODELS = {
    "bag": {"num_layers": 0, "pooling": "max"},
    "mean bag": {"num_layers": 0, "pooling": "mean"},
    "simple": {"attention": "simple", "pooling": "mean"},
    "blocks": {"pooling": "mean"},
    "blocks, max": {"pooling": "max"},
}


@pytest.mark.parametrize("name", BLIND_MODELS)
def test_logits_are_the_same_for_any_order(classifier, name):
    model = classifier(positions="none", **BLIND_MODELS[name])
    logits, rng = model.logits(input_ids=IDS, attention_mask=MASK), np.random.default_rng(1)
    assert np.ptp(logits, axis=0).max() > 1e-3  # other words have other logits
    for _ in range(5):
        other = model.logits(input_ids=shuffled(rng), attention_mask=MASK)
        np.testing.assert_allclose(other, logits, rtol=0, atol=1e-6)


def test_positions_break_it(classifier):
    for fields in BLIND_MODELS.values():
        model = classifier(positions="learned", **fields)
        if fields == {"num_layers": 0, "pooling": "mean"}:
            continue
        logits = model.logits(input_ids=IDS, attention_mask=MASK)
        other = model.logits(input_ids=shuffled(np.random.default_rng(1)), attention_mask=MASK)
        assert np.abs(other - logits).max() > 1e-3


def test_the_man_ate_the_fish_as_the_fish_ate_the_man(classifier):
    man, fish = np.array([[5, 6, 7, 5, 8]]), np.array([[5, 8, 7, 5, 6]])
    blind, seeing = (classifier(positions=kind, pooling="mean") for kind in ("none", "learned"))
    difference = [
        np.abs(m.logits(input_ids=man) - m.logits(input_ids=fish)).max() for m in (blind, seeing)
    ]
    assert difference[0] < 1e-6
    assert difference[1] > 1e-3
