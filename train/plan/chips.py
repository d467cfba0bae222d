"""The peak rates, the memory and the interconnect of accelerators, by name.

The sources are Google Cloud's documentation of v4, v5e, v5p and v6e
(docs.cloud.google.com/tpu/docs/v6e and so on) for peak compute, memory and interconnect bandwidth,
ports and topologies; "How to scale your model" (jax-ml.github.io/scaling-book/tpus) for wraparound
links and the network between slices; NVIDIA's data sheets for its GPUs; and the data sheets of DGX
A100, H100, H200 and B200 (for L4, AWS g6.48xlarge) for the network adapters of a host. The usable
memory of a TPU is the limit that its compiler states when it rejects a program. The usable memory
of a GPU is the fraction that jax allocates.
"""

from .chip import GIB, Gpu, Tpu

_2D_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D_SHAPES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
_HOST = ("1", "2", "4", "8")
# The row of a TPU has the fields of `Chip` in their order, followed by the fields of `Tpu`.
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
"""Maps `jax.Device.device_kind` to the peak FLOP/s of bfloat16 matmuls that accumulate in float32,
without sparsity."""
