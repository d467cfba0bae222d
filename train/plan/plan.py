"""Plans a run: finds out whether its train step fits given devices, and estimates its speed.

The devices need not be present. Compilation runs in a separate process (`plan.worker`), because the
TPU compiler ends its process on some impossible requests.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time

from ...data.common.errors import RunError
from ...data.common.fields import require
from ..config import TrainConfig, to_dict
from .topology import Topology


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step, such as all-gather."""

    kind: str
    count: int
    """The number of such operations in a step, counting every iteration of a loop."""
    bytes_sent: int
    """Bytes that each device sends in all these operations."""
    seconds: float
    """Time at the peak rate of the interconnect; 0 for virtual devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The resources that a train step requires. All sizes in bytes are per device."""

    topology: str
    num_devices: int
    mesh: dict[str, int]
    """Number of devices along each axis."""
    tokens: int
    """The number of token positions in a batch over all devices, including padding."""
    num_parameters: int
    """The number of trained parameters, in the whole model or in its adapters."""
    model_parameters: int
    """The number of parameters of the model, without adapters."""
    param_bytes: int
    """Bytes of the trained parameters."""
    optimizer_bytes: int
    """Bytes of the optimizer state."""
    batch_bytes: int
    frozen_parameters: int = 0
    """The number of frozen parameters, in a reference model or in the base of adapters."""
    frozen_bytes: int = 0
    cache_bytes: int = 0
    """Bytes of the keys and values of a rollout, in reinforcement learning."""
    rollout_bytes: int = 0
    """Peak bytes of a rollout in addition to the state, including its cache; 0 without rollouts."""
    reward_bytes: int = 0
    """Bytes of the parameters of reward models."""
    attention: str = ""
    """A description of the kernel that computes attention, for the user."""
    exchange: str = ""
    """A description of how devices exchange gradients, for the user. Empty if they exchange none.
    """
    model_flops: int = 0
    """FLOPs of the step's matmuls over all devices, without recomputation."""
    temp_bytes: int | float = math.inf
    """Bytes of temporary buffers at the peak; infinite if the step does not fit."""
    code_bytes: int = 0
    """Bytes of the compiled program."""
    out_of_memory: str | None = None
    """The compiler's message if the step does not fit; otherwise None."""
    device_flops: int = 0
    """FLOPs of the step's matmuls on one device, with recomputation."""
    hbm_bytes: int = 0
    """Bytes that one device reads from and writes to its main memory in a step."""
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0
    """Time that planning took."""

    @property
    def argument_bytes(self) -> int:
        """Bytes of all arguments of the step."""
        state_bytes = (
            self.param_bytes + self.frozen_bytes + self.optimizer_bytes + self.reward_bytes
        )
        return state_bytes + self.batch_bytes

    def fits(self, topology: Topology) -> bool:
        """Returns whether the step fits into each device's memory; True if this is unknown.

        If the compiler rejects programs that need too much memory, its decision is the result. The
        sum of all parts would be less exact, because it may be slightly too large for a program
        that the compiler accepts.
        """
        limit = sys.maxsize if topology.chip.rejects else topology.chip.usable_memory
        return self.peak_bytes <= limit

    @property
    def peak_bytes(self) -> int | float:
        """Bytes at the peak; infinite if the step does not fit."""
        # Rollouts and updates take turns, so the larger of the two determines the peak.
        return self.argument_bytes + max(self.temp_bytes + self.code_bytes, self.rollout_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A roofline estimate of a step in seconds, where every part runs at its peak rate."""

    matmuls: float
    hbm: float
    interconnect: float

    @classmethod
    def from_plan(cls, plan: Plan, topology: Topology) -> "Estimate":
        """Computes the estimate for real chips; virtual devices have no peak rates."""
        chip = topology.chip
        return cls(
            matmuls=plan.device_flops / chip.flops,
            hbm=plan.hbm_bytes / chip.memory_bandwidth,
            interconnect=sum(x.seconds for x in plan.collectives),
        )

    @property
    def overlapped(self) -> float:
        """Seconds of a step if compute, memory and interconnect overlap fully."""
        return max(self.matmuls, self.hbm, self.interconnect)

    @property
    def sequential(self) -> float:
        """Seconds of a step if compute, memory and interconnect take turns."""
        return self.matmuls + self.hbm + self.interconnect

    def utilization(self, plan: Plan, topology: Topology) -> tuple[float, float]:
        """Returns the model FLOPs utilization without overlap, and with full overlap."""
        ideal = plan.model_flops / plan.num_devices / topology.chip.flops
        return ideal / self.sequential, ideal / self.overlapped


def used_bytes(message: str) -> int | None:
    """Returns the memory that a step would use, from the compiler's out-of-memory message."""
    # The message contains `Used 20.5G of …` or `(20.5G) exceeds …`.
    sizes = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.search(r"(?:Used |\()([\d.]+)([KMGT]?)(?: of|\) exceeds)", message)
    return None if found is None else int(float(found[1]) * sizes[found[2]])


def make_plan(config: TrainConfig, topology: Topology) -> Plan:
    """Compiles a run's train step for a topology and reads its memory, FLOPs and collectives.

    Args:
        config: The run. No data are read, but the model must have its final vocabulary size.
        topology: The devices, from `parse_topology`.

    Returns:
        The plan. If the step needs too much memory, the plan has `out_of_memory`.

    Raises:
        UserError: The mesh, the batch or the parameters cannot be divided over the devices.
        RunError: The compiler is not installed, or it ended its process.
    """
    chip = topology.chip
    # Look for the compiler here, because the worker would end with a traceback without it.
    require(
        importlib.util.find_spec(chip.package) is not None,
        f"topology {topology.name} needs {chip.compiler}: pip install 'flaxzoo[{chip.extra}]', or "
        f"use --topology cpu:{topology.num_devices}, which gives FLOPs, bytes, and the memory as "
        f"XLA for CPUs plans it (the memory on {topology.name} differs)",
        RunError,
    )
    # The worker reads the request from standard input, and prints one JSON object.
    request = {"topology": topology.name, "config": to_dict(config)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.worker"],
        input=json.dumps(request),
        env={**os.environ, **chip.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    # Libraries may also print to standard output. The worker's line is a JSON object.
    replies = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last_line = done.stderr.strip().rpartition("\n")[2]
    require(
        len(replies) == 1,
        f"the compiler for {topology.name} ended with status {done.returncode} and printed: "
        f"{last_line[:500] or 'nothing'}",
        RunError,
    )
    [reply] = replies
    require("error" not in reply, reply.get("error", ""))
    collectives = tuple(Collective(**fields) for fields in reply.pop("collectives"))
    return Plan(**{**reply, "collectives": collectives, "seconds": seconds})
