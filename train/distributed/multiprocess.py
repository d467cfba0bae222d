"""Training with several processes, which `jax.distributed` connects.

All processes take the same steps in the same order, and each process reads its own share of each
batch. Only process 0, the primary process, prints and writes files; all processes write checkpoints
together. If a process dies, jax ends the other processes with a message after `SILENCE_SECONDS`
without a heartbeat.
"""

import atexit
import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...data.common.errors import ReportedByPrimary, RunError
from ...data.common.fields import require
from ...models.nn.typing import Params

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The environment variables with the address of process 0, the number of processes, and the index
of this process."""
SILENCE_SECONDS = 60
"""Seconds without a heartbeat after which a process is considered dead."""
FAREWELL_SECONDS = 5
"""Seconds that a failing process waits for the other processes to fail as well."""
CARRIERS = re.compile("Gloo|NCCL|coordination service")
"""Matches error messages that show that the communication between processes failed."""
NO_LIMIT = 10**9
"""A practically infinite timeout in milliseconds, for waits on process 0, which may prepare text
for hours."""

T = TypeVar("T")


@contextmanager
def distributed_session(rendezvous_seconds: int) -> Iterator[None]:
    """Connects to the other training processes, if environment variables describe any.

    Enter the context before jax initializes its devices. The environment variables are set by
    `flaxzoo launch`, by SLURM (for a step with several tasks), by Kubernetes (for a TPU pod), or by
    the user (`JAX_COORDINATOR_ADDRESS`).

    Args:
        rendezvous_seconds: The time to wait for all processes, in seconds.

    Raises:
        RunError: Another process was lost, or the environment variables are incomplete.
    """
    if not has_others(os.environ):
        yield
        return
    _connect(rendezvous_seconds)
    try:
        yield
    except BaseException as error:
        _leave()
        # If the communication failed, another process was lost.
        if not CARRIERS.search(str(error)):
            raise
        raise RunError(
            f"process {jax.process_index()} lost another process, whose output may state the "
            f"reason ({str(error).splitlines()[0]}): the same command resumes from the last "
            "checkpoint"
        ) from error


def has_others(environment: Mapping[str, str]) -> bool:
    """Returns whether the environment variables describe other training processes."""
    # SLURM also sets SLURM_NTASKS outside of a step, but then only this process runs.
    tasks = int(environment.get("SLURM_NTASKS", 1)) if "SLURM_STEP_NODELIST" in environment else 1
    pod = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return ADDRESS in environment or tasks > 1 or len(pod) > 1


def _connect(seconds: int) -> None:
    address, count, index = os.environ.get(ADDRESS), _number(COUNT), _number(INDEX)
    problem = f"{INDEX} {index} is not below {COUNT} {count}: count from 0"
    require(count is None or index is None or index < count, problem, RunError)
    # After `seconds`, end the process with a message. jax's own timeout is longer and ends with a
    # traceback.
    alone = threading.Timer(seconds, _give_up, (seconds, address, count))
    alone.daemon = True
    alone.start()
    jax.distributed.initialize(
        num_processes=count,
        process_id=index,
        # If all settings are explicit, jax must not detect a cluster.
        cluster_detection_method=None if None in (address, count, index) else "deactivate",
        initialization_timeout=seconds + 60,
        heartbeat_timeout_seconds=SILENCE_SECONDS,
        shutdown_timeout_seconds=SILENCE_SECONDS,
    )
    alone.cancel()
    # jax has installed a SIGTERM handler for preemption notices; restore the default handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    problem = f"{name} {value!r} is not a number: give a number, counted from 0"
    require(value is None or value.isdecimal(), problem, RunError)
    return None if value is None else int(value)


def _give_up(seconds: int, address: str | None, count: int | None) -> None:
    where = f" at {address}" if address else ""
    print(
        f"flaxzoo: not all {count or ''} processes connected{where} within {seconds} s: start all "
        "processes, check that they reach this address, or raise --rendezvous-timeout",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _leave() -> None:
    """Lets a failing process exit without waiting for other processes that have not failed."""
    try:
        _client().wait_at_barrier("flaxzoo/failed", FAREWELL_SECONDS * 1000)
    except jax.errors.JaxRuntimeError:
        atexit.register(_end_now)  # before the exit handler of jax, which waits for all processes


def _end_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _client() -> Any:
    from jax._src import distributed  # jax has no public function that returns the client

    return distributed.global_state.client


def is_primary() -> bool:
    """Returns whether this process prints and writes files for all processes."""
    return jax.process_index() == 0


_barriers = itertools.count()


@contextmanager
def barrier() -> Iterator[None]:
    """Makes all processes leave the block together, and fail if one of them fails.

    The barrier does not use the devices.

    Raises:
        RunError: Another process failed; the message includes its error.
    """
    if jax.process_count() == 1:
        yield
        return
    client, name = _client(), f"flaxzoo/{next(_barriers)}"
    try:
        yield
    except Exception as error:
        # Store the error before the wait, so that the other processes can read it afterwards.
        client.key_value_set(f"{name}/{jax.process_index()}", " ".join(str(error).split()))
        client.wait_at_barrier(name, NO_LIMIT)
        raise
    client.wait_at_barrier(name, NO_LIMIT)
    for key, message in client.key_value_dir_get(f"{name}/"):
        kind = RunError if is_primary() else ReportedByPrimary
        raise kind(f"process {key.rsplit('/', 1)[1]}: {message}")


def primary_first(work: Callable[[], T]) -> T:
    """Runs `work` on process 0, and then on the others, which can reuse files that it wrote."""
    result: list[T] = []
    for mine in (is_primary(), not is_primary()):
        with barrier():
            if mine:
                result.append(work())
    return result[0]


def from_primary(work: Callable[[], T]) -> T:
    """Runs `work` on process 0, and returns the result (JSON) in all processes."""
    if jax.process_count() == 1:
        return work()
    key = f"flaxzoo/result/{next(_barriers)}"
    with barrier():
        if is_primary():
            # Use Python's own JSON, which can represent infinity and NaN, because metrics may have
            # these values.
            _client().key_value_set(key, json.dumps(work()))
    return json.loads(_client().blocking_key_value_get(key, NO_LIMIT))


def on_primary(params: Params) -> Params:
    """Copies whole parameters to the first device of process 0. This is a collective call.

    Returns:
        On process 0, the parameters on one device. On the other processes, which take part only to
        send their shards, an empty dict.
    """
    device = jax.local_devices()[0]

    def gathered(x: jax.Array) -> jax.Array | None:
        # A process can read a whole array if all its shards are on this process, or if it is
        # replicated.
        if x.is_fully_replicated:
            x = x.addressable_data(0)
        whole = x if x.is_fully_addressable else process_allgather(x, tiled=True)
        return jax.device_put(whole, device) if is_primary() else None

    copied = jax.tree.map(gathered, params)
    return copied if is_primary() else {}


def greatest_everywhere(number: int) -> int:
    """Returns the maximum of a number over all processes. This is a collective call."""
    return int(process_allgather(np.full(1, number, np.int32)).max())


def all_reduce_max() -> Callable[[Sequence[int]], Sequence[int]]:
    """Makes a function that returns the elementwise maximum of numbers over all processes.

    With several processes, each call returns the maxima of the previous call's numbers, because
    these have already been computed. A loop that calls the function once per step therefore does
    not wait for the devices.
    """
    if jax.process_count() == 1:
        return lambda numbers: numbers
    devices = Mesh(np.asarray(jax.devices()), ("devices",))
    each = NamedSharding(devices, PartitionSpec("devices"))
    greatest = jax.jit(lambda x: x.max(0), out_shardings=NamedSharding(devices, PartitionSpec()))
    pending: list[jax.Array] = []

    def reduce(numbers: Sequence[int]) -> Sequence[int]:
        # Give each device a row, so that the reduction runs on all devices.
        local = np.tile(np.asarray(numbers, np.int32), (jax.local_device_count(), 1))
        pending.append(greatest(jax.make_array_from_process_local_data(each, local)))
        return np.asarray(pending.pop(0)).tolist() if len(pending) > 1 else [0] * len(numbers)

    return reduce
