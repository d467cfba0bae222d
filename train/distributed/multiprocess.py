"""Several processes that train together, through `jax.distributed`.

All take the same steps in the same order, each on its own part of a batch. Process 0 alone
speaks and writes; checkpoints all write together.

A process that dies takes the others with it: jax ends them, with a message, when nothing was
heard of it for `SILENCE_SECONDS`.
"""

import atexit
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import RunError, ToldElsewhere

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Where process 0 is met, how many processes there are, and which of them this one is."""
SILENCE_SECONDS = 60
"""A process that was not heard of for so long is taken for dead."""
FAREWELL_SECONDS = 5
"""A failing process waits so long for the others to fail alike."""
CARRIERS = ("Gloo", "NCCL", "coordination service")
"""What carries numbers and messages between processes, as an error names it."""
NO_LIMIT = 10**9
"""Milliseconds: process 0 may prepare text for hours, and if it dies jax tells."""

T = TypeVar("T")


@contextmanager
def joined(rendezvous_seconds: int) -> Iterator[None]:
    """Meets the other processes that train with this one, if the environment tells of any.

    To be entered before jax is asked for its devices. It tells of others below `flaxzoo launch`,
    in a step of SLURM with several tasks, on a TPU pod of Kubernetes, and wherever
    `JAX_COORDINATOR_ADDRESS` is set.

    Args:
      rendezvous_seconds: how long to wait for all of them.

    Raises:
      RunError: another process was lost, or the environment is not as jax needs it.
    """
    if not has_others(os.environ):
        yield
        return
    _meet(rendezvous_seconds)
    try:
        yield
    except BaseException as error:
        _leave()
        if not any(name in str(error) for name in CARRIERS):
            raise
        raise RunError(
            f"process {jax.process_index()} lost another one, which may say why ("
            f"{str(error).splitlines()[0]}): the same command goes on from the last checkpoint"
        ) from error


def has_others(environment: Any) -> bool:
    """Whether the variables of a process name others to train with."""
    tasks = int(environment.get("SLURM_NTASKS", 1)) if "SLURM_STEP_NODELIST" in environment else 1
    pod = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return ADDRESS in environment or tasks > 1 or len(pod) > 1


def _meet(seconds: int) -> None:
    address, count, index = os.environ.get(ADDRESS), _number(COUNT), _number(INDEX)
    if count is not None and index is not None and index >= count:
        raise RunError(f"{INDEX} {index} is not below {COUNT} {count}: count from 0")
    # jax would end the process with a trace of its own.
    alone = threading.Timer(seconds, _give_up, (seconds, address, count))
    alone.daemon = True
    alone.start()
    jax.distributed.initialize(
        num_processes=count,
        process_id=index,
        cluster_detection_method=None if None in (address, count, index) else "deactivate",
        initialization_timeout=seconds + 60,
        heartbeat_timeout_seconds=SILENCE_SECONDS,
        shutdown_timeout_seconds=SILENCE_SECONDS,
    )
    alone.cancel()
    # jax took SIGTERM for its own notices of preemption: without ours it is to end the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is not None and not value.isdecimal():
        raise RunError(f"{name} {value!r} is not a number: give one, counted from 0")
    return None if value is None else int(value)


def _give_up(seconds: int, address: str | None, count: int | None) -> None:
    where = f" at {address}" if address else ""
    print(
        f"flaxzoo: not all {count or ''} processes met{where} within {seconds} s: start all of "
        "them, let them reach it, or raise --rendezvous-timeout",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _leave() -> None:
    """Has a failing process end without waiting for the others, unless they fail alike."""
    try:
        _client().wait_at_barrier("flaxzoo/failed", FAREWELL_SECONDS * 1000)
    except jax.errors.JaxRuntimeError:
        atexit.register(_end_now)  # before jax's own end, which waits for all


def _end_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _client() -> Any:
    from jax._src import distributed  # jax shows what processes tell each other nowhere else

    return distributed.global_state.client


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return jax.process_index() == 0


_meetings = itertools.count()


@contextmanager
def together() -> Iterator[None]:
    """All leave the block at once, and none if one fails in it; no device is needed to wait.

    Raises:
      RunError: what another process met with.
    """
    if jax.process_count() == 1:
        yield
        return
    client, meeting = _client(), f"flaxzoo/{next(_meetings)}"
    failed = None
    try:
        yield
    except Exception as error:
        failed = error
        client.key_value_set(f"{meeting}/{jax.process_index()}", " ".join(str(error).split()))
    client.wait_at_barrier(meeting, NO_LIMIT)
    if failed is not None:
        raise failed
    for name, message in client.key_value_dir_get(f"{meeting}/"):
        kind = RunError if is_first() else ToldElsewhere
        raise kind(f"process {name.rsplit('/', 1)[1]}: {message}")


def first_and_then_others(work: Callable[[], T]) -> T:
    """What `work` answers here; the others begin when process 0 is done, and find what it made."""
    result: list[T] = []
    for mine in (is_first(), not is_first()):
        with together():
            if mine:
                result.append(work())
    return result[0]


def agreement() -> Callable[[int], int]:
    """Makes a function that answers every process the same: the greatest number given to it.

    Of several processes it answers the numbers of the call before, those are known by then:
    asked once a step, it lets no device wait.
    """
    if jax.process_count() == 1:
        return lambda number: number
    devices = Mesh(np.asarray(jax.devices()), ("devices",))
    each = NamedSharding(devices, PartitionSpec("devices"))
    greatest = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(devices, PartitionSpec()))
    asked: list[jax.Array] = []

    def agreed(number: int) -> int:
        here = np.full(jax.local_device_count(), number, np.int32)
        asked.append(greatest(jax.make_array_from_process_local_data(each, here)))
        return int(asked.pop(0)) if len(asked) > 1 else 0

    return agreed
