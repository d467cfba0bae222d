"""Plans a run: whether its real train step fits given devices, and an estimate of its speed.

The devices need not be present. Compilation runs in a separate process (`plan.worker`), because the
TPU compiler ends its process on some impossible requests.
"""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time

from ...data.common.errors import RunError, UserError
from ..config import TrainConfig, to_dict
from .topology import Topology


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step, such as all-gather."""

    kind: str
    count: int
    """How many such operations a step runs, counting every iteration of a loop."""
    bytes_sent: int
    """Bytes that each device sends in all these operations."""
    seconds: float | None
    """Time at the peak rate of the interconnect, or None for virtual devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The resources that a train step requires. All numbers of bytes are per device."""

    topology: str
    num_devices: int
    mesh: dict[str, int]
    """Number of devices along each axis."""
    tokens: int
    """Token positions in a batch over all devices, including padding."""
    num_parameters: int
    """Trained parameters: the whole model or its adapters."""
    model_parameters: int
    """Parameters of the model, without adapters."""
    param_bytes: int
    """Bytes of the trained parameters."""
    optimizer_bytes: int
    """Bytes of the optimizer state."""
    batch_bytes: int
    frozen_parameters: int = 0
    """Frozen parameters: a reference model or the base of adapters."""
    frozen_bytes: int = 0
    cache_bytes: int = 0
    """Bytes of the keys and values of a rollout, in reinforcement learning."""
    rollout_bytes: int | None = None
    """Peak bytes of a rollout in addition to the state, including its cache. None without
    rollouts."""
    reward_bytes: int = 0
    """Bytes of the parameters of reward models."""
    attention: str = ""
    """Describes the kernel that computes attention, to show to the user."""
    exchange: str = ""
    """Describes how devices exchange gradients, to show to the user; empty if they exchange none.
    """
    model_flops: int = 0
    """FLOPs of the step's matmuls over all devices, without recomputation."""
    temp_bytes: int | None = None
    """Bytes of temp buffers at the peak, or None if the step does not fit."""
    code_bytes: int = 0
    """Bytes of the compiled program."""
    out_of_memory: str | None = None
    """The compiler's message if the step does not fit."""
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

        If the compiler rejects programs that need too much memory, its decision is the result,
        because the sum of all parts may be slightly too large for a program that the compiler
        accepts.
        """
        if self.out_of_memory is not None or topology.chip is None:
            return self.out_of_memory is None
        peak = self.peak_bytes
        return topology.chip.rejects or peak is None or peak <= topology.chip.usable_memory

    @property
    def peak_bytes(self) -> int | None:
        """Bytes at the peak, or None if the step does not fit."""
        if self.temp_bytes is None:
            return None
        # Rollouts and updates take turns, so the larger of the two determines the peak.
        needed = max(self.temp_bytes + self.code_bytes, self.rollout_bytes or 0)
        return self.argument_bytes + needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Roofline estimate of a step in seconds, with every part at its peak rate."""

    matmuls: float
    hbm: float
    interconnect: float

    @classmethod
    def from_plan(cls, plan: Plan, topology: Topology) -> "Estimate":
        """Computes the estimate for real chips; virtual devices have no peak rates."""
        chip = topology.chip
        assert chip is not None
        return cls(
            matmuls=plan.device_flops / chip.flops,
            hbm=plan.hbm_bytes / chip.memory_bandwidth,
            interconnect=sum((x.seconds or 0.0 for x in plan.collectives), 0.0),
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
        assert topology.chip is not None
        ideal = plan.model_flops / plan.num_devices / topology.chip.flops
        return ideal / self.sequential, ideal / self.overlapped


def used_bytes(message: str) -> int | None:
    """Returns the memory that a step would use, from the compiler's out-of-memory message."""
    # Compilers word the message in one of two ways.
    sizes = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.search(r"Used ([\d.]+)([KMGT]?) of|\(([\d.]+)([KMGT]?)\) exceeds", message)
    if found is None:
        return None
    number, unit = found[1] or found[3], found[2] or found[4] or ""
    return int(float(number) * sizes[unit])


def make_plan(config: TrainConfig, topology: Topology) -> Plan:
    """Compiles a run's train step for a topology and reads its memory, FLOPs and collectives.

    Args:
        config: The run. No data are read, but the model must have its final vocabulary size.
        topology: The devices, from `parse_topology`.

    Returns:
        The plan. If the step needs too much memory, the plan has `out_of_memory`.

    Raises:
        UserError: Mesh, batch and parameters cannot be divided over the devices.
        RunError: The compiler is not installed, or ended its process.
    """
    chip = topology.chip
    # Look for the compiler here, because without it the worker would end with a traceback.
    if chip is not None and importlib.util.find_spec(chip.package) is None:
        raise RunError(
            f"topology {topology.name} needs {chip.compiler}: pip install 'flaxzoo[{chip.extra}]', "
            f"or compute only FLOPs and bytes with --topology cpu:{topology.num_devices}"
        )
    # The worker reads the request from standard input, and prints one JSON object.
    request = {"topology": topology.name, "config": to_dict(config)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.worker"],
        input=json.dumps(request),
        env={**os.environ, **topology.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - started
    # Libraries may also print to standard output. The worker's line is a JSON object.
    replies = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(replies) != 1:
        lines = list(filter(str.strip, done.stderr.splitlines())) or ["nothing"]
        raise RunError(
            f"the compiler for {topology.name} ended with status {done.returncode} and printed: "
            f"{lines[-1][:500]}"
        )
    [reply] = replies
    if "error" in reply:
        raise UserError(reply["error"])
    collectives = tuple(Collective(**fields) for fields in reply.pop("collectives"))
    return Plan(**{**reply, "collectives": collectives, "seconds": seconds})
