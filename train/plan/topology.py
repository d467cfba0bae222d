"""Devices to plan for, named like `v5p:8x8x8` or `2*h100:8`. The devices need not be present."""

import dataclasses
import math
import re

from ...data.common.errors import UserError
from ...data.common.fields import require, require_one_of
from .chip import Chip, Device, Virtual
from .chips import CHIPS

MAX_UNITS = 64
MAX_CPU_DEVICES = 4096


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices described by a name such as `4*v6e:16x16`."""

    name: str
    chip: Chip
    units: int
    """Number of slices of TPUs, or of hosts with GPUs."""
    shape: tuple[int, ...]
    """Number of chips along each axis of a unit."""

    @property
    def num_devices(self) -> int:
        """Number of devices in all units together."""
        return self.units * math.prod(self.shape)

    @property
    def data_multiple(self) -> int:
        """A number that must divide `mesh.data`, so that parameters avoid the slow network."""
        return 1 if self.chip.parameters_cross_units else self.units

    @property
    def is_virtual(self) -> bool:
        """Whether the devices are virtual devices of a CPU."""
        return isinstance(self.chip, Virtual)

    def devices(self) -> list[Device]:
        """Returns the devices to compile for; see `Chip.devices`."""
        return self.chip.devices(self.name, self.units, self.shape)


def parse_topology(name: str) -> Topology:
    """Parses `v5p:8x8x8`, `4*v6e:16x16` (four slices), `2*h100:8` (two hosts) or `cpu:512`.

    Checks the whole name, because the TPU compiler ends the process if the topology is invalid.

    Raises:
        UserError: The chip or the shape is unknown.
    """
    found = re.fullmatch(rf"(?:(\d+)\*)?({'|'.join(CHIPS)}|cpu):([\dx]+)", name)
    if found is None:
        raise UserError(
            f"topology {name!r} is unknown: give a chip ({', '.join(CHIPS)}) and a shape or a "
            "number of chips, as v5p:8x8x8 or h100:8, several slices or hosts as 4*v6e:16x16 or "
            "2*h100:8, or virtual devices as cpu:512; flaxzoo bench runs on the devices of this "
            "machine"
        )
    units, kind, shape = int(found[1] or 1), found[2], found[3]
    if kind == "cpu":
        require(
            not found[1] and shape in map(str, range(1, MAX_CPU_DEVICES + 1)),
            f"topology {name!r}: give a number of virtual devices from 1 to {MAX_CPU_DEVICES}, as "
            "cpu:512",
        )
        return Topology(name, Virtual.of(int(shape)), 1, (int(shape),))
    chip = CHIPS[kind]
    require_one_of(f"topology {name!r}: shape", shape, chip.shapes)
    require(1 <= units <= MAX_UNITS, f"topology {name!r}: give from 1 to {MAX_UNITS} {chip.unit}s")
    return Topology(name, chip, units, tuple(map(int, shape.split("x"))))
