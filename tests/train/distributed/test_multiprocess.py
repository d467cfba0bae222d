"""Several real processes that train together, of four virtual devices each or of one."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.train.cli import main as cli
from flaxzoo.train.distributed import launch
from flaxzoo.train.distributed import multiprocess as processes
from flaxzoo.train.engine import compile as parallel

from ...support.devices import on_devices
from ...support.encoders import fine_tuning, write_labelled
from ...support.run_folders import assert_same, everything, kept, lines, small_run
from .several import go, set_devices

STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small_run(
        tmp_path_factory.mktemp("text"),
        model={"vocab_size": 24, "num_heads": 8},
        steps=STEPS,
        evaluate_every=4,
        checkpoint_every=4,
    )


def assert_close(ours, theirs):
    for one, other in zip(lines(ours), lines(theirs), strict=True):
        our_log, their_log = json.loads(one), json.loads(other)
        assert our_log.pop("split") == their_log.pop("split")
        assert our_log == pytest.approx(their_log, rel=1e-4)
    ours, theirs = everything(ours, STEPS), everything(theirs, STEPS)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=2e-5, err_msg=name)


def one_device(config):
    with on_devices(1):
        return parallel.compile_trainer(config, train.CAUSAL)


@pytest.mark.slow
def test_a_run_moves_between_processes(config, run_in_two, tmp_path, capfd):
    """2 × 4 devices → 1 × 8, and 1 × 8 → 1 × 1 → 2 × 4; SIGTERM comes to one process only."""
    names = ("whole", "parts", "moved", "begun", "tensors", "alone")
    whole, parts, moved, begun, tensors, alone = (tmp_path / name for name in names)
    write_labelled(tmp_path)
    labelled = fine_tuning(tmp_path, "one", steps=2)
    cut = dataclasses.replace(config, mesh=train.MeshConfig(tensor=8))
    assert go(config, begun, "stop", 2).step == 2
    assert go(config, begun, "stop", 4, one_device).step == 4
    jobs = (
        (config, whole, "read", None),
        (config, parts, "stop", 2),
        (config, parts, None, None),
        (config, moved, "stop", 2),
        (config, begun, None, None),
        (cut, tensors, "stop", 1),
        (labelled, tmp_path / "labelled", None, None),
    )
    assert run_in_two(4, *jobs) == 0
    logged = capfd.readouterr().err
    # Both saved the same step, the one after the signal was agreed upon.
    assert "[process 1] step 3, signal 15" in logged
    assert logged.count("step 3, signal 15") == 4
    assert kept(moved) == [3]
    assert lines(parts) == lines(whole)
    assert_same(everything(parts, STEPS), everything(whole, STEPS))
    # A callback reads the parameters that both processes have.
    with np.load(whole.with_suffix(".npz")) as read:
        saved = everything(whole, STEPS)
        assert_same(dict(read), {name: saved[name] for name in read})

    # All predictions are scored, and in their order.
    scored = go(labelled, tmp_path / "labelled-alone").validation
    scores = [json.loads(line) for line in lines(tmp_path / "labelled")]
    assert {**scored, "step": 2, "split": "validation"} == pytest.approx(scores[-1])

    # A process whose devices share every row reads the whole batch.
    for one, other in zip(lines(tensors)[:2], lines(whole)[:2], strict=True):
        assert json.loads(one)["loss"] == pytest.approx(json.loads(other)["loss"], rel=1e-4)

    go(config, moved)
    go(config, alone)
    for run in (whole, moved, begun):
        assert_close(run, alone)
    assert (begun / "report.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "status", "pattern"),
    [
        ("die", 128 + signal.SIGKILL, "process 1 .*SIGKILL"),
        ("freeze", 128 + signal.SIGABRT, "heartbeats"),
        ("fail", 1, r"\[process 1\] FileNotFoundError: "),
    ],
)
def test_a_process_that_is_lost_takes_the_others_with_it(
    config, run_in_two, tmp_path, capfd, monkeypatch, do, status, pattern
):
    monkeypatch.setattr(launch, "ENDING_SECONDS", 1.0)  # for those that do not end by themselves
    # The status proves that the others end early: all 10,000 steps would take hours.
    config = dataclasses.replace(config, steps=10_000, checkpoint_every=10_000)
    assert run_in_two(1, (config, tmp_path / "run", do, 3), silence=15) == status
    logged = capfd.readouterr().err
    assert re.search(pattern, logged)
    assert "the last checkpoint" in logged


@pytest.mark.slow
def test_processes_agree_on_what_does_not_fit_one_of_them(config, run_in_two, tmp_path, capfd):
    """Memory known, parameters are gathered once a step, until one compiler refuses that."""
    config = dataclasses.replace(
        config, mesh=train.MeshConfig(data=1, fsdp=8), steps=4, evaluate_every=4
    )
    by_layer = dataclasses.replace(config, gather="layer")
    ours, expected = tmp_path / "ours", tmp_path / "expected"
    broken = tmp_path / "broken"
    jobs = (
        (config, ours, "has no memory", None),
        (by_layer, expected, None, None),
        (config, broken, "cannot compile", None),
    )
    assert run_in_two(4, *jobs) == 1
    logged = capfd.readouterr().err
    # Process 0 could have gathered them once; and it does not see why process 1 fails at the end.
    assert logged.count("(gathered once a step they do not fit)") == 3
    assert lines(ours) == lines(expected)
    assert_same(everything(ours, 4), everything(expected, 4))
    assert "INTERNAL: a fault of the compiler" in logged
    assert not broken.exists()


COMMAND = (
    "train shakespeare-char --steps 4 --batch-size 8 --parallel pmap --data.validation None "
    "--data.validation-fraction 0.1"
)


@pytest.mark.slow
def test_pmap_with_several_processes_is_refused(config, tmp_path, monkeypatch, capfd):
    set_devices(monkeypatch, 1)
    options = ["--data.source", config.data.source, "--workdir", str(tmp_path / "run")]
    command = [*COMMAND.split(), "--optimizer.warmup-steps", "1", *options]
    assert cli.main(["launch", "--processes", "2", "--", *command]) == 2
    logged = [line for line in capfd.readouterr().err.splitlines() if "flaxzoo" in line]
    assert logged == [
        "flaxzoo: parallel pmap requires a single process, got 2: leave it out (--parallel jit)"
    ]
    assert not (tmp_path / "run").exists()


def test_a_process_stops_waiting_for_the_others_after_the_timeout():
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{launch.free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    module = "flaxzoo.train.distributed.multiprocess"
    program = f"from {module} import distributed_session as meet\nwith meet(1): pass"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert " 2 processes connected at 127.0.0.1:" in ended.stderr
    assert "within 1 s" in ended.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "4"}, False),  # a batch script, outside srun
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, True),
    ],
)
def test_who_has_others(environment, expected):
    assert processes.has_others(environment) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES 'two' .*number"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID 2 .*below"),
    ],
)
def test_an_environment_that_makes_no_sense(monkeypatch, variables, message):
    for name, value in {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(train.RunError, match=message), processes.distributed_session(1):
        pass


# The processes that are launched, without training.


PRELUDE = "import os, signal, sys, time\ni = os.environ['JAX_PROCESS_ID']\n"


def python(text):
    return [sys.executable, "-c", PRELUDE + text]


def test_process_0_has_the_terminal(capfd):
    assert launch.launch(python("print('here', i)"), 2) == 0
    out, err = capfd.readouterr()
    assert out == "here 0\n"
    assert err == "[process 1] here 1\n"


def test_the_others_are_ended_when_one_fails(monkeypatch, capfd):
    monkeypatch.setattr(launch, "ENDING_SECONDS", 0.2)
    assert launch.launch(python("sys.exit(3) if i == '1' else time.sleep(600)"), 3) == 3
    [line] = capfd.readouterr().err.splitlines()
    assert re.match("flaxzoo: process 1 .*status 3.*last checkpoint", line)


def test_an_error_of_all_processes_is_printed_once(capfd):
    assert launch.launch(python("sys.exit(2)"), 2) == 2
    assert capfd.readouterr().err == ""


def test_signals_are_passed_on():
    program = python(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    launcher = (
        "import sys; from flaxzoo.train.distributed.launch import launch;"
        "sys.exit(launch(sys.argv[1:], 2))"
    )
    arguments = [sys.executable, "-c", launcher, *program]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, text=True, stdout=pipe, stderr=pipe) as it:
        assert it.stdout is not None
        assert it.stderr is not None
        assert it.stdout.readline() == "ready\n"
        assert it.stderr.readline() == "[process 1] ready\n"
        it.send_signal(signal.SIGTERM)
        assert it.stderr.read() == ""
    assert it.returncode == 143


def test_gpus_are_divided_among_processes(monkeypatch, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,4,6")
    assert launch.launch(python("print(os.environ['CUDA_VISIBLE_DEVICES'])"), 2) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("0,2\n", "[process 1] 4,6\n")
    with pytest.raises(ValueError, match=r"4 GPUs .* 3 processes"):
        launch.launch(python("pass"), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command train after two dashes"),
        (["train", "quickstart"], "command train after two dashes"),
        (["--", "evaluate", "runs/x"], "command train .*'evaluate': "),
        (["--", "train", "quickstar"], "'quickstar': .*quickstart"),
    ],
)
def test_a_wrong_launch_command_is_refused_in_one_line(capfd, arguments, message):
    assert cli.main(["launch", "--processes", "2", *arguments]) == 2
    logged = capfd.readouterr().err
    assert re.search(message, logged)
    assert logged.count("\n") == 1
