"""Gradients are exchanged between devices once a step, and the step stays the same."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.init import init_params
from flaxzoo.models.nn.kernels import flash
from flaxzoo.train.distributed import fsdp, gradient_exchange
from flaxzoo.train.distributed.sharding import batch_sharding, make_mesh
from flaxzoo.train.engine.memory_summary import peak_bytes
from flaxzoo.train.engine.sharded_step import ShardedStep
from flaxzoo.train.optim.parameters import is_stacked, named
from flaxzoo.train.plan.hlo.collectives import collective_ops
from flaxzoo.train.plan.hlo.parser import parse_hlo
from jax.sharding import PartitionSpec

GPT = models.GPTConfig(vocab_size=48, max_length=16, num_layers=2, d_model=32, num_heads=4)
BERT = models.BertConfig(vocab_size=48, max_length=16, num_layers=2, d_model=32, num_heads=4)
MIXTURE = dataclasses.replace(GPT, num_experts=4, router_balance=0.1)
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 48, (16, 17)).astype(np.int32)
REAL = (np.arange(16) < RNG.integers(2, 17, (16, 1))).astype(np.int32)
MASKED = {
    "input_ids": IDS[:, :-1],
    "attention_mask": REAL,
    "masked_positions": np.tile(np.arange(4, dtype=np.int32) * 4, (16, 1)),
    "masked_labels": IDS[:, 1:5],
    "masked_weights": REAL[:, ::4],
    "next_sentence_label": IDS[:, 16] % 2,
}
SIZES = {"num_layers": 2, "d_model": 32, "num_heads": 4}
LLAMA = LlamaConfig(vocab_size=48, max_length=16, **SIZES, tie_output=False)
MODELS = {"gpt": GPT, "bert": BERT, "mixture": MIXTURE}
# Without rematerialization the compiler gathers layer by layer, and else the layers do.
WAYS = {
    "gpt": (("step", "none"), ("layer", "none"), ("layer", "full")),
    "bert": (("layer", "full"),),  # whose objective counts other tokens
    "mixture": (("step", "none"), ("layer", "full")),  # whose router sums over the whole batch
}
"""`gather` and `remat` of the steps that are compared with one device."""


def case(name):
    """A model's configuration, objective and batch."""
    if name == "bert":
        return BERT, train.PRETRAINING, MASKED
    positions = np.tile(np.arange(16, dtype=np.int32), (16, 1))
    batch = {"input_ids": IDS[:, :-1], "labels": IDS[:, 1:]}
    batch |= {"segment_ids": REAL, "position_ids": positions}
    config = LLAMA if name == "llama" else MODELS[name]
    return config, train.with_router(train.CAUSAL, config), batch


def sharded_step(name, mesh, *, dtype="float32", remat="none", layers="scan", **options):
    config, objective, _ = case(name)
    model = models.create(config, models.Execution(dtype=dtype, remat=remat, layers=layers))
    return train.make_sharded_step(model, objective, optax.sgd(0.1), mesh, **options)


def stepped(name, mesh, **options):
    """Parameters and metrics after two steps, with dropout."""
    sharded = sharded_step(name, mesh, **options)
    state, batch = sharded.init(jax.random.key(0)), train.shard_batch(case(name)[2], mesh)
    metrics = {}
    for _ in range(2):
        state, metrics = sharded.step(state, batch, jax.random.key(1))
    return jax.device_get((state.params, metrics))


def mesh_of(**sizes):
    return make_mesh(train.MeshConfig(**{"data": 1, **sizes}))


TOLERANCE = 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_eight_devices_take_the_step_of_one(name):
    one = make_mesh(train.MeshConfig(data=1), jax.devices()[:1])
    expected = stepped(name, one)
    for gather, remat in WAYS[name]:
        mesh = mesh_of(data=2, fsdp=4)
        found = stepped(name, mesh, gather=gather, remat=remat, num_micro_batches=2)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE),
            found,
            expected,
        )


@pytest.mark.parametrize("shape", [(8, 3), (5, 16), (2, 3, 24, 5)])
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}])
def test_shards_scattered_in_stages_are_those_scattered_at_once(shape, sizes):
    mesh, dimension = mesh_of(**sizes), [size % 4 for size in shape].index(0)
    stages = fsdp.scatter_stages(mesh.shape["fsdp"])
    assert [len(groups[0]) for groups in stages] == [mesh.shape["fsdp"] // 2, 2]
    spec = PartitionSpec(*(None,) * dimension, "fsdp")
    x = np.random.default_rng(0).integers(-99, 99, (8, *shape)).astype(np.float32)

    def summed(stages):
        scatter = jax.shard_map(
            lambda x: fsdp.Wire(None, stages).scatter(x[0], spec, {"data", "fsdp"}),
            mesh=mesh,
            in_specs=PartitionSpec(("data", "fsdp")),
            out_specs=spec,
            check_vma=False,
        )
        return np.asarray(jax.jit(scatter)(x))

    np.testing.assert_array_equal(summed(stages), x.sum(0))
    np.testing.assert_array_equal(summed(()), x.sum(0))


def test_a_prime_number_of_devices_has_no_stages():
    assert fsdp.scatter_stages(7) == fsdp.scatter_stages(1) == ()


@pytest.mark.slow
def test_a_kernel_that_drops_weights_within_an_exchange(monkeypatch):
    """Divided by hand over `data`, then over `fsdp` for the kernel (interpreted) alone."""
    interpreted = functools.partial(flash.pl.pallas_call, interpret=True)
    monkeypatch.setattr(flash.pl, "pallas_call", interpreted)
    config = dataclasses.replace(GPT, max_length=128, num_layers=1, dropout_rate=0.1)
    ids = np.random.default_rng(1).integers(0, 48, (16, 129)).astype(np.int32)
    positions = np.tile(np.arange(128, dtype=np.int32), (16, 1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions}
    batch["segment_ids"] = (positions < 100).astype(np.int32)

    def metrics(attention, mesh, **options):
        model = models.create(config, models.Execution(attention=attention))
        step = train.make_sharded_step(model, train.CAUSAL, optax.sgd(0.1), mesh, **options)
        state, placed = step.init(jax.random.key(0)), train.shard_batch(batch, mesh)
        traced = step.step.trace(state, placed, jax.random.key(1))
        assert ("pallas_call" in str(traced.jaxpr)) == (attention == "flash")
        _, found = step.step(state, placed, jax.random.key(1))
        return {name: float(x) for name, x in found.items()}

    mesh = mesh_of(data=2, fsdp=4)
    ours = metrics("flash", mesh, gather="layer", num_micro_batches=2)
    one = metrics("xla", make_mesh(train.MeshConfig(data=1), jax.devices()[:1]))
    assert ours == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixture", {"gather": "step", "num_micro_batches": 2}),
        ("llama", {"gather": "step", "num_micro_batches": 2}),
        ("llama", {"gather": "step"}),
    ],
)
def test_parameters_are_gathered_in_the_dtype_that_the_model_casts_them_to(name, options):
    """Copies under `data` are not rounded, and give the same numbers."""
    number = options.get("num_micro_batches", 1)
    copies = stepped(name, mesh_of(data=8), dtype="bfloat16", num_micro_batches=number)
    shards = stepped(name, mesh_of(fsdp=8), dtype="bfloat16", **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE),
        shards,
        copies,
    )


def collectives(mesh, **options):
    """Those of a compiled step that send a part worth counting, and the number of parameters."""
    sharded = sharded_step("gpt", mesh, **options)
    placed = train.shard_batch(case("gpt")[2], mesh)
    program = sharded.step.lower(sharded.state, placed, jax.random.key(1)).compile()
    number = sum(x.size for x in jax.tree.leaves(sharded.state.params))
    return collective_ops(parse_hlo(program.as_text()), mesh.size), number


def sent(ops):
    return sum(op.count * op.bytes_sent for op in ops)


@pytest.mark.parametrize(
    "sizes", [{"data": 8}, pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow)]
)
def test_gradients_are_exchanged_outside_of_the_loop_over_micro_batches(sizes):
    mesh = mesh_of(**sizes)
    ops, number = collectives(mesh, gather="step", num_micro_batches=2)
    assert all(op.count == 1 for op in ops)
    copies, shards = mesh.shape["data"], mesh.shape["fsdp"]
    # 4 bytes each: gathered and scattered among shards, and a shard summed over copies.
    least = 2 * 4 * number * ((shards - 1) / shards + (copies - 1) / copies / shards)
    assert least <= 1.001 * sent(ops)
    assert sent(ops) < 1.1 * least
    assert {op.kind for op in ops} <= {"all-reduce", "all-gather", "reduce-scatter"}
    if shards > 1:
        assert sent(op for op in ops if op.kind == "reduce-scatter") > 0.3 * least


@pytest.mark.slow
@pytest.mark.parametrize(("number", "expected"), [(1, "bf16"), (2, "f32")])
def test_gradients_are_exchanged_in_the_dtype_of_their_sums(number, expected):
    """A single micro-batch computes those of linear maps in bfloat16."""
    options = {"dtype": "bfloat16", "num_micro_batches": number}
    mesh = mesh_of(data=8)
    sharded = sharded_step("gpt", mesh, **options)
    placed = train.shard_batch(case("gpt")[2], mesh)
    text = sharded.step.lower(sharded.state, placed, jax.random.key(1)).as_text()
    sums = re.findall(r"stablehlo.all_reduce.*?\}\) : \(tensor<([^>]*)>", text, re.DOTALL)
    assert {f"2x32x128x{expected}", "48x32xf32", "2x32xf32"} <= set(sums)
    one = make_mesh(train.MeshConfig(data=1), jax.devices()[:1])
    loss, expected = (float(stepped("gpt", m, **options)[1]["loss"]) for m in (mesh, one))
    assert loss == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_by_layers_copies_still_exchange_once(remat):
    """Shards are gathered in each micro-batch; sums over `data` are taken once."""
    mesh = mesh_of(data=2, fsdp=4)
    ops, number = collectives(mesh, gather="layer", remat=remat, num_micro_batches=2)
    across = [op for op in ops if 4 in op.group]  # the first device of the second copy
    assert {op.count for op in across} == {1}
    assert sent(across) < 1.3 * 2 * 4 * number / 4 / 2  # biases and norms are no shards


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_layers_gather_their_parameters_twice_and_scatter_gradients_once(remat):
    """And embeddings are gathered once; all in each micro-batch."""
    ops, _ = collectives(mesh_of(fsdp=8), gather="layer", remat=remat, num_micro_batches=2)
    shapes = sharded_step("gpt", mesh_of(fsdp=8)).state.params
    sizes = {name: x.size for name, x in named(shapes) if "fsdp" in x.sharding.spec}
    layers = sum(size for name, size in sizes.items() if is_stacked(name))
    others = sum(sizes.values()) - layers
    units = 2 * 4 * 7 / 8  # micro-batches, bytes and other devices
    least = {"all-gather": 2 * layers + others, "reduce-scatter": layers + others}
    for kind, number in least.items():
        assert sent(op for op in ops if op.kind == kind) == pytest.approx(units * number, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_layers_scatter_gradients_in_the_dtype_of_the_computation(layers):
    """The untied vocabulary matrix among them; the embedding of tokens is a sum in float32."""
    options = {"dtype": "bfloat16", "gather": "layer", "layers": layers, "remat": "dots"}
    mesh = mesh_of(fsdp=8)
    sharded = sharded_step("llama", mesh, **options)
    placed = train.shard_batch(case("llama")[2], mesh)
    text = sharded.step.lower(sharded.state, placed, jax.random.key(1)).as_text()
    sums = re.findall(r"stablehlo.reduce_scatter.*?\}\) : \(tensor<([^>]*)>", text, re.DOTALL)
    assert {one for one in sums if one.startswith("48x")} == {"48x32xbf16", "48x32xf32"}
    assert {one.rsplit("x", 1)[1] for one in sums if not one.startswith("48x")} == {"bf16"}
    one = make_mesh(train.MeshConfig(data=1), jax.devices()[:1])
    ours = float(stepped("llama", mesh, **options)[1]["loss"])
    assert ours == pytest.approx(float(stepped("llama", one, **options)[1]["loss"]), rel=1e-3)


@pytest.mark.slow
def test_another_model_within_a_step_has_its_whole_parameters():
    """A teacher that an objective calls by itself, with parameters of the same names."""
    config, objective, batch = case("gpt")
    teacher = models.create(config)
    whole = jax.device_get(init_params(teacher, jax.random.key(5)))
    names = ("input_ids", "position_ids", "segment_ids")

    def terms(outputs, batch):
        params = jax.tree.map(jnp.asarray, whole)
        theirs = teacher.apply({"params": params}, **{name: batch[name] for name in names})
        distance = jnp.sum(jnp.square(theirs.logits - outputs.logits).mean(-1))
        return {**objective.terms(outputs, batch), "distance": distance}

    def counts(batch):
        return {**objective.counts(batch), "distance": jnp.float32(batch["labels"].size)}

    coefficients = {**objective.coefficients, "distance": 1.0}
    distilled = dataclasses.replace(
        objective, terms=terms, counts=counts, coefficients=coefficients
    )

    def metrics(mesh, gather):
        model = models.create(config, models.Execution(remat="full"))
        step = train.make_sharded_step(model, distilled, optax.sgd(0.1), mesh, gather=gather)
        state, placed = step.init(jax.random.key(0)), train.shard_batch(batch, mesh)
        _, found = step.step(state, placed, jax.random.key(1))
        return {name: float(x) for name, x in found.items()}

    one = metrics(make_mesh(train.MeshConfig(data=1), jax.devices()[:1]), "layer")
    for gather in ("layer", "step"):
        assert metrics(mesh_of(fsdp=8), gather) == pytest.approx(one, rel=1e-5)


@pytest.fixture(scope="module")
def fitted():
    """`fitted(memory)`: a step whose way is chosen by the memory of a device, and that compiled."""

    def fitted(memory):
        sharded = sharded_step(
            "gpt", mesh_of(fsdp=8), remat="full", gather="auto", device_memory=memory
        )
        shapes = {name: (x.shape, x.dtype) for name, x in case("gpt")[2].items()}
        batch = {
            name: jax.ShapeDtypeStruct(*x, sharding=batch_sharding(sharded.mesh, x[0]))
            for name, x in shapes.items()
        }
        return sharded, *sharded.compile(batch)

    return fitted


BY_STEP, BY_LAYER = "gradients exchanged once a step; param", "parameters gathered layer by layer; "


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_compiled_with_another_exchange(fitted, monkeypatch):
    sharded, step, program = fitted(2_000_000)
    assert len(sharded.candidates) == 2
    assert step.exchange == sharded.exchange
    peak = peak_bytes(program.memory_analysis())
    for memory, expected in ((peak, BY_STEP), (peak - 1, BY_LAYER)):
        sharded, step, _ = fitted(memory)
        assert sharded.exchange.startswith(BY_STEP)
        assert step.exchange.startswith(expected)
    # Whole parameters and gradients alone are too much.
    assert fitted(200_000)[0].exchange.startswith(BY_LAYER)

    trace = ShardedStep.trace

    def refused(step, batch, candidate):
        if candidate.exchange.startswith(BY_STEP):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")
        return trace(step, batch, candidate)

    monkeypatch.setattr(ShardedStep, "trace", refused)
    assert fitted(peak)[1].exchange.startswith(BY_LAYER)


@pytest.mark.parametrize(
    ("sizes", "fits", "expected"),
    [
        ({"fsdp": 8}, True, ("step", "layer")),
        ({"data": 2, "fsdp": 4}, True, ("step", "layer")),
        ({"fsdp": 8}, False, ("layer",)),
        ({"data": 8}, True, ("layer",)),
        ({"fsdp": 4, "tensor": 2}, True, ("layer",)),
    ],
)
def test_parameters_are_gathered_whole_if_they_fit(sizes, fits, expected):
    found = gradient_exchange.gather_candidates(
        "auto", mesh_of(**sizes), whole_batch=False, fits=fits
    )
    assert found == expected


@pytest.mark.parametrize(
    ("dtype", "number", "expected"),
    [
        (None, 1, 2 * 120 + 120),
        (None, 2, 2 * 120 + 120 + 120),
        ("bfloat16", 1, 2 * 80 + 80),
        ("bfloat16", 2, 2 * 80 + 120 + 80),
    ],
)
def test_bytes_of_gathered_parameters(dtype, number, expected):
    """Parameters, gradients and, with micro-batches, their sums; and a frozen model.

    Linear maps are held, and their gradients computed, in the dtype of the computation.
    """
    shapes = {"up": {"kernel": (20,)}, "norm": {"scale": (10,)}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = train.init_state(params, optax.identity(), params)
    assert gradient_exchange.full_bytes(state, dtype, number) == expected


def test_gather_step_is_refused_where_it_cannot_work():
    with pytest.raises(UserError, match=r"gather step .*mesh.tensor .*2"):
        sharded_step("gpt", mesh_of(fsdp=4, tensor=2), gather="step")
    objective = dataclasses.replace(train.CAUSAL, whole_batch=True)
    with pytest.raises(UserError, match=r"gather step .*batch"):
        train.make_sharded_step(
            models.create(GPT), objective, optax.sgd(0.1), mesh_of(fsdp=8), gather="step"
        )


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"data": 8}, {"num_micro_batches": 2}, "gradients exchanged once a step"),
        (
            {"data": 4, "tensor": 2},
            {"num_micro_batches": 2},
            "gradients exchanged in each micro-batch",
        ),
        (
            {"fsdp": 8},
            {"gather": "step"},
            "gradients exchanged once a step; parameters gathered once a step, which takes "
            "220.2 KB in addition to the state (less with --gather layer)",
        ),
        (
            {"data": 2, "fsdp": 4},
            {"num_micro_batches": 2},
            "parameters gathered layer by layer by the compiler; gradients exchanged in each "
            "micro-batch among the devices of fsdp",
        ),
        (
            {"fsdp": 8},
            {},
            "parameters gathered layer by layer by the compiler; gradients exchanged once a step",
        ),
        (
            {"fsdp": 8},
            {"remat": "dots"},
            "parameters gathered layer by layer; gradients exchanged once a step",
        ),
    ],
)
def test_the_exchange_is_described(sizes, options, expected):
    assert sharded_step("gpt", mesh_of(**sizes), **options).exchange == expected


def test_parts_of_a_model_exchange_no_gradients():
    mesh = make_mesh(train.MeshConfig(data=1, tensor=4), jax.devices()[:4])
    assert sharded_step("gpt", mesh, num_micro_batches=2).exchange == ""
