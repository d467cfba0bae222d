"""The choice of a run's attention kernel: the fastest one that supports devices and sizes."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

from ...data.common.errors import UserError
from ...models.nn.fused_attention import AttentionCall, refusal
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
"""Kernel names for messages."""
FASTEST: dict[str, Kernel] = {"gpu": "cudnn", "tpu": "splash"}
"""The fastest kernel by platform; XLA elsewhere."""
DROPPING: dict[str, Kernel] = {"gpu": "triton", "tpu": "flash"}
"""The kernel for models with attention dropout by platform, if it is a different one."""
FASTEST_ON_RING: dict[str, tuple[Kernel, ...]] = {
    "gpu": ("cudnn", "blocks"),
    "tpu": ("splash", "blocks"),
}
"""Kernels by platform, best first, if tokens are sharded; only "blocks" elsewhere."""
PLATFORMS: dict[str, str] = {"cudnn": "gpu", "splash": "tpu", "flash": "tpu", "triton": "gpu"}
LEAST_CAPABILITY = (8, 0)
"""The oldest generation of NVIDIA's GPUs that the kernels for GPUs support (Ampere)."""


@runtime_checkable
class Device(Protocol):
    """A device that attention runs on."""

    @property
    def platform(self) -> str:
        """A platform of jax: "cpu", "gpu" or "tpu"."""
        ...

    @property
    def device_kind(self) -> str:
        """The name of its model."""
        ...


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The chosen kernel, and why a faster one was not chosen."""

    kernel: Kernel
    instead_of: str = ""
    """A faster kernel that was not chosen."""
    reason: str = ""
    """Why it was not."""
    ring: int = 1
    """The number of devices of the ring; 1 for no ring."""

    @property
    def description(self) -> str:
        """`attention by XLA, not by cuDNN: …`."""
        said = f"attention by {NAMES[self.kernel]}"
        if self.ring > 1:
            said += f" on a ring of {self.ring} devices"
        if self.instead_of:
            said += f", not by {NAMES[self.instead_of]}: {self.reason}"
        return said


def choose_kernel(config: TrainConfig, device: Device, context: int = 1) -> KernelChoice:
    """Returns the attention kernel for a run's steps, on devices like this one.

    Args:
        config: of the run; a kernel named by `execution.attention` is used.
        device: a device that the step is compiled for.
        context: the number of parts of the tokens of a row.

    Raises:
        UserError: the kernel named by `execution.attention` does not support the run.
    """
    asked, platform = config.execution.attention, device.platform
    fastest: Kernel | None = FASTEST.get(platform)
    if any(part.attention_dropout_rate > 0 for part in (config.model, config.model.decoder)):
        # Not every kernel supports attention dropout.
        fastest = DROPPING.get(platform) or fastest
    kernels: tuple[Kernel, ...]
    if asked == "auto":
        alone = () if fastest is None else (fastest,)
        kernels = FASTEST_ON_RING.get(platform, ("blocks",)) if context > 1 else alone
    else:
        kernels = () if asked == "xla" else (asked,)
    # Take the first kernel that works; remember why the best one does not.
    instead_of = reason = ""
    for kernel in kernels:
        cannot = _reason(kernel, config, device, context)
        if cannot is None:
            ring = context if kernel in PART_KERNELS else 1
            return KernelChoice(kernel, instead_of, reason, ring)
        instead_of, reason = instead_of or kernel, reason or cannot
    # Report that a faster kernel was declined.
    if asked == "xla" and fastest is not None:
        return KernelChoice("xla", fastest, "execution.attention says so")
    if asked in ("auto", "xla"):
        return KernelChoice("xla", instead_of, reason)
    raise UserError(
        f"execution.attention {asked} cannot serve this run: {reason}: leave it out, or say xla"
    )


def with_kernel(config: TrainConfig, kernel: Kernel) -> TrainConfig:
    """Returns the configuration with this attention kernel."""
    execution = dataclasses.replace(config.execution, attention=kernel)
    return dataclasses.replace(config, execution=execution)


def _reason(kernel: Kernel, config: TrainConfig, device: Device, context: int) -> str | None:
    """Returns why a kernel does not support a training step, or None."""
    # Check the device first, then the sizes of the calls.
    for cannot, why in _LIMITS:
        if cannot(kernel, device):
            return why.format(device=device, needs=PLATFORMS.get(kernel, ""))
    # Check encoder, decoder and cross-attention, whose sizes differ.
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
        )
        reason = refusal(kernel, call)
        if reason is None and context > 1:
            reason = ring_refusal(kernel, call, context)
        if reason is not None:
            return reason
    return None


def _is_old_gpu(kernel: str, device: Any) -> bool:
    if PLATFORMS.get(kernel) != "gpu":
        return False
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(device.compute_capability))  # AMD's are gfx90a …
    return numbers is None or (int(numbers[1]), int(numbers[2])) < LEAST_CAPABILITY


_LIMITS: tuple[tuple[Callable[[str, Device], bool], str], ...] = (
    (
        lambda kernel, device: device.platform != PLATFORMS.get(kernel, device.platform),
        "it is for a {needs}, and here is a {device.platform}",
    ),
    (_is_old_gpu, "a {device.device_kind} is not of NVIDIA's Ampere generation or later"),
)
"""Tests for devices that a kernel does not support, with the reasons; `models.nn.fused_attention`
checks sizes."""
