"""Training processes that signals stop: nothing is lost, and the exit status names the signal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from flaxzoo.train.engine import stop_signals

from ..support.run_folders import kept, write_text


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(autouse=True)
def hangups():
    """A SIGHUP that stops, as in a terminal, also where nohup runs these tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def command(source, workdir, steps):
    options = (
        "--data.validation None --data.validation-fraction 0.1 --data.length 16 "
        "--model.max-length 16 --model.num-layers 2 --model.d-model 16 --model.num-heads 2 "
        "--model.dropout-rate 0.2 --optimizer.warmup-steps 3 --batch-size 8 --log-every 1 "
        "--evaluate-every 100 --checkpoint-every 50 --sample-prompt None"
    ).split()
    return [
        *(sys.executable, "-m", "flaxzoo.train.cli.main", "train", "shakespeare-char"),
        *(
            "--data.source",
            f"text:{source}#block",
            "--workdir",
            str(workdir),
            "--steps",
            str(steps),
            *options,
        ),
    ]


def one_device():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    return {**os.environ, "XLA_FLAGS": flags}


def last_step(workdir):
    file = workdir / "metrics.jsonl"
    found = file.read_text().splitlines()[:-1] if file.is_file() else []
    return json.loads(found[-1])["step"] if found else 0


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run(source, tmp_path):
    arguments = command(source, tmp_path / "run", 4000)
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


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals.stop_requested() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.signum
            signal.raise_signal(signal.SIGTERM)
            assert stop.signum == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
