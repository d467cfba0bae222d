"""Does a run fit some devices, and how fast might it be: its real train step, compiled for them.

The devices need not be here.  Everything that compiles happens in a process of its own
(`plan_worker`), for the compiler ends the process that asks it for what it cannot do.
"""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

from ...data.errors import UserError
from ..config import TrainConfig, to_dict
from ..errors import RunError
from .topologies import Topology, environment


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What devices send each other in a step, of one kind."""

    kind: str
    number: int
    """How many such operations a step has."""
    bytes_sent: int
    """By each device, in all."""
    seconds: float | None
    """At the peak rate of the links; None: of virtual devices."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a compiled train step takes; bytes are of one device."""

    topology: str
    num_devices: int
    mesh: dict[str, int]
    tokens: int
    """Places for tokens in a step, over all devices."""
    num_parameters: int
    parameters: int
    optimizer: int
    batch: int
    model_flops: int
    """Of all matrix products of a step without recomputation, over all devices."""
    seconds: float
    """That the plan took."""
    attention: str = ""
    """What computes it, in words."""
    host: int = 0
    """Of the optimizer, in the memory of the device's host."""
    temporaries: int | None = None
    """At the peak; None where the compiler refused, or was not asked."""
    program: int = 0
    """Of the compiled code."""
    refusal: str | None = None
    """What the compiler said of a step that does not fit."""
    device_flops: int = 0
    """What one device computes in a step, recomputation included."""
    device_traffic: int = 0
    """What one device reads and writes in its main memory."""
    exchanges: tuple[Exchange, ...] = ()

    @property
    def arguments(self) -> int:
        """Bytes of all that the step is given."""
        return self.parameters + self.optimizer + self.batch

    @property
    def peak(self) -> int | None:
        """Bytes at the peak."""
        if self.temporaries is None:
            return None
        return self.arguments + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step at peak rates."""

    compute: float
    memory: float
    exchange: float
    least: float
    """If all that can run side by side does."""
    most: float
    """If nothing does."""

    @classmethod
    def of(cls, plan: Plan, topology: Topology) -> "Estimate":
        """The roofline: no part can be quicker than its peak rate allows."""
        chip = topology.chip
        assert chip is not None
        compute = plan.device_flops / chip.flops
        memory = plan.device_traffic / chip.memory_bandwidth
        exchange = sum((x.seconds or 0.0 for x in plan.exchanges), 0.0)
        parts = compute, memory, exchange
        return cls(*parts, max(parts), sum(parts))

    def utilisation(self, plan: Plan, topology: Topology) -> tuple[float, float]:
        """Model FLOPs over what the chips could do in the time: at most, and at least."""
        assert topology.chip is not None
        ideal = plan.model_flops / plan.num_devices / topology.chip.flops
        return ideal / self.least, ideal / self.most


def used_bytes(refusal: str) -> int | None:
    """How much memory the compiler says that a refused step would use."""
    sizes = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.search(r"Used ([\d.]+)([KMGT]?) of|\(([\d.]+)([KMGT]?)\) exceeds", refusal)
    if found is None:
        return None
    number, unit = found[1] or found[3], found[2] or found[4] or ""
    return int(float(number) * sizes[unit])


def make_plan(config: TrainConfig, topology: Topology) -> Plan:
    """Compiles a run's train step for a topology.

    Args:
      config: the run; no data and no vocabulary are needed.
      topology: from `parse_topology`.

    Raises:
      UserError: the run does not fit the devices in shape (not in memory: that the plan says).
      RunError: there is no TPU compiler here, or it broke off.
    """
    plan = _ask_worker([config], topology, compiled=True)[0]
    if isinstance(plan, str):
        raise UserError(plan)
    return plan


def survey(configs: list[TrainConfig], topology: Topology) -> list[Plan | str]:
    """The plans of several runs without compiling any: arguments alone; or why there is none."""
    return _ask_worker(configs, topology, compiled=False)


def _ask_worker(
    configs: list[TrainConfig], topology: Topology, *, compiled: bool
) -> list[Plan | str]:
    if topology.chip is not None and importlib.util.find_spec("libtpu") is None:
        raise RunError(
            f"topology {topology.name} needs the TPU compiler: pip install 'flaxzoo[tpu]', or do "
            f"the arithmetic alone with --topology cpu:{topology.num_devices}"
        )
    request = {
        "topology": topology.name,
        "configs": [to_dict(config) for config in configs],
        "compiled": compiled,
    }
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.worker"],
        input=json.dumps(request),
        env={**os.environ, **environment(topology)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) != len(configs):
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        raise RunError(
            f"the compiler for {topology.name} ended with status {done.returncode} and said: "
            f"{said[-1][:500]}"
        )
    seconds = time.monotonic() - started
    return [_read(line, seconds) for line in lines]


def _read(answer: dict[str, Any], seconds: float) -> Plan | str:
    if "error" in answer:
        return answer["error"]
    exchanges = tuple(Exchange(**x) for x in answer["exchanges"])
    return Plan(**{**answer, "exchanges": exchanges, "seconds": seconds})
