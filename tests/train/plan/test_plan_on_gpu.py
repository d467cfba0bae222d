"""Plans for NVIDIA's GPUs by XLA's compiler for them, if it is installed; no GPU is needed."""

import importlib.util
import os
import subprocess
import sys

import pytest
from flaxzoo.train.cli import main as cli
from flaxzoo.train.plan.chip import Gpu
from flaxzoo.train.plan.chips import CHIPS
from flaxzoo.train.plan.topology import parse_topology

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec(Gpu.package) is None,
        reason="XLA for GPUs is not installed: pip install -e '.[cuda]'",
    ),
]
SMALL = "--model.num-layers 2 --model.d-model 128 --model.num-heads 2 --execution.dtype bfloat16"
GPUS = [name for name, chip in CHIPS.items() if isinstance(chip, Gpu)]


def plan(capfd, *arguments):
    status = cli.main(["plan", "quickstart", *SMALL.split(), *" ".join(arguments).split()])
    return status, capfd.readouterr().out


@pytest.mark.parametrize(
    ("kind", "dropout", "kernel"),
    [*((kind, 0.1, "flash attention in Triton") for kind in GPUS), ("h100", 0.0, "cuDNN")],
)
def test_a_step_that_fits(capfd, kind, dropout, kernel):
    status, out = plan(capfd, f"--topology {kind}:1", f"--model.dropout-rate {dropout}")
    assert status == 0
    assert f"attention by {kernel}" in out
    assert "fits: " in out
    assert "at the peak, by XLA for GPUs" in out
    assert "estimate" in out


@pytest.mark.parametrize(("topology", "between"), [("h100:8", False), ("2*h100:4", True)])
def test_what_is_sent_between_gpus_and_hosts(capfd, topology, between):
    status, out = plan(capfd, f"--topology {topology} --mesh.data 1 --mesh.fsdp 8")
    assert status == 0
    assert ("all-gather between hosts" in out) == between
    assert "reduce-scatter" in out


def test_a_step_that_does_not_fit(capfd):
    status, out = plan(
        capfd, "--topology l4:1 --batch-size 16384 --model.max-length 1024 --data.length 1024"
    )
    assert status == 1
    assert "does not fit: " in out
    assert "would help: XLA_CLIENT_MEM_FRACTION=0.92" in out
    assert "more --micro-batches" in out


COUNT = """
import jax, sys
from flaxzoo import models
from flaxzoo.train.plan.hlo.kernels import kernel_flops
from flaxzoo.train.plan.hlo.parser import parse_hlo
from flaxzoo.train.plan.topology import parse_topology

kernel, rate, window = sys.argv[2], float(sys.argv[3]), int(sys.argv[4]) or None
config = models.GPTConfig(vocab_size=128, max_length=1024, num_layers=3, d_model=256, num_heads=4,
    dropout_rate=rate, local_window=window)
model = models.create(config, models.Execution("bfloat16", attention=kernel))
device = parse_topology(sys.argv[1]).devices()[0]
here = jax.sharding.SingleDeviceSharding(device)
mesh = jax.sharding.Mesh([device], ("data",)).abstract_mesh
ids = jax.ShapeDtypeStruct((2, 1024), "int32", sharding=here)
params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
    jax.eval_shape(model.init, jax.random.key(0), ids),
)
def loss(params, ids):
    rng = models.row_keys(jax.random.key(0), 2) if rate else None
    out = model.apply(params, ids, rng=rng)
    return out.last_hidden_state.astype("float32").sum()
with jax.sharding.use_abstract_mesh(mesh):
    program = jax.jit(jax.grad(loss)).trace(params, ids).lower().compile()
calls = [
    (times, kernel_flops(instruction, computation))
    for computation, times in parse_hlo(program.as_text()).runs(fused=True)
    for instruction in computation.values()
    if kernel_flops(instruction, computation)
]
print(sorted(calls))
"""
CAUSAL, WINDOW = 1024 * 1025 // 2, 1024 * 200 - 200 * 199 // 2
"""Visible pairs of tokens."""


@pytest.mark.parametrize(
    ("kernel", "rate", "window", "matmuls"),
    [
        ("triton", 0.1, 0, {CAUSAL: (2, 3, 4)}),
        ("triton", 0.1, 200, {CAUSAL: (2, 3, 4), WINDOW: (2, 3, 4)}),
        ("cudnn", 0.0, 0, {CAUSAL: (2, 5)}),
    ],
    ids=["triton", "triton window", "cudnn"],
)
def test_the_calls_of_kernels_and_their_matmuls(kernel, rate, window, matmuls):
    """The scan over the layers runs three times; of a window every second one."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT, "h100:1", kernel, str(rate), str(window)],
        env={**os.environ, **parse_topology("h100:1").chip.environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    times = 3.0 / len(matmuls)
    expected = [
        (times, number * 2 * 2 * 4 * pairs * 64)
        for pairs, numbers in matmuls.items()
        for number in numbers
    ]
    assert done.stdout.strip() == str(sorted(expected))
