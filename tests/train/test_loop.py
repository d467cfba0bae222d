"""Runs from end to end: stopped anywhere and taken up again, they are the run never stopped."""

import dataclasses
import functools
import json
import math
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.tokenizer_training import TokenizerConfig
from flaxzoo.train import loop, parallel

WORDS = "the cat sat on a mat and then it saw some dog run away from her big red house".split()
STEPS = 12
ONE_DEVICE = train.MeshConfig(data=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Rows of an epoch: some 300, more than are trained on. Dropout is on."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    file.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=20)) for _ in range(60)))
    return train.TrainConfig(
        model=models.GPTConfig(
            vocab_size=1, max_length=16, num_layers=2, d_model=16, num_heads=2, dropout_rate=0.2
        ),
        data=data.CausalData(
            source=f"text:{file}#block",
            validation_fraction=0.1,
            length=16,
            tokenizer=TokenizerConfig(kind="characters"),
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=3),
        mesh=ONE_DEVICE,
        steps=STEPS,
        batch_size=8,
        log_every=1,
        evaluate_every=4,
        checkpoint_every=5,
    )


@functools.cache
def program_of(config):
    # Runs of one configuration share what they compile; subprocesses do not (below).
    with pytest.MonkeyPatch.context() as patch:
        if config.mesh == ONE_DEVICE:
            make_mesh = functools.partial(parallel.make_mesh, devices=jax.devices()[:1])
            patch.setattr(parallel, "make_mesh", make_mesh)
        return parallel.make_program(config, train.CAUSAL)


class Stop:
    """A signal during the step that is `at`; None for never."""

    def __init__(self, at):
        self.at = at

    def __call__(self, config, objective):
        program = program_of(config)

        def step(state, batch):
            if self.at is not None and int(np.ravel(state.step)[0]) + 1 == self.at:
                signal.raise_signal(signal.SIGTERM)
            return program.step(state, batch)

        return dataclasses.replace(program, step=step)


def go(config, workdir, stop=None, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_program", Stop(stop))
        return train.train(config, workdir, quiet=True, **options)


def everything(workdir, step=STEPS):
    """All arrays of a checkpoint, by path."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = {
            part: checkpointer.restore((workdir / "checkpoints" / str(step) / part).resolve())
            for part in ("params", "optimizer")
        }
    leaves = jax.tree_util.tree_flatten_with_path(found)[0]
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in leaves}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def kept(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


LAYOUTS = {
    "one device": {},
    "fsdp 2": {"mesh": train.MeshConfig(fsdp=2)},
    "pmap": {"parallel": "pmap"},
}


@pytest.fixture(scope="module")
def never_stopped(config, tmp_path_factory):
    """`never_stopped(layout)`: its configuration, and the folder of its run."""

    @functools.cache
    def whole(layout):
        laid_out = dataclasses.replace(config, **LAYOUTS[layout])
        workdir = tmp_path_factory.mktemp("whole") / "run"
        assert go(laid_out, workdir).finished
        return laid_out, workdir

    return whole


@pytest.mark.parametrize(
    ("layout", "stops"),
    [
        ("one device", [1]),  # the first step
        ("one device", [5]),  # a checkpoint
        ("one device", [7]),  # nothing
        ("one device", [3, 8, 11]),  # an evaluation, the last step but one
        ("fsdp 2", [3, 8]),
        ("pmap", [3, 8]),
    ],
)
def test_a_resumed_run_is_the_run_never_stopped(never_stopped, tmp_path, layout, stops):
    config, whole = never_stopped(layout)
    for stop in stops:
        result = go(config, tmp_path / "run", stop)
        assert (result.step, result.finished, result.signal) == (stop, False, signal.SIGTERM)
        assert max(kept(tmp_path / "run")) == stop
    assert go(config, tmp_path / "run").finished
    assert lines(tmp_path / "run") == lines(whole)
    assert_same(everything(tmp_path / "run"), everything(whole))


def test_another_mesh_takes_up_a_run(config, tmp_path):
    go(config, tmp_path / "whole")
    layouts = [LAYOUTS["fsdp 2"], LAYOUTS["pmap"], {}]
    for fields, stop in zip(layouts, (4, 8, None), strict=True):
        go(dataclasses.replace(config, **fields), tmp_path / "run", stop)
    ours, whole = (everything(tmp_path / name) for name in ("run", "whole"))
    assert ours.keys() == whole.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], whole[name], rtol=1e-3, atol=2e-5, err_msg=name)
    for one, other in zip(lines(tmp_path / "run"), lines(tmp_path / "whole"), strict=True):
        assert json.loads(one)["loss"] == pytest.approx(json.loads(other)["loss"], rel=1e-4)


def test_losses_without_stopping_go_down_and_are_logged(config, tmp_path):
    result = go(config, tmp_path / "run")
    rows = [json.loads(line) for line in lines(tmp_path / "run")]
    training = [row for row in rows if row["split"] == "train"]
    validation = [row for row in rows if row["split"] == "validation"]
    assert [row["step"] for row in training] == list(range(1, 13))
    assert [row["step"] for row in validation] == [4, 5, 8, 10, 12]
    assert set(training[0]) >= {"loss", "gradient_norm", "learning_rate"}
    schedule = train.make_schedule(config.optimizer, STEPS)
    rates = [float(schedule(step)) for step in range(STEPS)]
    assert [row["learning_rate"] for row in training] == pytest.approx(rates)
    assert validation[-1]["loss"] < validation[0]["loss"]
    last = {k: v for k, v in validation[-1].items() if k not in ("step", "split")}
    assert result.validation == last


def test_evaluation_is_what_a_plain_loop_computes(config, tmp_path):
    result = go(config, tmp_path / "run")
    assert result.validation is not None
    model, params = models.load(tmp_path / "run")
    rows = result.run.validation.rows
    total, tokens = 0.0, 0
    apply = jax.jit(lambda ids: model.apply({"params": params}, input_ids=ids).logits)
    for index in range(rows.rows_per_epoch):
        row = rows.row(0, index)
        for segment in range(1, row["segment_ids"].max() + 1):
            (here,) = np.nonzero(row["segment_ids"] == segment)
            ids = np.zeros((1, 16), np.int32)
            ids[0, : len(here)] = row["input_ids"][here]
            scores = np.asarray(apply(ids), np.float64)[0, : len(here)]
            scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
            total -= scores[np.arange(len(here)), row["labels"][here]].sum()
            tokens += len(here)
    # Each document: its characters, and the token that closes it.
    texts = config.data.validation_documents()
    assert tokens == sum(len(text) + 1 for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    expected = {
        "loss": total / tokens,
        "perplexity": math.exp(total / tokens),
        "bits_per_byte": total / math.log(2) / num_bytes,
        "tokens": tokens,
    }
    assert result.validation == pytest.approx(expected, rel=1e-5)
    scored = train.score_run(tmp_path / "run")
    assert scored == pytest.approx(expected, rel=1e-5)


def test_keeps_the_newest_and_the_best(config, tmp_path, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 2.5, *range(4, 12)])
    measured = loop.evaluate

    def evaluate(*arguments, **options):
        return dataclasses.replace(measured(*arguments, **options), loss=float(next(losses)))

    monkeypatch.setattr(loop, "evaluate", evaluate)
    config = dataclasses.replace(config, evaluate_every=1, checkpoint_every=1)
    go(config, tmp_path / "run", stop=4)
    assert kept(tmp_path / "run") == [2, 3, 4]
    go(config, tmp_path / "run")
    assert kept(tmp_path / "run") == [2, 11, 12]
    models.load(tmp_path / "run", step=2)


def test_no_resume(config, tmp_path):
    go(config, tmp_path / "run", stop=6, resume=False)  # nothing to take up: begins
    before = lines(tmp_path / "run")
    with pytest.raises(train.RunError, match=r"has checkpoints up to step 6: leave out --no-res"):
        go(config, tmp_path / "run", resume=False)
    assert lines(tmp_path / "run") == before
    assert go(config, tmp_path / "run").finished


def test_a_finished_run_is_left_as_it_is(config, tmp_path):
    go(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*") if path.is_file()}
    result = go(config, tmp_path / "run")
    assert (result.step, result.finished, result.validation) == (STEPS, True, None)
    for path in before:
        if "tensorboard" not in str(path):
            assert path.read_bytes() == before[path]
    (tmp_path / "run" / "report.md").unlink()  # killed before it was written
    go(config, tmp_path / "run")
    assert (tmp_path / "run" / "report.md").read_bytes() == before[tmp_path / "run" / "report.md"]


def test_the_report_has_a_sample(config, tmp_path):
    config = dataclasses.replace(config, sample_prompt="the cat")
    result = go(config, tmp_path / "run")
    assert result.sample is not None
    assert result.sample.startswith("the cat")
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert f"```text\n{result.sample}\n```" in report
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000


class Poison:
    """A program whose state is not finite after step `at`."""

    def __init__(self, at):
        self.at = at

    def __call__(self, config, objective):
        program = program_of(config)

        def step(state, batch):
            state, metrics = program.step(state, batch)
            if int(state.step) == self.at:
                state = dataclasses.replace(state, params=optax.tree.scale(math.nan, state.params))
            return state, metrics

        return dataclasses.replace(program, step=step)


@pytest.mark.parametrize(
    ("at", "checkpoint_every", "message"),
    [
        (2, 5, r"the loss of step 3 is nan \(gradient norm nan\); no checkpoint was written yet"),
        (6, 5, r"the loss of step 7 is nan .*; step 5 is kept: lower --optimizer.peak-learning"),
        # Step 8 is fine itself; what it leaves is not, and must not be kept.
        (8, 4, r"the validation loss of step 8 is nan; step 4 is kept"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    config, tmp_path, monkeypatch, at, checkpoint_every, message
):
    monkeypatch.setattr(loop, "make_program", Poison(at))
    config = dataclasses.replace(config, checkpoint_every=checkpoint_every)
    with pytest.raises(train.NonFiniteLoss, match=message):
        train.train(config, tmp_path / "run", quiet=True)
    assert kept(tmp_path / "run") == ([] if at == 2 else [checkpoint_every])
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    if at != 2:
        _, params = models.load(tmp_path / "run")
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def command(config, workdir, steps):
    source = config.data.source
    options = (
        "--data.validation None --data.validation-fraction 0.1 --data.length 16 "
        "--model.max-length 16 --model.num-layers 2 --model.d-model 16 --model.num-heads 2 "
        "--model.dropout-rate 0.2 --optimizer.warmup-steps 3 --batch-size 8 --log-every 1 "
        "--evaluate-every 100 --checkpoint-every 50 --sample-prompt None"
    ).split()
    return [
        *(sys.executable, "-m", "flaxzoo.train.cli", "train", "shakespeare-char"),
        *("--data.source", source, "--workdir", str(workdir), "--steps", str(steps), *options),
    ]


def one_device():
    return {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


def last_step(workdir):
    file = workdir / "metrics.jsonl"
    found = file.read_text().splitlines()[:-1] if file.is_file() else []
    return json.loads(found[-1])["step"] if found else 0


def interrupt(arguments, workdir, number, after):
    """Starts a process, signals it when it has logged `after` steps; its status and messages."""
    with subprocess.Popen(arguments, env=one_device(), stderr=subprocess.PIPE, text=True) as it:
        deadline = time.monotonic() + 120
        while last_step(workdir) < after and it.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        it.send_signal(number)
        assert it.stderr is not None
        messages = it.stderr.read()
    return it.returncode, messages


@pytest.mark.slow
def test_a_process_may_be_stopped_and_killed(config, tmp_path):
    steps = 400
    whole, ours = tmp_path / "whole", tmp_path / "ours"
    subprocess.run(command(config, whole, steps), env=one_device(), check=True, capture_output=True)
    arguments = command(config, ours, steps)
    # The statuses of a shell, so that `train && average` ends here.
    for number, name, expected, after in (
        (signal.SIGTERM, "SIGTERM", 143, 20),
        (signal.SIGHUP, "SIGHUP", 129, 60),
        (signal.SIGINT, "SIGINT", 130, 100),
    ):
        status, messages = interrupt(arguments, ours, number, after)
        stopped = max(kept(ours))
        assert status == expected, messages
        assert after <= stopped < steps
        assert f"{name}: saved step {stopped}; the same command goes on from there" in messages
        assert "Traceback" not in messages
        assert last_step(ours) in (stopped, stopped - 1)
    status, messages = interrupt(arguments, ours, signal.SIGKILL, 210)
    assert status == -signal.SIGKILL, messages
    assert f"resuming from step {stopped}" in messages
    assert stopped < models.loading.newest_step(ours) < steps
    subprocess.run(arguments, env=one_device(), check=True, capture_output=True)
    assert lines(ours) == lines(whole)
    assert_same(everything(ours, steps), everything(whole, steps))
    assert kept(ours) == kept(whole)


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run(config, tmp_path):
    arguments = command(config, tmp_path / "run", 4000)
    terminal, end = pty.openpty()
    own = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    prelude = [sys.executable, "-c", f"{own}; os.execv(sys.argv[1], sys.argv[1:])"]
    process = subprocess.Popen(
        [*prelude, *arguments],
        env=one_device(),
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    deadline = time.monotonic() + 120
    while last_step(tmp_path / "run") < 20 and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.002)[0]:
            os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait() == 129
    assert 20 <= max(kept(tmp_path / "run")) < 4000


def test_nohup_is_respected(config, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop._stop_requested() as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert not stopping
            signal.raise_signal(signal.SIGTERM)
            assert stopping == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
