"""Two processes with one run folder: one trains, the other is refused."""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import time

import pytest
from flaxzoo.data import DataError
from flaxzoo.train import RunError
from flaxzoo.train.runs import run_lock
from flaxzoo.train.runs.run_lock import RunLock

HOLDING = """
import sys, time
from pathlib import Path
from flaxzoo.train.runs.run_lock import RunLock
with RunLock(Path(sys.argv[1]), print) as lock:
    while not Path(sys.argv[2]).exists():
        time.sleep(0.001)
    try:
        lock.acquire()
    except ValueError as error:
        print(error, flush=True)
    else:
        print("held", flush=True)
        time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def start(tmp_path):
    """`start(seconds)`: a process that takes the lock of `tmp_path` and holds it for so long."""
    (tmp_path / "go").touch()
    with contextlib.ExitStack() as stack:

        def start(seconds=600.0):
            arguments = [str(tmp_path), str(tmp_path / "go"), str(seconds)]
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", HOLDING, *arguments], stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            return process

        yield start


def acquire(folder):
    """Takes the lock and gives it back."""
    with RunLock(folder, print) as lock:
        lock.acquire()
        assert (folder / "lock.json").is_file()
    assert not (folder / "lock.json").exists()


def test_a_second_process_is_refused_with_the_name_of_the_first(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "held\n"
    holder = json.loads((tmp_path / "lock.json").read_text())
    printed = start().stdout.readline()
    assert printed.startswith(f"{tmp_path} ")
    for part in (f"process {first.pid} ", os.uname().nodename, holder["started"], "--workdir"):
        assert part in printed
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d", holder["started"])
    with pytest.raises(RunError, match=f"process {first.pid} "):
        acquire(tmp_path)


def test_a_killed_process_leaves_no_lock(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "held\n"
    first.kill()
    first.wait()
    assert (tmp_path / "lock.json").is_file()
    acquire(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_one_of_many_that_start_at_once_gets_the_lock(start, tmp_path, killed):
    if killed:
        before = start()
        assert before.stdout.readline() == "held\n"
        before.kill()
        before.wait()
    (tmp_path / "go").unlink()
    processes = [start() for _ in range(6)]
    time.sleep(2)  # until all processes wait
    (tmp_path / "go").touch()
    printed = [process.stdout.readline() for process in processes]
    assert printed.count("held\n") == 1
    holder = processes[printed.index("held\n")]
    others = [line for line in printed if line != "held\n"]
    assert [line for line in others if f"in use by process {holder.pid} on " not in line] == []


def test_one_process_does_not_take_it_twice(tmp_path):
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        lock.acquire()
        with pytest.raises(RunError, match=f"process {os.getpid()} "):
            acquire(tmp_path / ".")
    acquire(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"/none .*writable"):
        acquire(tmp_path / "none")


@pytest.mark.parametrize("content", ["", "{", '{"process": 3}'])
def test_a_file_without_a_lock_is_ignored(tmp_path, content):
    (tmp_path / "lock.json").write_text(content)
    acquire(tmp_path)


def test_the_lock_of_another_process_is_left_alone(tmp_path):
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        (tmp_path / "lock.json").unlink()
        (tmp_path / "lock.json").write_text("another")
    assert (tmp_path / "lock.json").read_text() == "another"


def test_a_file_system_without_locks_is_logged(tmp_path, monkeypatch):
    def lockf(file, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "lockf", lockf)
    lines = []
    with RunLock(tmp_path, lines.append) as lock:
        lock.acquire()
    assert lines == [
        f"{tmp_path}/lock.json cannot be locked (No locks available): train in one process"
    ]
