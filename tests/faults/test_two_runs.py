"""Two commands train into one folder: the second does not touch the run of the first."""

import signal
import subprocess
import time

import pytest
from flaxzoo.models.run_files import newest_step

from ..integration.test_stopped_processes import command, last_step, one_device
from ..support.run_folders import write_text


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def begin(arguments):
    return subprocess.Popen(arguments, env=one_device(), stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_one_of_two_that_start_at_once_trains(source, tmp_path):
    arguments = command(source, tmp_path / "run", steps=300)
    processes = [begin(arguments), begin(arguments)]
    messages = [process.communicate(timeout=300)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2], messages
    winner = processes[0] if processes[0].returncode == 0 else processes[1]
    refused = messages[processes.index(winner) - 1].splitlines()[-1]
    assert refused.startswith(f"flaxzoo: {tmp_path / 'run'} ")
    assert f" process {winner.pid} " in refused
    assert newest_step(tmp_path / "run") == 300
    assert not (tmp_path / "run" / "lock.json").exists()


@pytest.mark.slow
def test_a_second_run_is_refused_before_it_reads_data(source, tmp_path):
    folder = tmp_path / "run"
    with begin(command(source, folder, steps=100_000)) as first:
        try:
            while last_step(folder) < 5:
                assert first.poll() is None
                time.sleep(0.01)
            first.send_signal(signal.SIGSTOP)  # it keeps the lock, and leaves the cores alone
            done = subprocess.run(
                command(source, folder, steps=100_000),
                env=one_device(),
                capture_output=True,
                text=True,
            )
        finally:
            first.kill()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"flaxzoo: {folder} " in done.stderr
    assert f" process {first.pid} " in done.stderr
