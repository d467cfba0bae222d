"""Plans for real TPUs by their own compiler, if it is installed."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest
from flaxzoo import train
from flaxzoo.train.cli import main as cli
from flaxzoo.train.plan.placeholders import without_data
from flaxzoo.train.plan.plan import make_plan
from flaxzoo.train.plan.topology import parse_topology

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed: pip install -e '.[tpu]'",
    ),
]
SMALL = "--model.num-layers 2 --model.d-model 128 --model.num-heads 1 --execution.remat full"

ATTENTION = "--model.dropout-rate 0 --model.max-length 256 --data.length 256"


@pytest.fixture(autouse=True)
def without_flags_of_cpus(monkeypatch):
    """The compiler runs in another process, and ends at flags that only a CPU's compiler knows."""
    monkeypatch.delenv("XLA_FLAGS")


def plan(capfd, *arguments):
    status = cli.main(["plan", "quickstart", *SMALL.split(), *" ".join(arguments).split()])
    return status, capfd.readouterr().out


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v5e:1x1", ""),
        ("v4:2x2x1", "--mesh.fsdp 4"),
        ("v5p:2x2x1", "--mesh.fsdp 2 --mesh.tensor 1"),
        ("2*v6e:2x2", "--mesh.data 2 --mesh.fsdp 4"),
    ],
)
def test_a_step_that_fits(capfd, topology, mesh):
    status, out = plan(capfd, "--topology", topology, mesh)
    assert status == 0
    assert "fits: " in out
    assert "estimate" in out
    assert ("between slices" in out) == topology.startswith("2*")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (
            "gpt3-175b --topology v5p:8x8x8 --mesh.fsdp 512 --execution.remat full",
            "174,604,259,328 parameters, a vocabulary of 50,257",
        ),
        (
            "wmt14-en-de-big --topology v5e:2x4",
            "214,171,648 parameters, a vocabulary of 37,000",
        ),
    ],
)
def test_a_published_recipe_fits(capfd, words, model):
    assert cli.main(["plan", *words.split()]) == 0
    out = capfd.readouterr().out
    assert f"the model: {model}\n" in out
    assert "\nfits: " in out


def test_a_step_that_does_not_fit(capfd):
    status, out = plan(
        capfd, "--topology v5e:1x1 --batch-size 65536 --model.max-length 1024 --data.length 1024"
    )
    assert status == 1
    assert "does not fit: " in out
    assert "more --micro-batches" in out


def test_the_kernel_is_that_of_the_real_run_or_the_reason_is_given(capfd):
    _, out = plan(capfd, "--topology v5e:1x1 --data.length 64")
    assert "attention by XLA, not by flash attention: rows have" in out
    _, out = plan(capfd, "--topology v5e:1x1", ATTENTION)
    assert "attention by splash attention\n" in out
    _, out = plan(capfd, "--topology v5e:2x2", ATTENTION.replace("rate 0", "rate 0.1"))
    assert "attention by flash attention\n" in out
    assert "fits: " in out


@pytest.mark.parametrize(("data", "fsdp"), [(1, 16), (2, 8)])
def test_gathered_once_a_step_gradients_are_scattered_and_not_summed_everywhere(data, fsdp):
    config = train.recipe("quickstart")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=2, vocab_size=1000),
        data=dataclasses.replace(config.data, length=64),
        batch_size=64,
        micro_batches=2,
        mesh=train.MeshConfig(data=data, fsdp=fsdp),
        gather="step",
    )
    plan = make_plan(without_data(config, lambda line: None), parse_topology("v5e:4x4"))
    scattered, summed = (
        sum(one.bytes_sent for one in plan.collectives if one.kind == kind)
        for kind in ("reduce-scatter", "all-reduce")
    )
    whole = 4 * plan.num_parameters
    assert 0.9 * whole < scattered / (fsdp - 1) * fsdp < 1.1 * whole
    # Only the shards are summed over copies, and what is too small to be sharded.
    assert summed < 2 * whole * (data - 1) / data / fsdp + 0.01 * whole


COUNT = """
import jax, sys
from flaxzoo import models
from flaxzoo.train.plan.hlo.kernels import kernel_flops
from flaxzoo.train.plan.hlo.parser import parse_hlo
from flaxzoo.train.plan.topology import parse_topology

rate = 0.1 if sys.argv[2] == "flash" else 0.0
config = models.GPTConfig(vocab_size=128, max_length=1024, num_layers=3, d_model=256, num_heads=4,
    dropout_rate=rate, local_window=200)
model = models.create(config, models.Execution("bfloat16", attention=sys.argv[2]))
here = jax.sharding.SingleDeviceSharding(parse_topology(sys.argv[1]).devices()[0])
ids = jax.ShapeDtypeStruct((2, 1024), "int32", sharding=here)
params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
    jax.eval_shape(model.init, jax.random.key(0), ids),
)
def loss(params, ids):
    rng = models.row_keys(jax.random.key(0), 2) if rate else None
    out = model.apply(params, ids, segment_ids=ids, rng=rng)
    return out.last_hidden_state.astype("float32").sum()
text = jax.jit(jax.grad(loss)).trace(params, ids).lower().compile().as_text()
calls = [
    (
        instruction.name.split(".")[0].split("_segmented")[0],
        times,
        kernel_flops(instruction, computation),
    )
    for computation, times in parse_hlo(text).runs(fused=True)
    for instruction in computation.values()
    if 'tpu_custom_call' in instruction.attributes
]
print(sorted(calls))
"""


PHASES = {
    "splash": {"splash_mha_dkv": 4, "splash_mha_dq": 3, "splash_mha_fwd": 2},
    "flash": {"flash_bwd": 5, "flash_fwd": 2},
}
"""The matmuls of each kernel."""


@pytest.mark.parametrize("topology", ["v5e:1x1", "v5p:2x2x1"])
@pytest.mark.parametrize("kernel", list(PHASES))
def test_the_calls_of_kernels_and_their_matmuls(topology, kernel):
    """Heads of size 64 are not padded; banded layers compute the blocks of 512 of causal ones."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, topology, kernel],
        env={**os.environ, **parse_topology(topology).chip.environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    matmul = 2 * 2 * 4 * 1024**2 * 64 * 3 // 4  # sequences, heads, pairs; three of four blocks
    expected = [
        (phase, 1.5, number * matmul) for phase, number in PHASES[kernel].items() for _ in range(2)
    ]
    assert done.stdout.strip() == str(expected)
