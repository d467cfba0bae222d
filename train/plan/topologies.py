"""TPUs by name: what a chip can do, and which shapes there are.

Sources: Google Cloud's documentation of v4, v5e, v5p and v6e (docs.cloud.google.com/tpu/docs/v6e
and so on): peak compute, bandwidth of the memory and of the interconnect, ports, topologies;
"How to scale your model" (jax-ml.github.io/scaling-book/tpus) for links that wrap around and
the network between slices.  What a program may use of the memory is what the TPU
compiler says when it refuses one.
"""

import dataclasses
import math
import os
import re
from typing import Any

from ...data.errors import UserError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip; rates are peaks."""

    flops: float
    """Of bfloat16 products, per second."""
    memory: int
    """Bytes that a program may use."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second of one link in one direction; two links stand along each axis."""
    wraps: int
    """An axis of a multiple of this length is a ring, else a line."""
    network_bandwidth: float
    """Bytes per second of a chip to other slices."""
    shapes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    """What jax has to be told of it."""


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
CHIPS = {
    "v4": Chip(
        275e12,
        int(30.75 * GIB),
        1.23e12,
        50e9,
        4,
        6.25e9,
        _CUBES,
        (("chip_config_name", "megacore"),),  # its two cores are one device
    ),
    "v5e": Chip(197e12, int(15.75 * GIB), 0.82e12, 50e9, 16, 6.25e9, _FLAT),
    "v5p": Chip(459e12, int(95.74 * GIB), 2.77e12, 100e9, 4, 6.25e9, (*_CUBES, "16x16x24")),
    "v6e": Chip(918e12, int(31.25 * GIB), 1.64e12, 100e9, 16, 12.5e9, _FLAT),
}
MOST_SLICES = 64
MOST_CPUS = 4096


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices, by their name."""

    name: str
    chip: Chip | None
    """None: virtual devices of a CPU."""
    slices: int
    shape: tuple[int, ...]
    """Chips along each axis of a slice."""

    @property
    def num_devices(self) -> int:
        """Of all slices."""
        return self.slices * math.prod(self.shape)


def parse_topology(name: str) -> Topology:
    """`v5p:8x8x8`, `4*v6e:16x16` (four slices) or `cpu:512`.

    Raises:
      UserError: there is no such chip or shape. The TPU compiler would end the process.
    """
    found = re.fullmatch(r"(?:(\d+)\*)?(\w+):([\dx]+)", name)
    if found is None or found[2] not in (*CHIPS, "cpu"):
        raise UserError(
            f"topology {name!r} is unknown: {_same_devices(name)}give a chip "
            f"({', '.join(CHIPS)}) and a shape, as v5p:8x8x8, several slices as 4*v6e:16x16, or "
            "virtual devices as cpu:512; for a GPU there is flaxzoo bench, which runs on it"
        )
    slices, kind, shape = int(found[1] or 1), found[2], found[3]
    if kind == "cpu":
        if found[1] or not shape.isdecimal() or not 1 <= int(shape) <= MOST_CPUS:
            raise UserError(
                f"topology {name!r}: give a number of virtual devices from 1 to {MOST_CPUS}, "
                "as cpu:512"
            )
        return Topology(name, None, 1, (int(shape),))
    chip = CHIPS[kind]
    if shape not in chip.shapes:
        raise UserError(
            f"topology {name!r}: {kind} has no shape {shape}: choose from {', '.join(chip.shapes)}"
        )
    if not 1 <= slices <= MOST_SLICES:
        raise UserError(f"topology {name!r}: give from 1 to {MOST_SLICES} slices")
    return Topology(name, chip, slices, tuple(map(int, shape.split("x"))))


def _same_devices(name: str) -> str:
    """What a name that Google Cloud gives a machine, as v5p-16, is called here."""
    found = re.fullmatch(r"(v4|v5litepod|v5e|v5p|v6e)-(\d+)", name)
    if found is None:
        return ""
    kind = found[1].replace("litepod", "e")
    cores = 2 if kind in ("v4", "v5p") else 1  # of a chip: these are counted by their cores
    sizes = {math.prod(map(int, shape.split("x"))): shape for shape in CHIPS[kind].shapes}
    shape = sizes.get(int(found[2]) // cores)
    return f"its chips are {kind}:{shape}; " if shape else ""


def topology_devices(topology: Topology) -> list[Any]:
    """The devices, slice by slice, to compile for: none of them need be here.

    Of a TPU in a process of its own, whose environment `TPU_ENVIRONMENT` prepares.
    """
    import jax
    from jax.experimental import topologies

    if topology.chip is None:
        return jax.devices("cpu")
    options: dict[str, Any] = dict(topology.chip.options)
    if topology.num_devices == topology.slices:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    name = topology.name.rsplit("*", 1)[-1]
    return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


TPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}


def environment(topology: Topology) -> dict[str, str]:
    """What a process that compiles for these devices must find in its environment."""
    if topology.chip is not None:
        return TPU_ENVIRONMENT
    flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{flags} --xla_force_host_platform_device_count={topology.num_devices}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
