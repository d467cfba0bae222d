"""One training, however it is spread: devices, meshes, pmap, micro-batches; dropout is on."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo.data import CausalLMData, DataSplit, TokenizerConfig
from flaxzoo.data.common.errors import counted
from flaxzoo.train import (
    CAUSAL,
    CausalLMConfig,
    MeshConfig,
    Objective,
    init_state,
    make_train_step,
)
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.engine.memory_summary import bytes_per_device
from flaxzoo.train.engine.train_step import divide, weigh
from flaxzoo.train.losses.eval_step import Evaluation, evaluate, unigram_entropy
from flaxzoo.train.losses.micro_batches import micro_batches

from ...support.devices import on_devices

WAYS = {
    "data 8": {"mesh": MeshConfig(data=8)},
    "fsdp 8": {"mesh": MeshConfig(data=1, fsdp=8)},
    "data 2 fsdp 2 tensor 2": {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)},
    "context 8": {"mesh": MeshConfig(data=1, context=8)},
    "fsdp 2 context 2 tensor 2": {"mesh": MeshConfig(data=1, fsdp=2, context=2, tensor=2)},
    "pmap": {"parallel": "pmap"},
    "fsdp 4 tensor 2, 4 micro-batches": {
        "mesh": MeshConfig(data=1, fsdp=4, tensor=2),
        "micro_batches": 4,
    },
    "data 2 fsdp 4, 2 micro-batches, gathered once": {
        "mesh": MeshConfig(data=2, fsdp=4),
        "micro_batches": 2,
        "gather": "step",
    },
    "data 2 fsdp 4, 2 micro-batches": {"mesh": MeshConfig(data=2, fsdp=4), "micro_batches": 2},
    "pmap, 2 micro-batches": {"parallel": "pmap", "micro_batches": 2},
}


@dataclasses.dataclass
class Run:
    """What thirty steps of training leave: by then a difference has grown, if anything differs."""

    program: object
    metrics: list
    native: object
    state: object
    evaluation: dict


def run(config, batches):
    config = dataclasses.replace(config, steps=10 * len(batches))
    program = compile_trainer(config, CAUSAL)
    state, metrics = program.init(), []
    for batch in 10 * batches:
        state, m = program.step(state, batch)
        metrics.append({name: float(x) for name, x in m.items()})
    evaluation = evaluate(program.evaluate, state, batches, CAUSAL, num_rows=16 * len(batches))
    return Run(program, metrics, state, jax.device_get(state), evaluation.means)


@pytest.fixture(scope="module")
def one_device(train_config, batches):
    with on_devices(1):
        return run(train_config(), batches)


@pytest.fixture(scope="module")
def runs(train_config, batches):
    return functools.cache(lambda way: run(train_config(**WAYS[way]), batches))


TOLERANCE = 2e-6


def assert_same(ours, expected):
    for a, b in zip(ours.metrics, expected.metrics, strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE)
    assert int(ours.state.step) == 30
    for (path, a), (_, b) in zip(
        jax.tree.leaves_with_path(ours.state),
        jax.tree.leaves_with_path(expected.state),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE, err_msg=jax.tree_util.keystr(path))
    assert ours.evaluation == pytest.approx(expected.evaluation, rel=TOLERANCE)


QUICK = ("data 8", "fsdp 8")


@pytest.mark.parametrize(
    "way",
    [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS],
)
def test_every_way_trains_the_same_model(way, runs, one_device):
    assert_same(runs(way), one_device)


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_accumulated_on_one_device(number, train_config, batches, one_device):
    with on_devices(1):
        assert_same(run(train_config(micro_batches=number), batches), one_device)


def test_the_batches_would_show_an_average_of_averages(one_device, train_config, batches):
    """The classic bug is far outside the tolerance of the tests above."""
    program, batch = one_device.program, batches[0]
    state = program.init()
    sums, counts, _ = program.evaluate(state, batch)
    right = float(sums["next_token"] / counts["next_token"])
    means = []
    for part in range(2):
        half = {k: np.tile(v[part * 8 : part * 8 + 8], (2, 1)) for k, v in batch.items()}
        sums, counts, _ = program.evaluate(state, half)
        means.append(float(sums["next_token"] / counts["next_token"]))
    assert abs(np.mean(means) / right - 1) > 10 * TOLERANCE


def test_dropout_is_on_and_differs_from_step_to_step(one_device, batches):
    program = one_device.program
    sums, counts, _ = program.evaluate(program.init(), batches[0])
    without = float(sums["next_token"] / counts["next_token"])
    assert abs(one_device.metrics[0]["loss"] - without) > 1e-4


def test_learns(one_device):
    assert all(np.isfinite(x) for m in one_device.metrics for x in m.values())
    assert one_device.metrics[0]["loss"] == pytest.approx(np.log(48), rel=0.05)
    assert one_device.metrics[0]["loss"] == one_device.metrics[0]["next_token"]


def cut_into(array):
    """Over how many different parts an array is spread."""
    return len({str(s.index) for s in array.addressable_shards})


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("data 8", {"up": 1, "embedding": 1, "query": 1, "position": 1}),
        ("fsdp 8", {"up": 8, "embedding": 8, "query": 8, "position": 8}),
        ("data 2 fsdp 2 tensor 2", {"up": 4, "embedding": 4, "query": 4, "position": 2}),
    ],
)
def test_parameters_and_moments_are_sharded(way, parts, runs):
    state = runs(way).native
    adam = next(
        s
        for s in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
        if hasattr(s, "mu")
    )
    for tree in (state.params, adam.mu, adam.nu):
        arrays = {
            "up": tree["layers"]["feed_forward"]["up"]["kernel"],
            "query": tree["layers"]["attention"]["query"]["kernel"],
            "embedding": tree["token_embedding"]["embedding"],
            "position": tree["position_embedding"]["embedding"],
        }
        assert {name: cut_into(x) for name, x in arrays.items()} == parts
        for name, x in arrays.items():
            assert {s.data.size for s in x.addressable_shards} == {x.size // parts[name]}


@pytest.mark.parametrize("way", ["pmap", "fsdp 8"])
def test_the_state_is_what_shapes_promise(way, runs):
    made = runs(way)

    def assert_same(x, shape):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)

    jax.tree.map(assert_same, made.native, made.program.shapes)


@pytest.mark.parametrize(
    ("way", "rows"),
    [("data 8", 2), ("fsdp 8", 2), ("context 8", 16), ("pmap", 2)],
)
def test_what_a_step_is_for_each_device(way, rows, runs):
    made, first = runs(way), jax.devices()[0]
    lies = [
        shard.data.nbytes
        for x in jax.tree.leaves(made.native.params)
        for shard in x.addressable_shards
        if shard.device == first
    ]
    assert bytes_per_device(made.program.shapes.params) == sum(lies)
    expected = (
        f"16 rows of 16 tokens, 256 tokens; each device has {counted(rows, 'row')}, at once, "
    )
    assert expected in made.program.memory_summary


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"mesh": MeshConfig(tensor=2)}, "mesh.tensor 2"), ({"gather": "step"}, "gather step")],
)
def test_pmap_has_no_mesh_and_gathers_nothing(train_config, fields, message):
    with pytest.raises(ValueError, match=message):
        compile_trainer(train_config(parallel="pmap", **fields), CAUSAL)


def test_the_devices_are_described(runs):
    assert runs("pmap").program.description.startswith("pmap over 8 × ")
    assert (
        "data 2, fsdp 2, context 1, tensor 2" in runs("data 2 fsdp 2 tensor 2").program.description
    )


@pytest.mark.parametrize("way", ["data 8", "pmap"])
def test_rows_that_cannot_be_divided_are_refused(way, train_config):
    message = "batch_size 12 .* 8 devices .* 8"
    with pytest.raises(ValueError, match=message):
        compile_trainer(train_config(**WAYS[way], batch_size=12), CAUSAL)


# A model of one number w and an objective of two terms: all of it can be worked by hand.
TWO_TERMS = Objective(
    coefficients={"a": 1.0, "b": 0.5},
    inputs=lambda batch: {"x": batch["x"]},
    counts=lambda batch: {"a": jnp.sum(batch["in_a"]), "b": jnp.sum(batch["in_b"])},
    terms=lambda y, batch: {"a": jnp.sum(y * batch["in_a"]), "b": jnp.sum(y * batch["in_b"])},
)


def two_term_step(in_b, number):
    batch = {
        "x": jnp.array([1.0, 2.0, 3.0, 4.0]),
        "in_a": jnp.array([1.0, 1.0, 1.0, 0.0]),
        "in_b": jnp.array(in_b),
    }
    tx = optax.sgd(1.0)
    step = make_train_step(
        lambda variables, x, rng: variables["params"]["w"] * x,
        TWO_TERMS,
        tx,
        num_micro_batches=number,
    )
    state = init_state({"w": jnp.float32(2)}, tx)
    state, metrics = jax.jit(step)(state, batch, jax.random.key(0))
    return float(state.params["w"]), {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_each_term_is_averaged_over_its_own_items(number):
    w, metrics = two_term_step([0.0, 0.0, 0.0, 1.0], number)
    # a: w (1 + 2 + 3) / 3; b: w · 4 / 1; slope 2 + 0.5 · 4.
    assert metrics == pytest.approx({"loss": 8.0, "a": 4.0, "b": 8.0, "gradient_norm": 4.0})
    assert w == pytest.approx(-2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_term_without_items_is_zero(number):
    w, metrics = two_term_step([0.0] * 4, number)
    assert metrics == pytest.approx({"loss": 4.0, "a": 4.0, "b": 0.0, "gradient_norm": 2.0})
    assert w == pytest.approx(0)


def test_parts_of_the_step():
    parts = micro_batches({"x": jnp.arange(12).reshape(6, 2)}, 3)["x"]
    np.testing.assert_array_equal(parts[:, :, 0] // 2, [[0, 3], [1, 4], [2, 5]])
    sums, counts = ({"a": jnp.float32(a), "b": jnp.float32(b)} for a, b in ((6, 3), (3, 0)))
    means = divide(sums, counts)
    weights = {"a": jnp.float32(1.0), "b": jnp.float32(0.5)}
    assert float(weigh(means, weights)) == 2 + 0.5 * 3


def test_evaluation_by_hand():
    sums, counts = {"next_token": 6.0, "measure": 2.0}, {"next_token": 4.0, "measure": 1.0}
    answers = iter((sums, counts, {"rows": np.array(rows)}) for rows in ([[1], [2]], [[3], [0]]))
    evaluation = evaluate(
        lambda state, batch: next(answers), None, iter([{}, {}]), CAUSAL, num_rows=3
    )
    assert evaluation.loss == 1.5
    assert evaluation.means == {"next_token": 1.5, "measure": 2.0}
    assert evaluation.counts == {"next_token": 8.0, "measure": 2.0}
    # The last row only filled its batch.
    assert evaluation.predictions["rows"].tolist() == [[1], [2], [3]]


def test_scores_of_a_text_by_hand():
    evaluation = Evaluation(1.5, {"next_token": 1.5}, {"next_token": 8.0}, {})
    data = CausalLMData(source="builtin:python-docs", length=4, tokenizer=TokenizerConfig())
    rows: Any = None  # not asked
    split = DataSplit(rows, SimpleNamespace(num_bytes=16), "", "")
    found = CausalLMConfig().score(evaluation, split, data)
    assert found == pytest.approx(
        {
            "loss": 1.5,
            "perplexity": np.exp(1.5),
            "bits_per_byte": 12 / 16 / np.log(2),
            "tokens": 8,
        }
    )


def test_unigram_entropy():
    assert unigram_entropy(np.array([0, 2, 1, 1])) == pytest.approx(1.5 * np.log(2))
