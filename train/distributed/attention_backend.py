"""Chooses the attention kernel of a run: the fastest kernel that supports the devices and sizes."""

import dataclasses
import re
from typing import Any, Literal, Protocol, runtime_checkable

from ...data.common.fields import require
from ...models.nn.fused_attention import AttentionCall, refusal
from ...models.nn.kernels.blockwise import LARGEST_BLOCK
from ..config import TrainConfig
from .ring_attention import PART_KERNELS, ring_refusal

Kernel = Literal["xla", "cudnn", "splash", "flash", "triton", "blocks"]

NAMES: dict[str, str] = {
    "xla": "XLA",
    "cudnn": "cuDNN",
    "splash": "splash attention",
    "flash": "flash attention",
    "triton": "flash attention in Triton",
    "blocks": "XLA block by block",
}
"""Maps each kernel to its name in messages."""
Kernels = tuple[Kernel, ...]
FASTEST: dict[str, Kernels] = {"gpu": ("cudnn",), "tpu": ("splash",)}
"""Maps each platform to its fastest kernel. Other platforms use XLA."""
DROPPING: dict[str, Kernels] = {"gpu": ("triton",), "tpu": ("flash",)}
"""Maps each platform to its fastest kernel for models with attention dropout."""
FASTEST_ON_RING: dict[str, Kernels] = {
    "gpu": ("cudnn", "blocks"),
    "tpu": ("splash", "blocks"),
}
"""Maps each platform to its kernels for sharded tokens, fastest first. Other platforms use
"blocks"."""
PLATFORMS: dict[str, str] = {"cudnn": "gpu", "splash": "tpu", "flash": "tpu", "triton": "gpu"}
LEAST_CAPABILITY = (8, 0)
"""The compute capability of the oldest NVIDIA GPUs that the GPU kernels support (Ampere)."""


@runtime_checkable
class Device(Protocol):
    """A device that attention runs on."""

    @property
    def platform(self) -> str:
        """The name of the jax platform: "cpu", "gpu" or "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """The name of the device's model, such as "NVIDIA H100"."""
        ...


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The chosen kernel, and why a faster kernel was not chosen."""

    kernel: Kernel
    instead_of: str = ""
    """A faster kernel that was not chosen; empty if there is none."""
    reason: str = ""
    """The reason why the faster kernel was not chosen."""
    ring: int = 1
    """The number of devices in a ring; 1 without a ring."""

    @property
    def description(self) -> str:
        """`attention by XLA, not by cuDNN: …`."""
        ring = f" on a ring of {self.ring} devices" if self.ring > 1 else ""
        other = f", not by {NAMES[self.instead_of]}: {self.reason}" if self.instead_of else ""
        return f"attention by {NAMES[self.kernel]}{ring}{other}"


def choose_kernel(config: TrainConfig, device: Device, context: int = 1) -> KernelChoice:
    """Returns the attention kernel for the steps of a run on devices of the given kind.

    Args:
        config: the configuration of the run. If `execution.attention` names a kernel, the run uses
          this kernel.
        device: one of the devices that the step is compiled for.
        context: the number of devices that the tokens of a row are sharded over.

    Raises:
        UserError: the kernel named by `execution.attention` does not support the run.
    """
    requested, platform = config.execution.attention, device.platform
    drops = any(part.attention_dropout_rate > 0 for part in (config.model, config.model.decoder))
    kernels = (DROPPING if drops else FASTEST).get(platform, ())
    if requested == "xla":
        return KernelChoice("xla", "".join(kernels), "execution.attention says so")
    if requested != "auto":
        kernels = (requested,)
    elif context > 1:
        kernels = FASTEST_ON_RING.get(platform, ("blocks",))
    elif config.model.has_two_sided_windows and max(config.data.lengths) > LARGEST_BLOCK:
        # XLA would store the attention scores of all token pairs in a long row, although the
        # windows mask most pairs.
        kernels = *kernels, "blocks"
    # Choose the first kernel that supports the run. If it is not the first in the list, remember
    # why the first kernel does not support the run.
    refused: list[tuple[str, str]] = []
    for kernel in kernels:
        reason = _reason(kernel, config, device, context)
        if requested == "auto" and kernel == "splash" and config.model.has_two_sided_windows:
            reason = reason or "windows with two sides have not been tested on a TPU"
        best, why = next(iter(refused), ("", ""))
        if reason is None:
            return KernelChoice(kernel, best, why, context if kernel in PART_KERNELS else 1)
        refused.append((kernel, reason))
    best, why = next(iter(refused), ("", ""))
    require(
        requested == "auto",
        f"execution.attention {requested} does not support this run ({why}): leave "
        "execution.attention out, or choose xla",
    )
    return KernelChoice("xla", best, why)


def _reason(kernel: Kernel, config: TrainConfig, device: Device, context: int) -> str | None:
    """Returns why a kernel does not support a training step, or None if it does."""
    # First check the device, and then the sizes of the attention calls.
    platform = PLATFORMS.get(kernel)
    if platform not in (None, device.platform):
        return f"the kernel requires a {platform}, got a {device.platform}"
    if platform == "gpu" and _is_old(device):
        return f"the kernel requires NVIDIA's Ampere or later, got {device.device_kind}"
    # Check the sizes of self-attention in the encoder and the decoder, and of cross-attention.
    source, target = config.data.lengths
    encoder, decoder = config.model, config.model.decoder
    for sizes, queries, keys in (
        (encoder, source, source),
        (decoder, target, target),
        (decoder, target, source),
    ):
        call = AttentionCall(
            num_queries=queries,
            num_keys=keys,
            key_dim=sizes.key_dim,
            head_dim=sizes.value_dim,
            dtype=config.execution.dtype,
            dropout_rate=sizes.attention_dropout_rate,
            biased=sizes.scores_by_distance,
            capped=sizes.score_cap is not None,
            two_sided=sizes.has_two_sided_windows,
        )
        on_ring = ring_refusal(kernel, call, context) if context > 1 else None
        reason = refusal(kernel, call) or on_ring
        if reason is not None:
            return reason
    return None


def _is_old(gpu: Any) -> bool:
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(gpu.compute_capability))  # not gfx90a, an AMD GPU
    return numbers is None or tuple(map(int, numbers.groups())) < LEAST_CAPABILITY
