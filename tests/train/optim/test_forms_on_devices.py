"""Every optimizer and form of its state: on eight devices as on one, stopped as never stopped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models
from flaxzoo.train import CAUSAL, MeshConfig, init_state
from flaxzoo.train.distributed.sharding import make_mesh, state_shardings
from flaxzoo.train.engine.checkpoint import Checkpoints
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.optim.moments import Blocks
from flaxzoo.train.optim.optimizer import make_optimizer
from flaxzoo.train.optim.parameters import named
from flaxzoo.train.optimizer_config import OptimizerConfig
from jax.sharding import PartitionSpec

from ...support.devices import on_devices

FORMS = {
    "lamb float32": {"name": "lamb", "layer_decay": 0.8, "frozen": ("layers/0",)},
    "adamw bfloat16_stochastic": {"state_dtype": "bfloat16_stochastic"},
    "adamw int8": {"state_dtype": "int8"},
    "lamb int8": {"name": "lamb", "state_dtype": "int8"},
    "adafactor int8": {"name": "adafactor", "adafactor_momentum": True, "state_dtype": "int8"},
    "muon int8": {"name": "muon", "state_dtype": "int8"},
}
MESH = MeshConfig(data=2, fsdp=2, tensor=2)
WAYS = {
    "one device": {},
    "8 devices": {"mesh": MESH},
    "fsdp": {"mesh": MeshConfig(data=1, fsdp=8)},
    "pmap": {"parallel": "pmap"},
}
QUERY, DOWN = "layers/attention/query/kernel", "layers/feed_forward/down/kernel"


@pytest.fixture(scope="module")
def config_of(train_config):
    """`config_of(form, way)`: a GPT whose matrices are large enough for 8 bits and factors."""

    def config(form, way="one device"):
        made = train_config(**WAYS[way])
        sizes = {"d_model": 128, "num_heads": 2, "d_ff": 128, "vocab_size": 128}
        return dataclasses.replace(
            made,
            model=dataclasses.replace(made.model, **sizes),
            optimizer=dataclasses.replace(made.optimizer, **FORMS[form]),
        )

    return config


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_eight_devices_update_as_one(form):
    """Random bits depend on the index of a number, so every device rounds it alike."""
    rng = np.random.default_rng(0)
    params = {
        "token_embedding": {"embedding": rng.normal(size=(128, 128))},
        "layers": {
            "attention": {"query": {"kernel": rng.normal(size=(2, 128, 2, 64))}},
            "feed_forward": {"down": {"bias": rng.normal(size=(2, 128))}},
        },
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    optimizer = OptimizerConfig(
        peak_learning_rate=0.01, max_gradient_norm=None, schedule="constant", **FORMS[form]
    )
    tx = make_optimizer(optimizer, 10)

    def two_steps(state):
        for _ in range(2):
            gradients = jax.tree.map(jnp.sin, state.params)
            updates, opt_state = tx.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
        return state

    state = init_state(params, tx)
    shardings = state_shardings(state, make_mesh(MESH))
    one = jax.jit(two_steps)(state)
    ours = jax.jit(two_steps, out_shardings=shardings)(jax.device_put(state, shardings))
    apart = total = 0
    for (name, a), b in zip(named(ours), jax.tree.leaves(one), strict=True):
        if a.dtype in (jnp.int8, jnp.uint8, jnp.bfloat16):
            apart, total = apart + int((a != b).sum()), total + a.size
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
    # Sums over devices differ in the last bit: hardly a number is near enough to a threshold.
    assert total > 10_000 or "float32" in form
    assert apart <= total * 1e-4


def test_moments_are_sharded_as_their_parameters(config_of):
    mesh = make_mesh(MESH)

    def specs(form):
        config = config_of(form)
        tx = make_optimizer(config.optimizer, config.steps, config.model)
        model = models.create(config.model)
        state = jax.eval_shape(lambda: init_state(models.init_params(model, jax.random.key(0)), tx))
        shardings = state_shardings(state, mesh, config.model)
        return {name: tuple(x.spec) for name, x in named(shardings.opt_state)}

    assert specs("lamb float32")[f"2/0/mu/{QUERY}"] == (None, "fsdp", "tensor", None)
    eight = specs("adamw int8")
    assert eight[f"1/0/mu/{QUERY}/codes"] == (None, "fsdp", "tensor", None)
    assert eight[f"1/0/nu/{QUERY}/scales"] == (None, "fsdp", "tensor", None)
    assert eight[f"1/0/mu/{DOWN}/codes"] == (None, "tensor", "fsdp")
    assert eight[f"1/0/mu/{DOWN}/scales"] == (None, "tensor", "fsdp")
    assert eight["1/0/mu/final_norm/scale"] == (None,)
    assert eight["1/0/count"] == ()
    factored = specs("adafactor int8")
    assert factored[f"1/0/nu/{QUERY}/rows"] == (None, "fsdp")
    assert factored[f"1/0/nu/{QUERY}/columns"] == (None, "tensor", None)
    assert factored[f"1/0/nu/{DOWN}/rows"] == (None, "tensor")
    assert factored[f"1/0/nu/{DOWN}/columns"] == (None, "fsdp")
    muon = specs("muon int8")
    inner = "1/0/inner_states"
    assert muon[f"{inner}/muon/inner_state/0/mu/{QUERY}/codes"][1:3] == ("fsdp", "tensor")
    assert muon[f"{inner}/adam/inner_state/nu/token_embedding/embedding/codes"] == (
        "tensor",
        "fsdp",
    )


def test_scales_of_fewer_blocks_than_shards_are_on_all_devices():
    from flaxzoo.train.distributed.sharding import moment_spec

    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    whole = PartitionSpec("tensor", "fsdp")
    for blocks, last in ((8, "fsdp"), (4, None)):
        spec = moment_spec("scales", (50, blocks), whole, mesh=mesh, axes=None)
        assert spec == PartitionSpec("tensor", last)


@pytest.fixture(scope="module")
def trained(config_of, batches):
    """`trained(form, way)`: the program, the state after the first step, the last one, losses."""

    @functools.cache
    def run(form, way="one device"):
        with on_devices(1 if way == "one device" else 8):
            program = compile_trainer(config_of(form, way), CAUSAL)
            state, first = steps(program, program.init(), batches[:1])
            kept = jax.tree.map(jnp.copy, state)  # the next step consumes it
            state, losses = steps(program, state, batches[1:])
        return program, kept, state, first + losses

    return run


def steps(program, state, batches):
    losses = []
    for batch in batches:
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def restored(state, folder, program):
    with Checkpoints(folder, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(state, {}, None)
        checkpoints.wait()
        return checkpoints.restore(int(state.step), program.shapes)[0]


def assert_equal(one, other):
    for (name, a), b in zip(named(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if "lamb" not in form])
def test_a_resumed_run_is_one_never_stopped(form, trained, batches, tmp_path):
    program, kept, whole, losses = trained(form)
    state = restored(kept, tmp_path, program)
    assert jax.tree.structure(state) == jax.tree.structure(kept)
    assert_equal(state, kept)
    state, resumed = steps(program, state, batches[1:])
    assert resumed == losses[1:]
    assert_equal(state, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "way"),
    [("adamw int8", "8 devices"), ("muon int8", "8 devices"), ("adafactor int8", "pmap")],
)
def test_every_way_trains_the_same_model(form, way, trained):
    _, _, state, losses = trained(form, way)
    _, _, one, expected = trained(form)
    assert losses == pytest.approx(expected, rel=1e-5)
    shapes = jax.tree.map(jnp.shape, state)
    assert shapes == jax.tree.map(jnp.shape, one)


@pytest.mark.slow
def test_a_state_of_8_bits_moves_to_another_mesh(trained, batches, tmp_path):
    _, kept, _, losses = trained("adamw int8", "8 devices")
    other, *_ = trained("adamw int8", "fsdp")
    moved = restored(kept, tmp_path, other)
    assert_equal(moved, kept)
    kernel = moved.opt_state[1][0].mu["layers"]["feed_forward"]["up"]["kernel"]
    assert isinstance(kernel, Blocks)
    assert kernel.codes.dtype == jnp.int8
    _, ours = steps(other, moved, batches[1:])
    assert ours == pytest.approx(losses[1:], rel=1e-5)
