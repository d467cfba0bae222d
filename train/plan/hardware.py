"""Accelerators by name: the peak rates of a chip, and the topologies that TPUs come in.

Sources: Google Cloud's documentation of v4, v5e, v5p and v6e (docs.cloud.google.com/tpu/docs/v6e
and so on) for peak compute, bandwidth of the memory and of the interconnect, ports and topologies;
"How to scale your model" (jax-ml.github.io/scaling-book/tpus) for links that wrap around and for
the network between slices; NVIDIA's data sheets for GPUs. The memory that a program may use is
the limit that the TPU compiler names when it rejects a program.
"""

import dataclasses
import math
import os
import re
from typing import Any, TypeAlias

import jax

from ...data.errors import UserError

GIB = 1 << 30
Device: TypeAlias = Any
"""A `jax.Device`; no public type has the `coords` and `slice_index` of a TPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A TPU chip; all rates are peaks."""

    flops: float
    """bfloat16 matmul FLOP/s, accumulated in float32, without sparsity."""
    memory: int
    """Bytes of HBM that a program may use."""
    memory_bandwidth: float
    """Bytes per second between HBM and the chip."""
    link_bandwidth: float
    """Bytes per second of one interconnect link in one direction; each axis has two links."""
    ring_multiple: int
    """An axis of the topology whose length is a multiple of this is a ring; others are lines."""
    network_bandwidth: float
    """Bytes per second from one chip to other slices."""
    shapes: tuple[str, ...]
    """The topologies that exist, as `2x2x4`."""
    megacore: bool = False
    """Whether jax has to be told that the two cores of a chip are one device."""


_2D_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D_SHAPES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
CHIPS = {
    "v4": Chip(
        flops=275e12,
        memory=int(30.75 * GIB),
        memory_bandwidth=1.23e12,
        link_bandwidth=50e9,
        ring_multiple=4,
        network_bandwidth=6.25e9,
        shapes=_3D_SHAPES,
        megacore=True,
    ),
    "v5e": Chip(
        flops=197e12,
        memory=int(15.75 * GIB),
        memory_bandwidth=0.82e12,
        link_bandwidth=50e9,
        ring_multiple=16,
        network_bandwidth=6.25e9,
        shapes=_2D_SHAPES,
    ),
    "v5p": Chip(
        flops=459e12,
        memory=int(95.74 * GIB),
        memory_bandwidth=2.77e12,
        link_bandwidth=100e9,
        ring_multiple=4,
        network_bandwidth=6.25e9,
        shapes=(*_3D_SHAPES, "16x16x24"),
    ),
    "v6e": Chip(
        flops=918e12,
        memory=int(31.25 * GIB),
        memory_bandwidth=1.64e12,
        link_bandwidth=100e9,
        ring_multiple=16,
        network_bandwidth=12.5e9,
        shapes=_2D_SHAPES,
    ),
}

PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10": 125e12,
    "TPU v4": CHIPS["v4"].flops,
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
}
"""Peak bfloat16 matmul FLOP/s (accumulated in float32, without sparsity) by
`jax.Device.device_kind`."""

MAX_SLICES = 64
MAX_CPU_DEVICES = 4096


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices that a name such as `4*v6e:16x16` stands for."""

    name: str
    chip: Chip | None
    """None for virtual devices of a CPU."""
    slices: int
    shape: tuple[int, ...]
    """Number of chips along each axis of a slice."""

    @property
    def num_devices(self) -> int:
        """Number of devices in all slices together."""
        return self.slices * math.prod(self.shape)

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of a process that compiles for these devices."""
        if self.chip is not None:
            return TPU_ENVIRONMENT
        flags = os.environ.get("XLA_FLAGS", "")
        flags = f"{flags} --xla_force_host_platform_device_count={self.num_devices}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}

    def devices(self) -> list[Device]:
        """Returns the devices to compile for, slice by slice; TPUs need not be present.

        The process must have been started with the variables of `environment`.
        """
        if self.chip is None:
            return jax.devices("cpu")
        from jax.experimental import topologies

        name = self.name.rsplit("*", 1)[-1]
        options: dict[str, str | int | tuple[int, ...]] = {}
        if self.chip.megacore:
            options["chip_config_name"] = "megacore"
        if self.num_devices == self.slices:  # else jax expects four chips on a host
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


TPU_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""Variables with which libtpu compiles on a machine that has no TPU, and logs nothing."""


def parse_topology(name: str) -> Topology:
    """Parses `v5p:8x8x8`, `4*v6e:16x16` (four slices) or `cpu:512`.

    Everything is checked here because the TPU compiler would end the process.

    Raises:
        UserError: There is no such chip or shape.
    """
    found = re.fullmatch(r"(?:(\d+)\*)?(\w+):([\dx]+)", name)
    if found is None or found[2] not in (*CHIPS, "cpu"):
        raise UserError(
            f"topology {name!r} is unknown: {_cloud_name_hint(name)}give a chip "
            f"({', '.join(CHIPS)}) and a shape, as v5p:8x8x8, several slices as 4*v6e:16x16, or "
            "virtual devices as cpu:512; for a GPU there is flaxzoo bench, which runs on it"
        )
    slices, kind, shape = int(found[1] or 1), found[2], found[3]
    if kind == "cpu":
        if found[1] or not shape.isdecimal() or not 1 <= int(shape) <= MAX_CPU_DEVICES:
            raise UserError(
                f"topology {name!r}: give a number of virtual devices from 1 to "
                f"{MAX_CPU_DEVICES}, as cpu:512"
            )
        return Topology(name, None, 1, (int(shape),))
    chip = CHIPS[kind]
    if shape not in chip.shapes:
        raise UserError(
            f"topology {name!r}: {kind} has no shape {shape}: choose from {', '.join(chip.shapes)}"
        )
    if not 1 <= slices <= MAX_SLICES:
        raise UserError(f"topology {name!r}: give from 1 to {MAX_SLICES} slices")
    return Topology(name, chip, slices, tuple(map(int, shape.split("x"))))


def _cloud_name_hint(name: str) -> str:
    """Returns a hint for Google Cloud's name of a machine, such as v5p-16, or nothing."""
    found = re.fullmatch(r"(v4|v5litepod|v5e|v5p|v6e)-(\d+)", name)
    if found is None:
        return ""
    kind = found[1].replace("litepod", "e")
    cores_per_chip = 2 if kind in ("v4", "v5p") else 1  # the number in these names counts cores
    shapes = {math.prod(map(int, shape.split("x"))): shape for shape in CHIPS[kind].shapes}
    shape = shapes.get(int(found[2]) // cores_per_chip)
    return f"its chips are {kind}:{shape}; " if shape else ""
