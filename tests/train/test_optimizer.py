import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.train import OptimizerConfig, count_parameters, make_optimizer
from flaxzoo.train.optimizer import decay_mask, path_name

CONFIG = OptimizerConfig(
    peak_learning_rate=0.1, schedule="constant", weight_decay=0.5, max_gradient_norm=None
)
PARAMS = {"linear": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 3.0)}}


def update(config, gradients, params=PARAMS):
    tx = make_optimizer(config, 10)
    return jax.jit(tx.update)(gradients, tx.init(params), params)[0]


@pytest.mark.parametrize("name", ["gpt", "gpt2"])
def test_only_matrices_decay(name):
    model = models.create(models.preset(name))
    init = jax.eval_shape(model.init, jax.random.key(0), input_ids=jnp.zeros((1, 1), int))
    decays = decay_mask(init["params"])
    for path, decayed in jax.tree.leaves_with_path(decays):
        name = path_name(path)
        assert decayed == name.endswith(("/kernel", "/embedding")), name
        assert decayed != name.endswith(("/bias", "/scale")), name
    assert sum(jax.tree.leaves(decays)) == 8


def test_decay_by_hand():
    updates = update(CONFIG, jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(updates["linear"]["kernel"], -0.1 * 0.5 * 3, rtol=1e-6)
    np.testing.assert_array_equal(updates["linear"]["bias"], 0)


def test_first_adam_step_is_the_sign_of_the_gradient():
    gradients = {"linear": {"kernel": jnp.full((2, 2), -7.0), "bias": jnp.array([2.0, -0.1])}}
    updates = update(dataclasses.replace(CONFIG, weight_decay=0.0), gradients)
    np.testing.assert_allclose(updates["linear"]["kernel"], 0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["linear"]["bias"], [-0.1, 0.1], rtol=1e-5)


def test_clipping_is_by_the_global_norm():
    # Epsilon far above the gradients makes Adam linear in them: lr · g / epsilon.
    config = dataclasses.replace(CONFIG, weight_decay=0.0, epsilon=1e6, max_gradient_norm=1.0)
    gradients = {"linear": {"kernel": jnp.full((2, 2), 6.0), "bias": jnp.array([5.0, 0.0])}}
    assert float(jnp.sqrt(4 * 36 + 25)) == 13
    for factor, expected in ((1.0, 1 / 13), (0.01, 0.01)):
        updates = update(config, jax.tree.map(lambda g, f=factor: f * g, gradients))
        for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(u, -0.1 * expected * g / 1e6, rtol=1e-4)
    whole = update(dataclasses.replace(config, max_gradient_norm=None), gradients)
    np.testing.assert_allclose(whole["linear"]["bias"], [-0.1 * 5 / 1e6, 0], rtol=1e-4)


def test_path_names_and_counts():
    names = [path_name(path) for path, _ in jax.tree.leaves_with_path(PARAMS)]
    assert names == ["linear/bias", "linear/kernel"]
    assert count_parameters(PARAMS) == count_parameters(jax.eval_shape(lambda: PARAMS)) == 6
