"""`flaxzoo launch`: several training processes on one machine.

Each process gets a share of the GPUs. Process 0 prints directly to the terminal. Each line that
another process prints gets the index of that process as a prefix. If a process fails, `flaxzoo
launch` ends the other processes, because they would wait forever.
"""

import functools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ...data.common.fields import require

ENDING_SECONDS = 10.0
"""The number of seconds that the other processes have to end by themselves after one process fails.
"""
FORWARDED = {signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)}
"""The signals that `launch` forwards to the processes. Windows has only the first two, because it
has no SIGHUP."""


def launch(command: list[str], processes: int) -> int:
    """Runs a command in several processes that train together.

    Args:
        command: Program and arguments.
        processes: The number of processes.

    Returns:
        0, or the status of the first failed process: 128 plus the signal number, if a signal ended
        it.

    Raises:
        UserError: The GPUs cannot be divided over the processes.
    """
    require(processes >= 1, f"processes must be at least 1, got {processes}")
    shares = split_gpus(visible_gpus(), processes)
    address = f"127.0.0.1:{free_port()}"
    common = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # not reachable from other machines
        "JAX_NUM_PROCESSES": str(processes),
    }
    # Install the signal handlers before the first process starts, so that a signal leaves no
    # process running.
    started: list[subprocess.Popen[bytes]] = []
    with _forwarding(started):
        for index, gpus in enumerate(shares):
            environment = {**common, "JAX_PROCESS_ID": str(index)}
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            started.append(_start(command, environment, first=index == 0))
        # On leaving this block, wait until the threads have printed all output.
        with ThreadPoolExecutor(len(started)) as printing:
            printing.map(_print_prefixed, started, range(len(started)))
            try:
                failed = _first_failure(started)
                # If all processes fail in the same way, each has already printed the reason.
                all_failed = len({process.poll() for process in started}) == 1
            finally:
                for process in started:
                    # The other processes would wait for the failed process forever, so kill them.
                    process.kill()
                    process.wait()
    if failed is None:
        return 0
    status = started[failed].returncode
    if not all_failed:
        print(_failure_message(failed, status), file=sys.stderr)
    return status if status >= 0 else 128 - status


def split_gpus(gpus: list[str], processes: int) -> list[list[str]]:
    """Splits the GPUs into equal contiguous shares, one per process; shares are empty without GPUs.

    Raises:
        UserError: The GPUs cannot be divided equally.
    """
    require(
        len(gpus) % processes == 0,
        f"{len(gpus)} GPUs cannot be divided over {processes} processes: choose a divisor, or name "
        "the GPUs to be used in CUDA_VISIBLE_DEVICES",
    )
    share = len(gpus) // processes
    return [gpus[i * share : (i + 1) * share] for i in range(processes)]


def visible_gpus() -> list[str]:
    """Returns the names of the NVIDIA GPUs that jax would use on this machine."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    # If this variable is empty, it hides all GPUs; if it is not set, it hides none.
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return list(filter(None, named.split(",")))
    return list(map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*"))))))


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def _start(command: list[str], environment: dict[str, str], first: bool) -> subprocess.Popen[bytes]:
    # Start the process in its own session. It then receives Ctrl-C only from the handler that
    # forwards signals, and not a second time from the terminal.
    start = functools.partial(subprocess.Popen, command, env=environment, start_new_session=True)
    if first:
        return start()
    return start(
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _print_prefixed(process: subprocess.Popen[bytes], index: int) -> None:
    """Prints each output line of a process after the process index; process 0 prints by itself."""
    if process.stdout is None:
        return
    with process.stdout as output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            print(f"[process {index}] {text}", file=sys.stderr, flush=True)


def _first_failure(started: list[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all end, or `ENDING_SECONDS` after a failure; returns which one failed first."""
    failed, deadline = None, math.inf
    statuses: list[int | None] = [None]
    while None in statuses and time.monotonic() < deadline:
        time.sleep(0.05)
        statuses = [process.poll() for process in started]
        # The status of a process is None while the process runs, and 0 if the process succeeded.
        if failed is None and any(statuses):
            failed = next(i for i, status in enumerate(statuses) if status)
            deadline = time.monotonic() + ENDING_SECONDS
    return failed


def _failure_message(index: int, returncode: int) -> str:
    how = signal.Signals(-returncode).name if returncode < 0 else f"status {returncode}"
    return (
        f"flaxzoo: process {index} ended with {how}, so all processes end; the same command "
        "resumes from the last checkpoint"
    )


@contextmanager
def _forwarding(started: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forwards signals to the processes, which then save a checkpoint and exit."""

    def forward(number: int, frame: object) -> None:
        for process in started:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
