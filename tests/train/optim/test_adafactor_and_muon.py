"""Adafactor and Muon: optax's on single matrices, and on a stack as on each layer by itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models
from flaxzoo.train.optim.adafactor import Factored, is_factored
from flaxzoo.train.optim.muon import is_orthogonalized
from flaxzoo.train.optim.optimizer import make_optimizer
from flaxzoo.train.optim.parameters import MatrixAxes, decay_mask, matrix_axes, named
from flaxzoo.train.optimizer_config import OptimizerConfig
from optax.contrib import MuonDimensionNumbers, muon

CONFIG = OptimizerConfig(
    peak_learning_rate=0.1, schedule="constant", weight_decay=0.0, max_gradient_norm=None
)
ADAFACTOR = dataclasses.replace(CONFIG, name="adafactor")
MUON = dataclasses.replace(CONFIG, name="muon")


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def run(tx, params: Any, gradients) -> tuple[Any, Any]:
    """The parameters after a step with each of the gradients."""
    state, step = tx.init(params), jax.jit(tx.update)
    for gradient in gradients:
        updates, state = step(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(ours, expected):
    """Equal to float32's precision, beside the largest number of an array."""
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        near = 5e-7 * float(np.abs(x).max())
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=near, err_msg=name)


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("token_embedding/embedding", 2, ((), (0,), (1,))),
        ("layers/attention/query/kernel", 4, ((0,), (1,), (2, 3))),
        ("layers/attention/output/kernel", 4, ((0,), (1, 2), (3,))),
        ("decoder/layers/cross_attention/output/kernel", 4, ((0,), (1, 2), (3,))),
        ("layers/feed_forward/down/kernel", 3, ((0,), (1,), (2,))),
        ("layers/experts/down", 4, ((0, 1), (2,), (3,))),
        ("layers/experts/router", 3, ((0,), (1,), (2,))),
        ("layers/experts/shared_0/up/kernel", 3, ((0,), (1,), (2,))),
        ("layers/attention/output/lora_a", 4, ((0,), (1, 2), (3,))),
        ("layers/attention/output/lora_b", 3, ((0,), (1,), (2,))),
        ("layers/attention/query/lora_a", 3, ((0,), (1,), (2,))),
        ("layers/attention/query/lora_b", 4, ((0,), (1,), (2, 3))),
        ("head/classifier/kernel", 2, ((), (0,), (1,))),
        ("layers/attention/query/bias", 3, None),
        ("layers/attention_norm/scale", 2, None),
        ("layers/attention/query_convolution/taps", 4, None),
    ],
)
def test_the_axes_of_a_matrix(name, ndim, expected):
    assert matrix_axes(name, ndim) == (None if expected is None else MatrixAxes(*expected))


@pytest.mark.parametrize("family", ["gpt2", "bert-base", "t5-small", "transformer-base"])
def test_a_kernel_s_axes_are_those_that_the_model_contracts(family):
    from flaxzoo.models.adapters.lora import linear_maps

    model = models.create(models.preset(family))
    shapes = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))
    kernels = {name: x for name, x in named(shapes) if name.endswith("/kernel")}
    maps = linear_maps(model)
    assert len(maps) >= 6
    for path, linear in maps.items():
        shape = kernels[f"{path}/kernel"].shape
        axes = matrix_axes(f"{path}/kernel", len(shape))
        assert tuple(shape[a] for a in axes.inputs) == linear.inputs, path
        assert tuple(shape[a] for a in axes.outputs) == linear.outputs, path


SINGLE = {
    "wide": {"kernel": (128, 256)},
    "table": {"embedding": (300, 128)},
    "small": {"kernel": (64, 256)},
    "norm": {"scale": (256,)},
}


@pytest.mark.parametrize("momentum", [False, True])
def test_adafactor_of_single_arrays_is_optax_s(momentum):
    shapes = {f"{part}/{own}": s for part, tree in SINGLE.items() for own, s in tree.items()}
    params, *gradients = (arrays(shapes, seed) for seed in range(4))
    params["wide/kernel"] *= 1e-5  # below the least scale
    reference = optax.adafactor(0.1, momentum=0.9 if momentum else None)
    tx = make_optimizer(dataclasses.replace(ADAFACTOR, adafactor_momentum=momentum), 10)
    ours, state = run(tx, params, gradients)
    assert_close(ours, run(reference, params, gradients)[0])
    kept = state[1][0].nu
    assert isinstance(kept["wide/kernel"], Factored)
    assert kept["table/embedding"].rows.shape == (300,)
    assert kept["small/kernel"].shape == (64, 256)


def test_adafactor_decays_as_adamw_does():
    """By the learning rate times the decay, where optax's decays by the latter alone."""
    params = arrays({"a/kernel": (128, 128), "a/bias": (128,)})
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = make_optimizer(dataclasses.replace(ADAFACTOR, weight_decay=0.5), 10)
    ours, _ = run(tx, params, [zeros])
    np.testing.assert_allclose(ours["a/kernel"], 0.95 * params["a/kernel"], rtol=1e-6)
    np.testing.assert_array_equal(ours["a/bias"], params["a/bias"])


# A stack of three layers, with four heads of 64, and two experts.
STACK = {
    "layers/attention/query/kernel": (3, 128, 4, 64),
    "layers/attention/output/kernel": (3, 4, 64, 128),
    "layers/attention/query/bias": (3, 4, 64),
    "layers/experts/up": (3, 2, 128, 160),
    "layers/experts/router": (3, 128, 2),
    "layers/norm/scale": (3, 128),
}
MATRIX = {
    "layers/attention/query/kernel": (128, 256),
    "layers/attention/output/kernel": (256, 128),
    "layers/experts/up": (2, 128, 160),
    "layers/experts/router": (128, 2),
}


def separate(tree):
    """Each matrix and vector of each layer by itself, of two axes at most."""
    apart = {}
    for name, x in tree.items():
        parent, own = name.removeprefix("layers/").rsplit("/", 1)
        parent, own = f"{parent}_{own}", "kernel" if name in MATRIX else own
        for layer, part in enumerate(x):
            matrix = part.reshape(MATRIX.get(name, part.shape))
            parts = matrix if matrix.ndim == 3 else matrix[None]
            for i, one in enumerate(parts):
                apart[f"{parent}_{layer}_{i}/{own}"] = one
    return apart


def stack(seed) -> Any:
    """Layers and experts of very different sizes: what is common to them would show."""
    made = arrays(STACK, seed)
    for name, x in made.items():
        sizes = 10.0 ** np.arange(3).reshape(3, *(1,) * (x.ndim - 1))
        made[name] = x * sizes
        if name == "layers/experts/up":
            made[name] = made[name] * np.array([1, 30]).reshape(1, 2, 1, 1)
    return made


@pytest.mark.slow
def test_adafactor_of_a_stack_is_that_of_each_layer():
    params, *gradients = (stack(seed) for seed in range(3))
    tx = make_optimizer(ADAFACTOR, 10)
    ours, state = run(tx, params, gradients)
    apart = [separate(x) for x in (params, *gradients)]
    assert_close(separate(ours), run(tx, apart[0], apart[1:])[0])
    rows = {n: x.rows.shape for n, x in state[1][0].nu.items() if isinstance(x, Factored)}
    assert rows == {
        "layers/attention/query/kernel": (3, 128),
        "layers/attention/output/kernel": (3, 4, 64),
        "layers/experts/up": (3, 2, 128),
    }
    assert not is_factored("layers/norm/scale", params["layers/norm/scale"])


def test_muon_of_single_matrices_is_optax_s():
    """In a layer each; what lies beside the layers has AdamW's update."""
    config = dataclasses.replace(MUON, weight_decay=0.5, epsilon=1e-8)
    shapes = {"up": (48, 64), "down": (64, 24), "square": (32, 32)}
    params, *gradients = (
        {"layers": {n: {"kernel": x[None]} for n, x in arrays(shapes, seed).items()}}
        | {"head": {"kernel": arrays({"": (24, 8)}, seed)[""], "bias": jnp.ones(8) * seed}}
        for seed in range(4)
    )
    ours, state = run(make_optimizer(config, 10), params, gradients)

    def flat(tree):
        return {name: x[0] if "layers" in name else x for name, x in named(tree)}

    def inside(tree: Any):
        return {name: MuonDimensionNumbers(0, 1) if "layers" in name else None for name in tree}

    reference = muon(
        0.1,
        weight_decay=0.5,
        adam_weight_decay=0.0,
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=inside,
    )
    expected, _ = run(reference, flat(params), [flat(x) for x in gradients])
    # Its AdamW is Nesterov's, and decays all or nothing: ours is compared below.
    matrices, their_matrices = (
        {name: x for name, x in tree.items() if "layers" in name} for tree in (flat(ours), expected)
    )
    assert_close(matrices, their_matrices)
    adam = optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.5, mask=decay_mask)
    head, _ = run(adam, params["head"], [x["head"] for x in gradients])
    assert_close(ours["head"], head)
    inner = state[1][0].inner_states
    assert {n for n, _ in named(inner["adam"].inner_state.mu)} == {"head/kernel", "head/bias"}


@pytest.mark.slow
def test_muon_of_a_stack_is_that_of_each_layer():
    params, *gradients = (stack(seed) for seed in range(3))
    ours, _ = run(make_optimizer(MUON, 10), params, gradients)

    def apart(tree):
        """Single matrices, again in layers."""
        return {f"layers/{name}": x for name, x in separate(tree).items()}

    def stacked(tree):
        return {name: x[None] for name, x in apart(tree).items()}

    expected, _ = run(make_optimizer(MUON, 10), stacked(params), [stacked(x) for x in gradients])
    for name, x in apart(ours).items():
        near = 1e-4 * float(jnp.abs(x).max())
        np.testing.assert_allclose(x, expected[name][0], rtol=1e-4, atol=near, err_msg=name)


def test_muon_s_updates_are_orthogonal_and_as_long_as_adamw_s():
    params, gradient = (stack(seed) for seed in range(2))
    updates = jax.jit(make_optimizer(MUON, 10).update)(
        gradient, make_optimizer(MUON, 10).init(params), params
    )[0]
    for name, x in separate(updates).items():
        if name.endswith("/kernel"):
            singular = np.linalg.svd(x, compute_uv=False) / (0.1 * 0.2 * max(x.shape) ** 0.5)
            # Five iterations bring them all between 0.5 and 1.5 or so, as Jordan et al. say.
            assert 0.6 < singular.min() <= singular.max() < 1.3, name
            assert float(jnp.sqrt(jnp.mean(x**2))) == pytest.approx(0.02, rel=0.2), name


def test_muon_has_the_matrices_inside_layers():
    model = models.create(models.preset("bert-base"))
    shapes = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))
    chosen = [name for name, x in named(shapes) if is_orthogonalized(name, len(x.shape))]
    assert sorted(chosen) == [
        *(f"layers/attention/{x}/kernel" for x in ("key", "output", "query", "value")),
        *(f"layers/feed_forward/{x}/kernel" for x in ("down", "up")),
    ]
    assert not is_orthogonalized("layers/attention/relative_keys/embedding", 3)
    assert is_orthogonalized("decoder/layers/experts/gate", 4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [ADAFACTOR, MUON], ids=["adafactor", "muon"])
def test_frozen_layers_and_rates_by_depth(config):
    params, gradient = (
        {**stack(seed), "token_embedding/embedding": jnp.ones((200, 128)) * (seed + 1)}
        for seed in range(2)
    )
    params, gradient = (
        {"token_embedding": {"embedding": x.pop("token_embedding/embedding")}, **x}
        for x in (params, gradient)
    )
    changed = dataclasses.replace(
        config, weight_decay=0.5, layer_decay=0.5, frozen=("layers/0", "token_embedding")
    )
    plain, ours = (
        run(make_optimizer(c, 10), params, [gradient])[0]
        for c in (dataclasses.replace(config, weight_decay=0.5), changed)
    )
    np.testing.assert_array_equal(
        ours["token_embedding"]["embedding"], params["token_embedding"]["embedding"]
    )
    for name in STACK:
        before, after, whole = (np.asarray(x[name]) for x in (params, ours, plain))
        np.testing.assert_array_equal(after[0], before[0])
        for layer, rate in ((1, 0.25), (2, 0.5)):
            step = whole[layer] - before[layer]
            np.testing.assert_allclose(
                after[layer], before[layer] + rate * step, rtol=1e-5, atol=1e-5, err_msg=name
            )
