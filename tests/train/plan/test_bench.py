"""`flaxzoo bench`: the real step on synthetic examples, with only jax, flax and optax installed."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.train.cli import main as cli
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.plan import bench
from flaxzoo.train.plan.batch_specs import example_spec, synthetic_batch
from flaxzoo.train.plan.chips import PEAK_FLOPS
from flaxzoo.train.plan.placeholders import without_data

SMALL = "--model.num-layers 1 --model.d-model 16 --model.num-heads 2 --batch-size 2".split()


def bare(*arguments):
    """Run `flaxzoo` with nothing installed but jax, flax and optax."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("bare.py")), *arguments],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_other_commands_name_the_missing_package():
    done = bare("tokenizer", "train", "builtin:python-docs", "out", "--vocab-size", "300")
    assert done.returncode == 2
    assert done.stderr.startswith("flaxzoo: tokenizer needs the package ")
    assert "not installed" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_it_runs_with_nothing_but_jax_flax_and_optax(tmp_path):
    options = [*SMALL, "--timed-steps", "2", "--profile", str(tmp_path / "trace")]
    done = bare("bench", "quickstart", *options)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "attention by XLA" in lines["a"]
    assert "of tracing, " in lines["compile"]
    assert "of 2 steps after 3" in lines["step"]
    assert "tokens/s" in lines["speed"]
    assert "masked ones too" in lines["model"]
    assert "unknown" in lines["utilization"]
    assert "compiler" in lines["memory"]
    assert [x.suffixes for x in (tmp_path / "trace").rglob("*.pb")] == [[".xplane", ".pb"]]
    assert list((tmp_path / "trace").rglob("*.trace.json.gz"))


@pytest.mark.parametrize("parallel", ["jit", pytest.param("pmap", marks=pytest.mark.slow)])
def test_the_timed_step_is_that_of_training(train_config, monkeypatch, parallel):
    config = train_config(parallel=parallel)
    programs = []

    def counted(*args):
        programs.append(compile_trainer(*args))
        return programs[0]

    monkeypatch.setattr(bench, "compile_trainer", counted)
    measured = bench.bench(config, timed_steps=4)
    assert len(programs) == 1
    assert len(measured.seconds) == 4
    assert min(measured.seconds) > 0
    assert measured.tokens == 256
    assert measured.num_parameters == train.count_parameters(programs[0].shapes.params)
    c = config.model
    weights = c.num_layers * 12 * c.d_model**2 + c.vocab_size * c.d_model
    attention = 12 * c.num_layers * config.data.length**2 * c.d_model * config.batch_size
    assert measured.model_flops == 6 * weights * measured.tokens + attention
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(programs[0].init()))
    assert measured.peak_bytes > held


def test_utilization_is_the_formula(train_config, monkeypatch):
    measured = bench.Bench(
        num_parameters=1,
        tokens=2000,
        dtype="bfloat16",
        devices="jit over 4 × NVIDIA H200",
        memory_summary="a step",
        num_devices=4,
        device_kind="NVIDIA H200",
        trace_seconds=1.0,
        compile_seconds=2.0,
        cached=False,
        seconds=(0.4, 0.5, 3.0),
        model_flops=int(989e12),
        peak_bytes=1 << 30,
        peak_source="measured since this process began",
    )
    assert measured.utilization == pytest.approx(989e12 / 0.5 / 4 / 989e12)
    text = "\n".join(bench.report(measured))
    assert "50.0% = FLOPs / (median × 4 × 9.89e+14), the peak of NVIDIA H200 in bfloat16" in text
    assert "500 ms (median), 400 ms (minimum)" in text
    assert "4,000 tokens/s" in text
    assert "1.00 GiB " in text
    assert "2 s, after 1 s of tracing" in text


def test_peak_memory_is_the_devices_own_figure_if_they_have_one():
    class Device:
        platform = "gpu"

        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return {"peak_bytes_in_use": self.peak}

    executable = jax.jit(lambda x: x).lower(1).compile()
    assert bench._peak_memory(executable, [Device(3), Device(5)]) == (
        5,
        "measured since this process began",
    )


def test_peak_flops_include_the_tpus_of_plan():
    assert PEAK_FLOPS["TPU v5 lite"] == 197e12
    assert min(PEAK_FLOPS.values()) > 1e14


@pytest.mark.parametrize("name", ["quickstart", "bert-base-128", "numbers-en-fr", "bert-span"])
def test_synthetic_examples_have_the_shapes_of_real_ones(name):
    config = without_data(dataclasses.replace(train.recipe(name), batch_size=2), lambda _: None)
    batch = synthetic_batch(config)
    assert {n: (x.shape, x.dtype.name) for n, x in batch.items()} == {
        name: ((2, *spec.shape), spec.dtype) for name, spec in example_spec(config).items()
    }
    ids = batch["input_ids"]
    assert 0 <= ids.min() < ids.max() < config.model.vocab_size
    assert len(np.unique(ids)) > 2 * config.data.length // 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("quickstar", " quickstart"),
        (
            "quickstart --batch-size x",
            "--batch-size .*got 'x'",
        ),
        ("quickstart --parallel some", "--parallel .*jit, pmap, got 'some'"),
        (
            "quickstart --model.num-layer=3",
            "--model.num-layer: .*--model.num-layers",
        ),
        ("quickstart 4", "'4'.*bench quickstart --help"),
        ("quickstart --timed-steps 0", "--timed-steps .*got 0"),
        ("quickstart --steps -1", "--steps .*got -1"),
        ("quickstart --mesh.fsdp 3", "multiply .*8 devices"),
        ("quickstart --profile FILE", r"FILE .*\(File exists\)"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, arguments, message):
    (tmp_path / "FILE").touch()
    words = [str(tmp_path / w) if w == "FILE" else w for w in arguments.split()]
    assert cli.main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_help_lists_the_options_and_their_defaults(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "flaxzoo bench quickstart --help" in capsys.readouterr().out
    assert cli.main(["bench", "quickstart", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert "--optimizer.state-dtype" in out
    assert "{float32,bfloat16}" in out
    assert "(default: float32)" in out
    assert "--parallel {jit,pmap}" in out
