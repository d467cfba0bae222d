"""Supervised fine-tuning: only marked labels are learned, packed or alone."""

import jax
import jax.numpy as jnp
import numpy as np
from flaxzoo import models, train

V, T = 23, 12
CONFIG = models.GPTConfig(vocab_size=V, max_length=T, num_layers=1, d_model=16, num_heads=2)


def loss_and_gradient(params, batch):
    model, objective = models.create(CONFIG), train.supervised()

    def loss(params, batch):
        _, sums = objective.apply(model.apply, params, batch)
        counts = objective.counts(batch)
        return sums["next_token"] / counts["next_token"]

    return jax.jit(jax.value_and_grad(loss))(params, batch)


def test_packed_examples_are_learned_as_they_are_alone_and_prompts_are_not():
    params = models.init_params(models.create(CONFIG), jax.random.key(0))
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, V, (2, T))
    segments = np.array([1] * 5 + [2] * 5 + [0] * 2)
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1])  # that of padding is ignored
    packed = {
        "input_ids": ids[None],
        "labels": labels[None],
        "segment_ids": segments[None],
        "loss_mask": mask[None],
    }
    alone = {name: np.zeros((2, T), int) for name in packed}
    for row, part in enumerate((slice(0, 5), slice(5, 10))):
        for name, x in packed.items():
            alone[name][row, :5] = x[0, part]
    alone["segment_ids"][:, :5] = 1
    packed, alone = jax.tree.map(jnp.int32, (packed, alone))
    value, gradient = loss_and_gradient(params, packed)
    expected, of_alone = loss_and_gradient(params, alone)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, of_alone)
    assert float(train.supervised().counts(packed)["next_token"]) == 6

    # The labels of prompts and padding do not matter.
    learned = (packed["loss_mask"] != 0) & (packed["segment_ids"] != 0)
    other = {**packed, "labels": jnp.where(learned, packed["labels"], 0)}
    np.testing.assert_array_equal(loss_and_gradient(params, other)[0], value)
