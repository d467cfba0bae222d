"""The kinds of accelerators to plan for: TPUs, GPUs, and virtual devices of a CPU."""

import abc
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import jax
from jax.experimental import topologies

from ...data.common.fields import require

GIB = 1 << 30
Device: TypeAlias = Any
"""A `jax.Device`. There is no public type that has the `coords` and `slice_index` of a TPU."""


@dataclasses.dataclass(frozen=True)
class Chip(abc.ABC):
    """An accelerator with its peak rates."""

    flops: float
    """FLOP/s of bfloat16 matmuls that accumulate in float32, without sparsity."""
    memory: int
    """The size of the HBM in bytes."""
    memory_bandwidth: float
    """Bytes per second between HBM and the chip."""
    link_bandwidth: float
    """Bytes per second of the interconnect in one direction. For a TPU, this is one link (a torus
    has two links per axis); for a GPU, all links together."""
    network_bandwidth: float
    """Bytes per second that one chip can send over the network to other units."""
    shapes: tuple[str, ...]
    """The available sizes of a unit: a torus such as `2x2x4`, or a number of GPUs."""

    unit: ClassVar[str]
    """The name of a unit, which is a group of chips that share an interconnect: `slice` or `host`.
    The network connects units.
    """
    package: ClassVar[str]
    """The module whose presence shows that the compiler is installed."""
    extra: ClassVar[str]
    """The optional dependencies of flaxzoo that install the compiler."""
    compiler: ClassVar[str]
    """The name of the compiler in messages."""
    rejects: ClassVar[bool]
    """Whether the compiler rejects a program that needs too much memory."""
    parameters_cross_units: ClassVar[bool]
    """Whether parameters may be sharded over several units, such as GPUs of several hosts."""

    @property
    @abc.abstractmethod
    def usable_memory(self) -> int:
        """The bytes of HBM that a program may use."""

    @abc.abstractmethod
    def environment(self) -> dict[str, str]:
        """Returns the environment variables that a process needs to compile for this chip."""

    @abc.abstractmethod
    def devices(self, name: str, units: int, shape: tuple[int, ...]) -> list[Device]:
        """Returns the devices to compile for, ordered by unit.

        The process must have started with the variables of `environment`.

        Args:
            name: the name of the topology.
            units: the number of units.
            shape: the number of chips along each axis of a unit.
        """

    @abc.abstractmethod
    def unit_of(self, device: Device) -> int:
        """Returns the index of the unit that contains a device."""

    @abc.abstractmethod
    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """Returns the bytes per second that a device can send to its group.

        Args:
            group: Devices that exchange data.
            shape: Number of chips along each axis of a unit.
        """

    def crosses(self, group: Sequence[Device]) -> bool:
        """Returns whether a group of devices spans several units."""
        return len(set(map(self.unit_of, group))) > 1


@dataclasses.dataclass(frozen=True)
class Tpu(Chip):
    """A TPU chip. The field `memory` is the usable memory."""

    ring_multiple: int
    """An axis of the topology is a ring if its length is a multiple of this number, and otherwise a
    line."""
    megacore: bool = False
    """Whether jax must be configured to treat the two cores of a chip as one device."""

    unit = "slice"
    package = "libtpu"
    extra = "tpu"
    compiler = "the TPU compiler"
    rejects = True
    parameters_cross_units = False

    @property
    def usable_memory(self) -> int:
        """The bytes of HBM that a program may use."""
        return self.memory

    def environment(self) -> dict[str, str]:
        """Returns variables that let libtpu compile silently on a machine without a TPU."""
        return {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_LOG_DIR": "disabled",
            "TPU_MIN_LOG_LEVEL": "3",
        }

    def devices(self, name: str, units: int, shape: tuple[int, ...]) -> list[Device]:
        """See `Chip`."""
        # libtpu expects the name of one slice. A separate option has the number of slices.
        name = name.rsplit("*", 1)[-1]
        options: dict[str, str | int | tuple[int, ...]] = {}
        if self.megacore:
            options["chip_config_name"] = "megacore"
        # Set the number of chips, because jax otherwise expects four chips per host.
        if math.prod(shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if units > 1:
            options["num_slices"] = units
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)

    def unit_of(self, device: Device) -> int:
        """Returns the index of a device's slice, which devices of a single slice may lack."""
        return getattr(device, "slice_index", 0)

    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """Returns the bytes per second that a device can send to its group.

        Each axis of the topology that the group spans contributes its links. A ring contributes two
        links, because a device sends in both directions, and a line contributes one.
        """
        if self.crosses(group):
            return self.network_bandwidth
        total = 0.0
        for axis, length in enumerate(shape):
            if len({device.coords[axis] for device in group}) > 1:
                total += self.link_bandwidth * (1 if length % self.ring_multiple else 2)
        # A group of a single device sends no data, but its rate must not be 0.
        return total or self.link_bandwidth


MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
"""The environment variable for the fraction of a GPU's memory that jax allocates."""
OLD_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The former name of this variable, which jax still reads."""
DEFAULT_MEMORY_FRACTION = 0.75


@dataclasses.dataclass(frozen=True)
class Gpu(Chip):
    """An NVIDIA GPU in a host whose GPUs are connected by NVLink (L4: by PCIe)."""

    kind: str
    """The `device_kind` of the GPU in jax."""
    capability: tuple[int, int]
    """The compute capability: 8.0 for Ampere, 8.9 for Ada, 9.0 for Hopper, 10.0 for Blackwell."""
    cores: int
    """Number of streaming multiprocessors."""
    clock: float
    """The highest clock rate, in GHz."""
    cache: int
    """Bytes of the level-2 cache."""

    unit = "host"
    package = "jax_cuda13_plugin"
    extra = "cuda"
    compiler = "XLA for GPUs"
    rejects = False
    parameters_cross_units = True

    @property
    def usable_memory(self) -> int:
        """The bytes of HBM that jax allocates, which a program may use."""
        return int(self.memory * memory_fraction())

    def environment(self) -> dict[str, str]:
        """Returns variables that let XLA compile on a machine without a GPU."""
        # Check the environment variable here, because the compiler's message would not name it.
        memory_fraction()
        # Turn off autotuning, because it times kernels and would need a GPU.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "2"}

    def devices(self, name: str, units: int, shape: tuple[int, ...]) -> list[Device]:
        """See `Chip`."""
        del name
        # XLA's format is partitions, hosts per partition, and devices per host.
        sizes = f"1x{units}x{shape[0]}"
        options = {"target_config": self.target()}
        described = topologies.get_topology_desc("", "cuda", topology=sizes, **options)
        return list(described.devices)

    def unit_of(self, device: Device) -> int:
        """Returns the index of the host that contains a device."""
        return device.process_index

    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """Returns the bytes per second that a device can send to its group.

        Between hosts, the group uses one ring for each GPU of a host. Each ring has one network
        adapter.
        """
        if not self.crosses(group):
            return self.link_bandwidth
        # The host with the fewest GPUs in the group limits the number of rings.
        on_one_host = min(Counter(map(self.unit_of, group)).values())
        return min(self.link_bandwidth, on_one_host * self.network_bandwidth)

    def target(self) -> str:
        """Returns the GPU's description for XLA as a text protocol buffer."""
        major, minor = self.capability
        units, per_core, per_block, threads = _MULTIPROCESSORS[self.capability]
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              clock_rate_ghz: {self.clock}
              fpus_per_core: {units}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.memory_bandwidth:.0f}
              l2_cache_size: {self.cache}
              shared_memory_per_core: {per_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {per_block}
              threads_per_core_limit: {threads}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 11 }}
            runtime_version {{ major: 13 }}
            device_description_str: "{self.kind}"
        """


@dataclasses.dataclass(frozen=True)
class Virtual(Chip):
    """Virtual devices of a CPU, which have no peak rates and no separate memory."""

    number: int
    """The number of devices."""

    unit = "host"
    package = "jax"
    extra = "cpu"
    compiler = "XLA for CPUs"
    rejects = True
    parameters_cross_units = True

    @classmethod
    def of(cls, number: int) -> "Virtual":
        """Returns the given number of virtual devices."""
        return cls(math.inf, 0, math.inf, math.inf, math.inf, (str(number),), number)

    @property
    def usable_memory(self) -> int:
        """See `Chip`; 0, because the memory of the machine is unknown."""
        return self.memory

    def environment(self) -> dict[str, str]:
        """See `Chip`."""
        flags = os.environ.get("XLA_FLAGS", "")
        flags = f"{flags} --xla_force_host_platform_device_count={self.number}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}

    def devices(self, name: str, units: int, shape: tuple[int, ...]) -> list[Device]:
        """See `Chip`."""
        del name, units, shape
        return jax.devices("cpu")

    def unit_of(self, device: Device) -> int:
        """See `Chip`; all devices are in one unit."""
        del device
        return 0

    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """See `Chip`."""
        del group, shape
        return self.link_bandwidth


_MULTIPROCESSORS = {
    (8, 0): (64, 167936, 166912, 2048),
    (8, 9): (128, 102400, 101376, 1536),
    (9, 0): (128, 233472, 232448, 2048),
    (10, 0): (128, 233472, 232448, 2048),
}
"""Maps the compute capability to the float units of a multiprocessor, the bytes of shared memory of
a multiprocessor and of a block, and the threads of a multiprocessor (CUDA C++ Programming Guide,
table of technical specifications)."""


def memory_fraction() -> float:
    """Returns the fraction of a GPU's memory that jax allocates, from the environment.

    Raises:
        UserError: the variable is not a number above 0 and at most 1.
    """
    name = MEMORY_FRACTION if os.environ.get(MEMORY_FRACTION) else OLD_MEMORY_FRACTION
    value = os.environ.get(name) or str(DEFAULT_MEMORY_FRACTION)
    try:
        part = float(value)
    except ValueError:
        part = math.nan
    require(
        0 < part <= 1,
        f"{name} must be above 0 and at most 1, got {value!r}: give the fraction of a GPU's memory "
        f"that jax may take, as {name}=0.92",
    )
    return part
