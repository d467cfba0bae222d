import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models
from flaxzoo.train.optim.optimizer import make_optimizer, rate_factors
from flaxzoo.train.optim.parameters import decay_mask, named
from flaxzoo.train.optimizer_config import OptimizerConfig
from flaxzoo.train.state import count_parameters

CONFIG = OptimizerConfig(
    peak_learning_rate=0.1, schedule="constant", weight_decay=0.5, max_gradient_norm=None
)
PARAMS = {"linear": {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 3.0)}}

# The names of a BERT, three layers of it.
LAYERS = 3


def bert_like(seed=0):
    """Parameters of a model's shape, far from any symmetry."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "token_embedding": {"embedding": array(7, 4)},
        "position_embedding": {"embedding": array(5, 4)},
        "token_type_embedding": {"embedding": array(2, 4)},
        "embedding_norm": {"scale": array(4), "bias": array(4)},
        "layers": {
            "attention": {
                "query": {"kernel": array(LAYERS, 4, 2, 2), "bias": array(LAYERS, 2, 2)},
                "output": {"kernel": array(LAYERS, 2, 2, 4), "bias": array(LAYERS, 4)},
            },
            "attention_norm": {"scale": array(LAYERS, 4), "bias": array(LAYERS, 4)},
        },
        "pooler": {"kernel": array(4, 4), "bias": array(4)},
        "head": {"classifier": {"kernel": array(4, 3), "bias": array(3)}},
    }


def separated(params):
    """Each layer as a subtree of its own, beside the rest."""
    rest = {name: x for name, x in params.items() if name != "layers"}
    each = {
        f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(LAYERS)
    }
    return {**rest, **each}


def run(tx, params: Any, steps=3) -> tuple[Any, Any]:
    """The parameters after some steps, with gradients that differ from step to step."""
    state, step = tx.init(params), jax.jit(tx.update)
    for seed in range(1, steps + 1):
        gradients = jax.tree.map(lambda g: 5 * g, bert_like(seed))
        if "layers" not in params:
            gradients = separated(gradients)
        updates, state = step(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def flat(tree):
    return {name: np.asarray(x) for name, x in named(tree)}


def assert_close(ours, expected, rtol=1e-6):
    ours, expected = flat(ours), flat(expected)
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        np.testing.assert_allclose(x, expected[name], rtol=rtol, atol=1e-6, err_msg=name)


def update(config, gradients, params=PARAMS):
    tx = make_optimizer(config, 10)
    return jax.jit(tx.update)(gradients, tx.init(params), params)[0]


def preset_shapes(name):
    return shapes_of(models.preset(name))


def shapes_of(config):
    model = models.create(config)
    return jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))


# The kernels of a layer are six, and of what stands around the layers:
AROUND = {
    "gpt": ["token_embedding", "position_embedding"],
    "gpt2": ["token_embedding", "position_embedding"],
    "bert-base": [
        *("token_embedding", "position_embedding", "token_type_embedding", "pooler"),
        *("head/transform", "head/next_sentence"),
    ],
}


@pytest.mark.parametrize("name", AROUND)
def test_only_matrices_decay(name):
    decays = flat(decay_mask(preset_shapes(name)))
    for path, decayed in decays.items():
        assert decayed == path.endswith(("/kernel", "/embedding")), path
        assert decayed != path.endswith(("/bias", "/scale")), path
    decayed = [path.rsplit("/", 1)[0] for path, decayed in decays.items() if decayed]
    around = [path for path in decayed if not path.startswith("layers/")]
    assert sorted(around) == sorted(AROUND[name])
    assert len(decayed) - len(around) == 6


def test_decay_by_hand():
    updates = update(CONFIG, jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(updates["linear"]["kernel"], -0.1 * 0.5 * 3, rtol=1e-6)
    np.testing.assert_array_equal(updates["linear"]["bias"], 0)


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
    names = [name for name, _ in named(PARAMS)]
    assert names == ["linear/bias", "linear/kernel"]
    assert count_parameters(PARAMS) == count_parameters(jax.eval_shape(lambda: PARAMS)) == 6


@pytest.mark.slow
def test_plain_adamw_is_optax_s():
    """Its updates, and the form of its state, which checkpoints hold."""
    config = dataclasses.replace(CONFIG, max_gradient_norm=1.0)
    reference = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(0.1, 0.9, 0.95, 1e-8, weight_decay=0.5, mask=decay_mask),
    )
    ours, state = run(make_optimizer(config, 10), bert_like())
    expected, reference_state = run(reference, bert_like())
    assert_close(ours, expected)
    # A schedule counts its steps, which a constant rate need not.
    assert jax.tree.structure(state[1][0]) == jax.tree.structure(reference_state[1][0])
    assert [len(x) for x in state] == [len(x) for x in reference_state]


LAMB = dataclasses.replace(CONFIG, name="lamb")


def test_lamb_of_matrices_is_optax_s():
    matrices = {
        "a": {"kernel": bert_like()["pooler"]["kernel"]},
        "b": {"embedding": bert_like()["token_embedding"]["embedding"]},
        "zero": {"kernel": jnp.zeros((3, 2))},
    }
    gradients = jax.tree.map(lambda x: x[::-1] + 0.3, matrices)
    reference = optax.lamb(0.1, 0.9, 0.95, 1e-8, weight_decay=0.5)
    ours, expected = (
        jax.jit(tx.update)(gradients, tx.init(matrices), matrices)[0]
        for tx in (make_optimizer(LAMB, 10), reference)
    )
    assert_close(ours, expected)


@pytest.mark.slow
def test_lamb_of_a_stack_is_lamb_of_each_layer():
    params = bert_like()
    # Layers of very different sizes: a norm over the stack would show.
    sizes = jnp.array([1.0, 10.0, 100.0])
    params["layers"] = jax.tree.map(
        lambda x: x * sizes.reshape(-1, *(1,) * (x.ndim - 1)), params["layers"]
    )
    tx = make_optimizer(dataclasses.replace(LAMB, max_gradient_norm=2.0), 10)
    stacked, _ = run(tx, params)
    each, _ = run(tx, separated(params))
    assert_close(separated(stacked), each)
    # What optax does of a stack is something else, on all of its layers.
    whole, _ = run(optax.lamb(0.1, 0.9, 0.95, 1e-8, weight_decay=0.5, mask=decay_mask), params)
    apart = np.abs(
        flat(stacked)["layers/attention/query/kernel"]
        - flat(whole)["layers/attention/query/kernel"]
    )
    assert (apart.max(axis=(1, 2, 3)) > 0.01).all()


DECAY = 0.5
RATES = {
    "token_embedding": DECAY**4,
    "position_embedding": DECAY**4,
    "token_type_embedding": DECAY**4,
    "embedding_norm": DECAY**4,
    "layers": np.array([DECAY**3, DECAY**2, DECAY]),
    "pooler": 1.0,
    "head": 1.0,
}


def along_layers(values, x):
    values = np.asarray(values)
    return values.reshape(values.shape + (1,) * (x.ndim - values.ndim)) if values.ndim else values


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_layer_decay_scales_whole_updates(name):
    config = dataclasses.replace(CONFIG, name=name)
    params, gradients = bert_like(), bert_like(1)
    plain, decayed = (
        jax.jit(tx.update)(gradients, tx.init(params), params)[0]
        for tx in (
            make_optimizer(c, 10) for c in (config, dataclasses.replace(config, layer_decay=DECAY))
        )
    )
    expected = {
        part: jax.tree.map(lambda x, rate=RATES[part]: x * along_layers(rate, x), tree)
        for part, tree in plain.items()
    }
    assert_close(decayed, expected)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert-base", "roberta-base", "distilbert-base"])
def test_every_parameter_has_a_depth(name):
    config, decay = models.preset(name), dataclasses.replace(CONFIG, layer_decay=0.9)
    rates = flat(rate_factors(preset_shapes(name), decay))
    assert rates["token_embedding/embedding"] == pytest.approx(0.9 ** (config.num_layers + 1))
    up = rates["layers/feed_forward/up/kernel"]
    assert up.shape == (config.num_layers, 1, 1)
    np.testing.assert_allclose(up.ravel(), 0.9 ** np.arange(config.num_layers, 0, -1), rtol=1e-6)
    assert all(x == 1 for name, x in rates.items() if name.startswith(("head/", "final_norm/")))


def test_an_output_table_is_above_the_layers():
    config = dataclasses.replace(models.preset("gpt2"), tie_output=False)
    rates = flat(rate_factors(shapes_of(config), dataclasses.replace(CONFIG, layer_decay=0.9)))
    assert rates["output_embedding/embedding"] == 1


def test_a_parameter_of_unknown_depth():
    tx = make_optimizer(dataclasses.replace(CONFIG, layer_decay=0.9), 10)
    message = "optimizer.layer_decay .*linear/bias"
    with pytest.raises(ValueError, match=message):
        tx.init(PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_frozen_parameters_stay_and_the_others_do_not_know(name):
    """As if the frozen ones were no parameters: also the norm that is clipped is without them."""
    config = dataclasses.replace(CONFIG, name=name, max_gradient_norm=1.0)
    patterns = ("token_embedding", "layers/[01]", "head/classifier/bias")
    params = bert_like()
    tx = make_optimizer(dataclasses.replace(config, frozen=patterns), 10)
    after, state = run(tx, params)

    def without(tree):
        rest = {name: x for name, x in separated(tree).items() if name not in GONE}
        return {**rest, "head": {"classifier": {"kernel": tree["head"]["classifier"]["kernel"]}}}

    GONE = ("token_embedding", "layer_0", "layer_1")
    frozen_before, frozen_after = flat(separated(params)), flat(separated(after))
    trained = flat(without(params)).keys()
    for path, x in frozen_before.items():
        same = np.array_equal(x, frozen_after[path])
        assert same == (path not in trained), path

    small, expected = make_optimizer(config, 10), without(params)
    small_state, update_small = small.init(expected), jax.jit(small.update)
    for seed in (1, 2, 3):
        gradients = jax.tree.map(lambda g: 5 * g, without(bert_like(seed)))
        updates, small_state = update_small(gradients, small_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert_close(without(after), expected)
    moments = optax.tree_utils.tree_get(state, "mu")
    assert not np.any(moments["token_embedding"]["embedding"])
    assert np.any(moments["layers"]["attention"]["query"]["kernel"], axis=(1, 2, 3)).tolist() == [
        False,
        False,
        True,
    ]


def test_a_frozen_gradient_may_be_nan():
    config = dataclasses.replace(CONFIG, max_gradient_norm=1.0, frozen=("pooler",))
    gradients = bert_like(1)
    gradients["pooler"]["kernel"] = jnp.full((4, 4), jnp.nan)
    updates = update(config, gradients, bert_like())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_frozen_and_decayed_at_once():
    config = dataclasses.replace(CONFIG, layer_decay=DECAY, frozen=("layers/0", ".*embedding.*"))
    rates = flat(rate_factors(bert_like(), config))
    assert rates["layers/attention/query/kernel"].ravel().tolist() == [0, DECAY**2, DECAY]
    assert rates["embedding_norm/bias"] == 0
    assert rates["head/classifier/bias"] == rates["pooler/kernel"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_the_first_moment_in_half_precision(name):
    config = dataclasses.replace(CONFIG, name=name)
    half = dataclasses.replace(config, state_dtype="bfloat16")
    (exact, full), (near, state) = (run(make_optimizer(c, 10), bert_like()) for c in (config, half))
    dtypes = [
        {str(x.dtype) for x in jax.tree.leaves(part)} for part in (state[1][0].mu, state[1][0].nu)
    ]
    assert dtypes == [{"bfloat16"}, {"float32"}]
    assert {str(x.dtype) for x in jax.tree.leaves(full[1][0].mu)} == {"float32"}
    # bfloat16 has 8 bits; a step is at most about as long as its learning rate.
    for ours, expected in zip(jax.tree.leaves(near), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, expected, rtol=0.02, atol=3 * 0.1 * 2**-7)
