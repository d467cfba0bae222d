"""Two processes and one run folder: one trains, the other is told who does."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from flaxzoo.data import DataError
from flaxzoo.train import RunError
from flaxzoo.train.runs import run_lock
from flaxzoo.train.runs.run_lock import Holder, RunLock

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

TAKING = """
import sys, time
from pathlib import Path
from flaxzoo.train.runs.run_lock import RunLock
with RunLock(Path(sys.argv[1]), print) as lock:
    file, is_exclusive = lock._open()
    print("locked", flush=True)
    time.sleep(1)
    lock._write(file)
    time.sleep(600)
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


def acquire(folder, log=print):
    """Takes the lock and gives it back."""
    with RunLock(folder, log) as lock:
        lock.acquire()
        assert (folder / "lock.json").is_file()
    assert not (folder / "lock.json").exists()


def elsewhere(folder, **fields):
    """Writes the entry of a process on another machine."""
    holder = dataclasses.replace(Holder.this_process(), host="far", machine="far 1", **fields)
    (folder / "lock.json").write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def test_the_second_process_is_told_who_trains(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "held\n"
    holder = json.loads((tmp_path / "lock.json").read_text())
    told = start().stdout.readline()
    assert told == (
        f"{tmp_path} is in use by process {first.pid} on {os.uname().nodename} since "
        f"{holder['started']}: wait for it, stop it (kill {first.pid}), or give another --workdir\n"
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d", holder["started"])
    with pytest.raises(RunError, match=f"in use by process {first.pid} on "):
        acquire(tmp_path)


def test_a_killed_process_leaves_no_lock(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "held\n"
    first.kill()
    first.wait()
    assert (tmp_path / "lock.json").is_file()
    lines = []
    acquire(tmp_path, lines.append)
    assert not lines  # it did not wait


def test_a_stopped_process_still_has_it(start, tmp_path):
    first = start()
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(RunError, match=f"in use by process {first.pid} on "):
        acquire(tmp_path)


def test_a_process_that_ends_removes_it(start, tmp_path):
    first = start(seconds=0)
    assert first.stdout.readline() == "held\n"
    assert first.wait() == 0
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_of_many_that_start_at_once_one_has_it(start, tmp_path, killed):
    if killed:
        before = start()
        assert before.stdout.readline() == "held\n"
        before.kill()
        before.wait()
    (tmp_path / "go").unlink()
    processes = [start() for _ in range(6)]
    time.sleep(2)  # until all of them wait
    (tmp_path / "go").touch()
    told = [process.stdout.readline() for process in processes]
    assert told.count("held\n") == 1
    holder = processes[told.index("held\n")]
    others = [line for line in told if line != "held\n"]
    assert [line for line in others if f"in use by process {holder.pid} on " not in line] == []


def test_the_second_process_names_the_one_that_has_not_written_yet(tmp_path):
    """The lock was taken over from a killed process, whose entry is still in the file."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead = dataclasses.replace(Holder.this_process(), process=ended.pid)
    (tmp_path / "lock.json").write_text(json.dumps(dataclasses.asdict(dead)))
    taking = subprocess.Popen(
        [sys.executable, "-c", TAKING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with taking:
        try:
            assert taking.stdout is not None
            assert taking.stdout.readline() == "locked\n"
            with pytest.raises(RunError, match=f"in use by process {taking.pid} on "):
                acquire(tmp_path)
        finally:
            taking.kill()


def test_one_process_does_not_take_it_twice(tmp_path):
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        lock.acquire()
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} on "):
            acquire(tmp_path / ".")
    acquire(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"the folder .*/none is not writable: choose another"):
        acquire(tmp_path / "none")


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "SETTLING_SECONDS", 0.2)


@pytest.fixture
def no_record_locks(monkeypatch):
    monkeypatch.setattr(run_lock, "_try_lock", lambda file: None)


# Whether another machine's lock holds here depends on the file system; its entry is always there.


def test_a_process_on_another_machine_that_lives_has_it(tmp_path, quickly):
    elsewhere(tmp_path, process=7, started="2026-11-22 19:00:00+00:00")
    lines, ended = [], threading.Event()

    def touch():
        while not ended.wait(0.05):
            os.utime(tmp_path / "lock.json")

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(RunError, match="in use by process 7 on far since 2026-11-22 19:00:00"):
            acquire(tmp_path, lines.append)
    finally:
        ended.set()
        thread.join()
    assert lines == [
        f"{tmp_path} was in use by process 7 on far since 2026-11-22 19:00:00+00:00: waiting up "
        "to 0 s to see whether it still is"
    ]


def test_a_process_on_another_machine_that_died_loses_it(tmp_path, quickly):
    elsewhere(tmp_path)
    acquire(tmp_path)


def test_nobody_waits_for_one_that_died_long_ago(tmp_path):
    elsewhere(tmp_path)
    os.utime(tmp_path / "lock.json", (time.time() - 3600, time.time() - 3600))
    lines = []
    acquire(tmp_path, lines.append)
    assert not lines


@pytest.mark.parametrize("content", ["", "{", '{"process": 3}'])
def test_half_an_entry_is_none(tmp_path, content):
    (tmp_path / "lock.json").write_text(content)
    acquire(tmp_path)


def test_a_lock_that_is_removed_is_made_again(tmp_path, quickly):
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        (tmp_path / "lock.json").unlink()
        deadline = time.monotonic() + 30
        while not (tmp_path / "lock.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(RunError, match="is in use by"):
            acquire(tmp_path)
        lock.check()
    assert not (tmp_path / "lock.json").exists()


def test_the_lock_of_another_process_is_left_alone(tmp_path):
    other = dataclasses.replace(Holder.this_process(), process=7, token="other")
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        (tmp_path / "lock.json").unlink()
        (tmp_path / "lock.json").write_text(json.dumps(dataclasses.asdict(other)))
    assert json.loads((tmp_path / "lock.json").read_text())["process"] == 7


def test_who_was_taken_for_dead_is_told(tmp_path, quickly):
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        lock.check()
        elsewhere(tmp_path, process=7)
        lock._beating.join(timeout=30)
        with pytest.raises(RunError, match=r"was taken over by process 7 on far since .*: leave"):
            lock.check()
    assert (tmp_path / "lock.json").is_file()  # the other's


@pytest.mark.parametrize(
    ("removed", "why"), [(True, "had been removed"), (False, r"this process had not touched")]
)
def test_why_another_process_could_take_the_lock_is_told(tmp_path, quickly, removed, why):
    other = dataclasses.replace(Holder.this_process(), process=7, host="far", machine="far")
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        made = tmp_path / "made"
        made.write_text(json.dumps(dataclasses.asdict(other)))
        if removed:
            made.replace(tmp_path / "lock.json")
        else:
            (tmp_path / "lock.json").write_text(made.read_text())
        lock._beating.join(timeout=30)
        with pytest.raises(RunError, match=f"taken over by process 7 on far .*{why}"):
            lock.check()


def test_without_locks_of_the_system_one_of_two_has_it(tmp_path, quickly, no_record_locks):
    with RunLock(tmp_path, print) as lock:
        lock.acquire()
        monkey = RunLock(tmp_path, print)
        run_lock._HELD.clear()  # as if it were another process
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} on "):
            monkey.acquire()
    acquire(tmp_path)


def test_without_locks_of_the_system_one_of_those_that_start_at_once_has_it(
    tmp_path, quickly, no_record_locks
):
    outcomes = []

    def attempt():
        try:
            with RunLock(tmp_path, print) as lock:
                lock.acquire()
                time.sleep(1.0)
                outcomes.append("held")
        except RunError:
            outcomes.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", "refused", "refused", "refused"]
