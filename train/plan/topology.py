"""Devices to plan for, named like `v5p:8x8x8` or `2*h100:8`. The devices need not be present."""

import dataclasses
import math
import os
import re

import jax
from jax.experimental import topologies

from ...data.common.errors import UserError
from ...data.common.fields import require, require_one_of
from .chips import CHIPS, Chip, Device, Gpu, Tpu

MAX_UNITS = 64
MAX_CPU_DEVICES = 4096


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices described by a name such as `4*v6e:16x16`."""

    name: str
    chip: Chip | None
    """None if the devices are virtual devices of a CPU."""
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
        """A number that must divide `mesh.data`, to keep parameters off the slow network."""
        crossed = self.chip is None or self.chip.parameters_cross_units
        return 1 if crossed else self.units

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that a process needs to compile for these devices."""
        if self.chip is not None:
            return self.chip.environment()
        flags = os.environ.get("XLA_FLAGS", "")
        flags = f"{flags} --xla_force_host_platform_device_count={self.num_devices}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}

    def devices(self) -> list[Device]:
        """Returns the devices to compile for, unit by unit.

        The process must have started with the variables of `environment`.
        """
        if isinstance(self.chip, Gpu):
            options = {"target_config": self.chip.target()}
            # XLA's form: partitions, hosts per partition, devices per host.
            sizes = f"1x{self.units}x{self.shape[0]}"
            described = topologies.get_topology_desc("", "cuda", topology=sizes, **options)
            return list(described.devices)
        if isinstance(self.chip, Tpu):
            return self._tpus(self.chip)
        return jax.devices("cpu")

    def _tpus(self, chip: Tpu) -> list[Device]:
        # libtpu takes the name of one slice. A separate option has the number of slices.
        name = self.name.rsplit("*", 1)[-1]
        options: dict[str, str | int | tuple[int, ...]] = {}
        if chip.megacore:
            options["chip_config_name"] = "megacore"
        # Set the number of chips, because jax otherwise expects four chips per host.
        if self.num_devices == self.units:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.units > 1:
            options["num_slices"] = self.units
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)


def parse_topology(name: str) -> Topology:
    """Parses `v5p:8x8x8`, `4*v6e:16x16` (four slices), `2*h100:8` (two hosts) or `cpu:512`.

    Checks the whole name, because the TPU compiler ends the process on an invalid topology.

    Raises:
        UserError: The chip or the shape is unknown.
    """
    found = re.fullmatch(r"(?:(\d+)\*)?([\w-]+):([\dx]+)", name)
    if found is None or found[2] not in (*CHIPS, "cpu"):
        raise UserError(
            f"topology {name!r} is unknown: give a chip ({', '.join(CHIPS)}) and a shape or a "
            "number of chips, as v5p:8x8x8 or h100:8, several slices or hosts as 4*v6e:16x16 or "
            "2*h100:8, or virtual devices as cpu:512; flaxzoo bench runs on the devices of this "
            "machine"
        )
    units, kind, shape = int(found[1] or 1), found[2], found[3]
    if kind == "cpu":
        require(
            not found[1] and shape.isdecimal() and 1 <= int(shape) <= MAX_CPU_DEVICES,
            f"topology {name!r}: give a number of virtual devices from 1 to {MAX_CPU_DEVICES}, as "
            "cpu:512",
        )
        return Topology(name, None, 1, (int(shape),))
    chip = CHIPS[kind]
    require_one_of(f"topology {name!r}: shape", shape, chip.shapes)
    require(1 <= units <= MAX_UNITS, f"topology {name!r}: give from 1 to {MAX_UNITS} {chip.unit}s")
    return Topology(name, chip, units, tuple(map(int, shape.split("x"))))
