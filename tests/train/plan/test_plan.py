"""`flaxzoo plan`, in its own processes, for virtual devices."""

import dataclasses
import functools
import math
import re

import jax
import pytest
from flaxzoo import models, train
from flaxzoo.models import token_log_probs
from flaxzoo.train.cli import main as cli
from flaxzoo.train.config import objective_of
from flaxzoo.train.distributed.sharding import make_mesh
from flaxzoo.train.engine.compile import compile_trainer, configured_step
from flaxzoo.train.engine.memory_summary import bytes_per_device
from flaxzoo.train.plan import plan, worker
from flaxzoo.train.plan.chip import GIB, Virtual
from flaxzoo.train.plan.placeholders import without_data
from flaxzoo.train.plan.plan import Collective, Estimate, Plan
from flaxzoo.train.plan.report import report
from flaxzoo.train.plan.topology import parse_topology
from flaxzoo.train.recipes import RECIPES

from ...support.encoders import KINDS, fine_tuning, pretraining

CPUS = parse_topology("cpu:8")


@pytest.mark.slow
def test_bytes_are_those_of_the_real_run(train_config, batches):
    config = train_config(mesh=train.MeshConfig(data=2, fsdp=2, tensor=2))
    made = worker.plan_run(config, CPUS, jax.devices())
    program = compile_trainer(config, objective_of(config))
    state, _ = program.step(program.init(), batches[0])

    def held(tree):
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert made.param_bytes == held(state.params)
    assert made.optimizer_bytes == held(state.opt_state) + 4  # and the step's number
    assert made.batch_bytes == sum(x.nbytes for x in batches[0].values()) // 4
    assert made.num_parameters == train.count_parameters(program.shapes.params)
    assert made.peak_bytes > made.argument_bytes
    assert {x.kind for x in made.collectives} >= {"all-gather", "all-reduce"}


@pytest.mark.slow
def test_adapters_and_their_frozen_base_are_counted(train_config):
    fields = {"mesh": train.MeshConfig(data=1, fsdp=4, tensor=2)}
    lora = models.LoRAConfig(rank=4, targets=("attention",), frozen_dtype="bfloat16")
    whole, adapted = (
        worker.plan_run(train_config(**fields, **more), CPUS, jax.devices())
        for more in ({}, {"lora": lora})
    )
    # Two factors for each of the four maps of both layers, each 32 wide.
    assert adapted.num_parameters == 2 * 4 * 2 * 32 * 4
    assert adapted.frozen_parameters == whole.num_parameters
    assert adapted.frozen_bytes == whole.param_bytes // 2
    assert adapted.optimizer_bytes < 3 * adapted.param_bytes < whole.optimizer_bytes


@pytest.fixture(scope="module")
def planned(train_config):
    """`planned(**fields)`: the plan of a tiny GPT's run on eight devices."""

    @functools.cache
    def planned(**fields):
        return worker.plan_run(train_config(**fields), CPUS, jax.devices())

    return planned


@pytest.fixture
def fully_sharded(planned):
    """Its plan with sharded parameters and all activations recomputed."""
    return planned(mesh=train.MeshConfig(data=1, fsdp=8), execution=models.Execution(remat="full"))


@pytest.mark.slow
def test_model_flops_are_the_formula(train_config, planned):
    """6 for each weight of a matmul and token, and 12 L T² D for the scores of attention."""
    config, made = train_config(), planned()
    c, rows, length = config.model, config.batch_size, config.data.length
    weights = c.num_layers * 12 * c.d_model**2 + c.vocab_size * c.d_model
    attention = 12 * c.num_layers * length**2 * c.d_model * rows
    assert made.model_flops == 6 * weights * rows * length + attention
    assert made.device_flops * 8 == pytest.approx(made.model_flops, rel=0.02)


@pytest.mark.slow
def test_model_flops_are_what_xla_counts_without_a_scan(train_config, planned):
    made = planned()
    unrolled = train_config(execution=models.Execution(layers="unroll"))
    mesh = make_mesh(unrolled.mesh, jax.devices()[:1])
    step = configured_step(unrolled, objective_of(unrolled), mesh)
    batch = worker.batch_shapes(unrolled, step)
    counted = step.trace(batch).lower().compile().cost_analysis()["flops"]
    # XLA also counts elementwise operations, which are many in so narrow a model.
    assert made.model_flops < counted < 1.5 * made.model_flops


@pytest.mark.slow
def test_recomputation_adds_to_the_flops_of_the_devices(fully_sharded):
    made = fully_sharded
    assert 1.15 < made.device_flops * 8 / made.model_flops < 1.34


@pytest.mark.slow
def test_fsdp_sends_parameters_and_no_activations(fully_sharded):
    """Otherwise every device would compute the whole batch."""
    made = fully_sharded
    sent = sum(x.bytes_sent for x in made.collectives)
    assert sent < 12 * 4 * made.num_parameters


@pytest.mark.slow
def test_the_output_projection_is_gathered_once_for_all_chunks(train_config, monkeypatch):
    sent = []
    for positions in (1024, 4):
        monkeypatch.setattr(token_log_probs, "MOST_POSITIONS", positions)
        config = train_config(mesh=train.MeshConfig(data=2, fsdp=4))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
        made = worker.plan_run(config, CPUS, jax.devices())
        sent.append(sum(x.bytes_sent for x in made.collectives))
    assert config.data.length == 16
    assert sent[1] == pytest.approx(sent[0], rel=0.02)


@pytest.mark.parametrize("kind", ["pretraining", "masked", *KINDS])
def test_batch_specs_are_those_of_real_examples(work_folder, kind):
    if kind in KINDS:
        config = fine_tuning(work_folder, kind)
    else:
        config = pretraining(work_folder, next_sentence=kind == "pretraining")
    data = config.data
    labels = data.labels()
    from flaxzoo.data.tokenizers.training import train_tokenizer

    tokenizer = train_tokenizer(data.texts(), data.tokenizer)
    row = data.train_split(tokenizer, labels, 0).examples.example(0, 0)
    spec = data.batch_spec(len(labels), 3)
    assert {name: (one.shape, one.dtype) for name, one in spec.items()} == {
        name: (x.shape, x.dtype.name) for name, x in row.items()
    }


def test_batch_spec_of_packed_examples(train_config, batches):
    spec = train_config().data.batch_spec(0, 0)
    assert {name: (one.shape, one.dtype) for name, one in spec.items()} == {
        name: (x.shape[1:], x.dtype.name) for name, x in batches[0].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned(name):
    """With shapes alone: no array is made."""
    captured = []
    config = without_data(train.recipe(name), captured.append)
    assert config.model.vocab_size > 1
    assert config.steps > 0
    assert config.init_from is None
    mesh = make_mesh(train.MeshConfig(), jax.devices()[:1])
    step = configured_step(config, objective_of(config), mesh)
    batch = worker.batch_shapes(config, step)
    assert all(x.shape[0] == config.batch_size for x in batch.values())
    if bytes_per_device(step.state.params) < GIB >> 6:  # others take seconds to trace
        step.trace(batch)


@pytest.mark.slow
def test_the_command_prints_a_report(capfd):
    arguments = "quickstart --topology cpu:4 --mesh.fsdp 2 --mesh.tensor 2"
    assert cli.main(["plan", *arguments.split(), "--model.num-layers", "2"]) == 0
    out = capfd.readouterr().out
    assert "cpu:4: 4 devices, fsdp 2 × tensor 2" in out
    assert "fits: unknown" in out
    assert "temp buffers" in out
    assert "all-gather" in out
    assert "estimate" not in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("quickstart --topology v5p:3x3x3", "shape "),
        ("quickstart --topology cpu:8 --price 2", "--price 2.0 needs .*cpu:8"),
        ("quickstart --topology h100:8 --price -2", "price must .*-2"),
        ("quickstart --topology cpu:8 --mesh.fsdp 3", "multiply .*8 devices"),
        ("quickstart --topology cpu:8 --mesh.tensor 8", "--mesh.tensor 8"),
        ("quickstart --topology cpu:8 --parallel pmap", "parallel pmap .*planned"),
        ("quickstart", "devices: --topology h100:8, v5e:4x4, .*cpu:8"),
        ("quickstart --topology v9:2", r"\(v4, v5e, v5p, v6e, l4, "),
        ("quickstar --topology cpu:8", " quickstart"),
    ],
)
def test_a_mistake_is_one_line(capfd, arguments, message):
    assert cli.main(["plan", *arguments.split()]) == 2
    captured = capfd.readouterr()
    assert re.search(message, captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_tpu_compiler_is_named(monkeypatch, train_config):
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(train.RunError, match=r"flaxzoo\[tpu\]'.*--topology cpu:16.*memory"):
        plan.make_plan(train_config(), parse_topology("v5e:4x4"))


@pytest.mark.slow
def test_a_compiler_that_breaks_off_is_quoted(monkeypatch, train_config):
    monkeypatch.setattr(Virtual, "environment", lambda self: {"JAX_PLATFORMS": "nothing"})
    with pytest.raises(train.RunError, match=r"cpu:8 .*status 1 "):
        plan.make_plan(train_config(), CPUS)


def example(**fields):
    collectives = (Collective("all-gather", 96, 10**9, 0.25),)
    return Plan(
        **{
            "topology": "v5e:4x4",
            "num_devices": 16,
            "mesh": {"data": 1, "fsdp": 16, "expert": 1, "tensor": 1, "context": 1},
            "tokens": 10_000,
            "num_parameters": 10**9,
            "model_parameters": 10**9,
            "param_bytes": GIB,
            "optimizer_bytes": 2 * GIB,
            "batch_bytes": 1024,
            "model_flops": 16 * 197 * 10**12,
            "seconds": 20.0,
            "temp_bytes": 4 * GIB,
            "device_flops": 2 * 197 * 10**12,
            "hbm_bytes": 410 * 10**9,
            "collectives": collectives,
            **fields,
        }
    )


def test_the_estimate_is_the_roofline():
    topology = parse_topology("v5e:4x4")
    estimate = Estimate.from_plan(example(), topology)
    assert (estimate.matmuls, estimate.hbm, estimate.interconnect) == pytest.approx((2, 0.5, 0.25))
    assert (estimate.overlapped, estimate.sequential) == pytest.approx((2, 2.75))
    assert estimate.utilization(example(), topology) == pytest.approx((1 / 2.75, 1 / 2))


def test_the_totals_of_a_run(train_config):
    """10,000 tokens a step: GPT-3's 300 billion tokens are 30 million steps."""
    config = train_config(steps=1000)
    text = "\n".join(report(example(), config, parse_topology("v5e:4x4"), price=1.5))
    assert "the run of 1,000 steps" in text
    assert "1e+07, 0.04 GB of text at 4 bytes" in text
    assert "300 billion tokens (GPT-3) are 30,000,000 steps, and 570 GB of text 14,250,000" in text
    assert f"{16 * 197e15:.3g} FLOPs" in text
    # 2 s to 2.75 s a step on 16 devices.
    assert "0.556 to 0.764 hours" in text
    assert "8.89 to 12.2 device-hours, 13.33 to 18.33 at 1.5 each" in text
    letters = "\n".join(report(example(), config, CPUS, bytes_per_token=1.0))
    assert "570 GB of text 57,000,000" in letters
    assert "hours" not in letters


def test_large_totals_of_a_run_have_all_digits(train_config):
    config = train_config(steps=10**8)
    text = "\n".join(report(example(seconds=2190.4), config, parse_topology("v5e:4x4"), price=1.5))
    assert "1e+12, 4,000 GB of text" in text
    assert "55,556 to 76,389 hours by the estimate, 888,889 to 1,222,222 device-hours" in text
    assert "1,333,333.33 to 1,833,333.33 at 1.5 each" in text
    assert "planned in 2,190 s" in text


OUT_OF_MEMORY = {
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.75G of 15.75G hbm. "
    "Exceeded hbm capacity by 5.00G.": 20.75,
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(256.00G) exceeds available HBM (15.75G).": 256,
}


@pytest.mark.parametrize("message", OUT_OF_MEMORY)
def test_a_step_that_does_not_fit_is_reported_with_advice(train_config, message):
    used = OUT_OF_MEMORY[message]
    assert plan.used_bytes(message) == used * GIB
    refused = example(temp_bytes=math.inf, out_of_memory=message, collectives=(), device_flops=0)
    config = train_config(batch_size=64, micro_batches=2)
    text = "\n".join(report(refused, config, parse_topology("v5e:4x4")))
    assert f"{used:.2f} GiB on a device of 15.75 GiB, {used - 15.75:.2f} GiB" in text
    assert "--execution.remat full" in text
    assert "--micro-batches, up to 4" in text
    temporary = used if used == 256 else used - refused.argument_bytes / GIB
    assert f"about {temporary:.2f} GiB" in text
    large = dataclasses.replace(refused, optimizer_bytes=5 * GIB)
    text = "\n".join(report(large, config, parse_topology("v5e:4x4")))
    assert "--optimizer.state-dtype int8" in text
    assert "estimate" not in text


def test_a_step_whose_parts_exceed_the_memory_may_not_fit(train_config):
    tight = example(temp_bytes=14 * GIB)
    text = "\n".join(report(tight, train_config(batch_size=64), parse_topology("v5e:4x4")))
    assert "17.00 GiB of 15.75" in text
    assert "--execution.remat full" in text
