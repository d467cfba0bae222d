"""Signals in a long step, a long wait for data and a long compilation are obeyed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flaxzoo.models.run_files import steps
from flaxzoo.train.cli import main
from flaxzoo.train.engine import stop_signals

from ..integration.test_stopped_processes import command, one_device
from ..support.devices import on_devices
from ..support.run_folders import assert_same, everything, kept, lines, write_text

STEPS = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(source, folder)
    return folder


def finish(source, folder):
    """Starts or resumes the run in this process, as the command does in its own."""
    with on_devices(1):
        assert main.main(arguments_of_run(source, folder)) == 0


def arguments_of_run(source, folder):
    """Returns the arguments of `flaxzoo`."""
    arguments = command(source, folder, STEPS)
    return arguments[arguments.index("train") :]


def signal_slow_run(kind, source, folder, *numbers):
    """Signals a run when it is slow; returns its status, messages, and seconds to its end."""
    program = [sys.executable, "-m", "tests.faults.slow_run", kind]
    with subprocess.Popen(
        [*program, *arguments_of_run(source, folder)],
        cwd=Path(__file__).parents[2],
        env=one_device(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "slow\n", process.stderr.read()
            time.sleep(1)
            for index, number in enumerate(numbers):
                if index:
                    time.sleep(stop_signals.DUPLICATE_SECONDS + 0.5)
                process.send_signal(number)
            started = time.monotonic()
            messages = process.stderr.read()
            process.wait()
        finally:
            process.kill()
    return process.returncode, messages, time.monotonic() - started


def assert_resumes(source, folder, whole):
    finish(source, folder)
    assert lines(folder) == lines(whole)
    assert_same(everything(folder, STEPS), everything(whole, STEPS))


@pytest.mark.slow
def test_a_step_of_seconds_ends_first(source, tmp_path, whole):
    folder, number = tmp_path / "run", signal.SIGTERM
    status, messages, _ = signal_slow_run("seconds", source, folder, number)
    name = number.name
    assert status == 128 + number, messages
    assert f"{name}: " in messages
    assert "step in progress" in messages
    (saved,) = kept(folder)
    assert f"{name}: saved step {saved};" in messages
    assert_resumes(source, folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("step", (signal.SIGINT, signal.SIGINT)),
        ("program", (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_the_second_one_ends_at_once(source, tmp_path, whole, kind, numbers):
    folder = tmp_path / "run"
    status, messages, seconds = signal_slow_run(kind, source, folder, *numbers)
    assert status == 128 + numbers[1], messages
    assert seconds < 10
    last = messages.splitlines()[-1]
    assert last.startswith("flaxzoo: ")
    assert f"({numbers[1].name})" in last
    assert "Traceback" not in messages
    assert not steps(folder)
    assert_resumes(source, folder, whole)


@pytest.mark.slow
def test_a_wait_for_data_is_cut_off(source, tmp_path, whole):
    folder = tmp_path / "run"
    status, messages, seconds = signal_slow_run("data", source, folder, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM, messages
    assert seconds < 20
    assert "SIGTERM: saved step 2;" in messages
    assert kept(folder) == [2]
    assert_resumes(source, folder, whole)


@pytest.fixture
def interruptible():
    """Python's own handler, which a process in the background of a shell does not begin with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_signal_ends_a_python_program_as_well(interruptible):
    with stop_signals.stop_requested() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # within a second: the same one, passed on
        assert stop.signum == signal.SIGINT
        stop._received -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_the_first_signal_cuts_off_a_wait():
    with stop_signals.stop_requested() as stop:
        stop.cuts_off = True
        with pytest.raises(stop_signals.StopNow):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # within a second: the same one, passed on
    assert stop.signum == signal.SIGTERM
