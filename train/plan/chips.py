"""Accelerators by name: peak rates, memory and interconnect.

Sources: Google Cloud's documentation of v4, v5e, v5p and v6e (docs.cloud.google.com/tpu/docs/v6e
and so on) for peak compute, memory and interconnect bandwidth, ports and topologies; "How to scale
your model" (jax-ml.github.io/scaling-book/tpus) for wraparound links and the network between
slices; NVIDIA's data sheets of its GPUs, and of DGX A100, H100, H200 and B200 for the network
adapters of a host (for L4, AWS g6.48xlarge). The usable memory of a TPU is the limit that its
compiler states when it rejects a program. The usable memory of a GPU is the fraction that jax
allocates.
"""

import abc
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from ...data.common.fields import require

GIB = 1 << 30
Device: TypeAlias = Any
"""A `jax.Device`. No public type has the `coords` and `slice_index` of a TPU."""


@dataclasses.dataclass(frozen=True)
class Chip(abc.ABC):
    """An accelerator. All rates are peak rates."""

    flops: float
    """bfloat16 matmul FLOP/s, accumulated in float32, without sparsity."""
    memory: int
    """Bytes of HBM."""
    memory_bandwidth: float
    """Bytes per second between HBM and the chip."""
    link_bandwidth: float
    """Bytes per second of the interconnect in one direction: one link of a TPU, whose torus has two
    links per axis, or all links of a GPU together."""
    network_bandwidth: float
    """Bytes per second that one chip sends over the network to other units."""
    shapes: tuple[str, ...]
    """The available sizes of a unit: a torus such as `2x2x4`, or a number of GPUs."""

    unit: ClassVar[str]
    """The name of a unit, a group of chips that share an interconnect: `slice` or `host`. The
    network connects units.
    """
    package: ClassVar[str]
    """The module whose presence shows that the compiler is installed."""
    extra: ClassVar[str]
    """The optional dependencies of flaxzoo that install the compiler."""
    compiler: ClassVar[str]
    """How messages name the compiler."""
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
    def unit_of(self, device: Device) -> int:
        """Returns the index of the unit that a device is in."""

    @abc.abstractmethod
    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """Returns the bytes per second that a device can send to its group.

        Args:
            group: Devices that exchange data.
            shape: Number of chips along each axis of a unit.
        """

    def crosses(self, group: Sequence[Device]) -> bool:
        """Returns whether a group spans several units."""
        return len(set(map(self.unit_of, group))) > 1


@dataclasses.dataclass(frozen=True)
class Tpu(Chip):
    """A TPU chip. The field `memory` is the usable memory."""

    ring_multiple: int
    """An axis of the topology is a ring if its length is a multiple of this number, otherwise a
    line."""
    megacore: bool = False
    """Whether jax needs an option to treat the two cores of a chip as one device."""

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

    def unit_of(self, device: Device) -> int:
        """Returns the index of a device's slice; devices of a single slice may lack an index."""
        return getattr(device, "slice_index", 0)

    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """Returns the bytes per second that a device can send to its group.

        Each axis of the topology that the group spans adds its links: two if the axis is a ring,
        because a device then sends in both directions, and one if it is a line.
        """
        if self.crosses(group):
            return self.network_bandwidth
        total = 0.0
        for axis, length in enumerate(shape):
            if len({device.coords[axis] for device in group}) > 1:
                total += self.link_bandwidth * (1 if length % self.ring_multiple else 2)
        # A group of a single device sends nothing, but its rate must not be 0.
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
    """The compute capability: Ampere is 8.0, Ada 8.9, Hopper 9.0, Blackwell 10.0."""
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
        # Check the variable here, because the compiler's message would not name it.
        memory_fraction()
        # Autotuning times kernels, which needs a GPU.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "2"}

    def unit_of(self, device: Device) -> int:
        """Returns the index of the host that a device is in."""
        return device.process_index

    def bandwidth(self, group: Sequence[Device], shape: tuple[int, ...]) -> float:
        """Returns the bytes per second that a device can send to its group.

        Between hosts, the group uses one ring per GPU on a host, each with one network adapter.
        """
        if not self.crosses(group):
            return self.link_bandwidth
        # The host with the fewest GPUs in the group limits the number of rings.
        on_one_host = min(Counter(map(self.unit_of, group)).values())
        return min(self.link_bandwidth, on_one_host * self.network_bandwidth)

    def target(self) -> str:
        """Returns the GPU's description for XLA as a text protocol buffer."""
        major, minor = self.capability
        per_core, per_block, threads = _SHARED_MEMORY[self.capability]
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              clock_rate_ghz: {self.clock}
              fpus_per_core: {64 if self.capability == (8, 0) else 128}
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


_SHARED_MEMORY = {
    (8, 0): (167936, 166912, 2048),
    (8, 9): (102400, 101376, 1536),
    (9, 0): (233472, 232448, 2048),
    (10, 0): (233472, 232448, 2048),
}
"""Compute capability → shared memory of a multiprocessor and of a block in bytes, and threads of a
multiprocessor (CUDA C++ Programming Guide, table of technical specifications)."""


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


_2D_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D_SHAPES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
_HOST = ("1", "2", "4", "8")
# A row of a TPU has the fields of `Chip` in their order, then the fields of `Tpu`.
CHIPS: dict[str, Tpu | Gpu] = {
    "v4": Tpu(275e12, int(30.75 * GIB), 1.23e12, 50e9, 6.25e9, _3D_SHAPES, 4, megacore=True),
    "v5e": Tpu(197e12, int(15.75 * GIB), 0.82e12, 50e9, 6.25e9, _2D_SHAPES, 16),
    "v5p": Tpu(459e12, int(95.74 * GIB), 2.77e12, 100e9, 6.25e9, (*_3D_SHAPES, "16x16x24"), 4),
    "v6e": Tpu(918e12, int(31.25 * GIB), 1.64e12, 100e9, 12.5e9, _2D_SHAPES, 16),
    "l4": Gpu(
        flops=121e12,
        memory=24_152_899_584,
        memory_bandwidth=0.3e12,
        link_bandwidth=32e9,
        network_bandwidth=1.5625e9,
        shapes=_HOST,
        kind="NVIDIA L4",
        capability=(8, 9),
        cores=58,
        clock=2.04,
        cache=48 << 20,
    ),
    "a100-40gb": Gpu(
        flops=312e12,
        memory=42_297_786_368,
        memory_bandwidth=1.555e12,
        link_bandwidth=300e9,
        network_bandwidth=25e9,
        shapes=_HOST,
        kind="NVIDIA A100-SXM4-40GB",
        capability=(8, 0),
        cores=108,
        clock=1.41,
        cache=40 << 20,
    ),
    "a100": Gpu(
        flops=312e12,
        memory=85_100_068_864,
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,
        network_bandwidth=25e9,
        shapes=_HOST,
        kind="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        clock=1.41,
        cache=40 << 20,
    ),
    "h100": Gpu(
        flops=989e12,
        memory=84_942_979_072,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        shapes=_HOST,
        kind="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        clock=1.98,
        cache=50 << 20,
    ),
    "h200": Gpu(
        flops=989e12,
        memory=150_754_820_096,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        shapes=_HOST,
        kind="NVIDIA H200",
        capability=(9, 0),
        cores=132,
        clock=1.98,
        cache=60 << 20,
    ),
    "b200": Gpu(
        flops=2250e12,
        memory=191_514_411_008,
        memory_bandwidth=7.7e12,
        link_bandwidth=900e9,
        network_bandwidth=50e9,
        shapes=_HOST,
        kind="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        clock=1.965,
        cache=126 << 20,
    ),
}

PEAK_FLOPS = {
    **{chip.kind: chip.flops for chip in CHIPS.values() if isinstance(chip, Gpu)},
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10": 125e12,
    "TPU v4": CHIPS["v4"].flops,
    "TPU v5 lite": CHIPS["v5e"].flops,
    "TPU v5": CHIPS["v5p"].flops,
    "TPU v6 lite": CHIPS["v6e"].flops,
}
"""`jax.Device.device_kind` → peak bfloat16 matmul FLOP/s, accumulated in float32, without
sparsity."""
