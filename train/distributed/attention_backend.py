"""Which kernel computes a run's attention: what suits the devices, where it can serve."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

from ...data.errors import UserError
from ...models.nn.fused_attention import AttentionCall, refusal
from ..config import TrainConfig

Kernel = Literal["xla", "cudnn", "splash", "flash"]

NAMES: dict[str, str] = {
    "xla": "XLA",
    "cudnn": "cuDNN",
    "splash": "splash attention",
    "flash": "flash attention",
}
"""As they are printed."""
FASTEST: dict[str, Kernel] = {"gpu": "cudnn", "tpu": "splash"}
"""By platform; elsewhere there is XLA alone."""
DROPPING: dict[str, Kernel] = {"tpu": "flash"}
"""By platform, the kernel for models that drop attention weights, if it is another one."""
PLATFORMS: dict[str, str] = {"cudnn": "gpu", "splash": "tpu", "flash": "tpu"}
LEAST_CAPABILITY = (8, 0)
"""The oldest generation of NVIDIA's GPUs that cuDNN's kernel supports (Ampere)."""


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
    """The kernel that runs, and what was said against a faster one."""

    kernel: Kernel
    instead_of: str = ""
    """A faster kernel that does not run."""
    reason: str = ""
    """Why it does not."""

    @property
    def description(self) -> str:
        """`attention by XLA, not by cuDNN: …`."""
        said = f"attention by {NAMES[self.kernel]}"
        if self.instead_of:
            said += f", not by {NAMES[self.instead_of]}: {self.reason}"
        return said


def choose_kernel(config: TrainConfig, device: Device, context: int = 1) -> KernelChoice:
    """The kernel for a run's steps, on devices like this one.

    Args:
        config: of the run; what `execution.attention` names is taken.
        device: one of those that the step is compiled for.
        context: into how many parts the tokens of a row are cut.

    Raises:
        UserError: the kernel that `execution.attention` names cannot serve.
    """
    asked = config.execution.attention
    sizes = config.model, config.model.decoder
    faster: Kernel = FASTEST.get(device.platform, "xla")
    if any(part.attention_dropout_rate > 0 for part in sizes):
        faster = DROPPING.get(device.platform, faster)
    kernel = faster if asked == "auto" else asked
    if kernel == "xla":
        if faster == "xla":
            return KernelChoice("xla")
        return KernelChoice("xla", faster, "execution.attention says so")
    reason = _reason(kernel, config, device, context)
    if reason is None:
        return KernelChoice(kernel)
    if asked != "auto":
        raise UserError(
            f"execution.attention {asked} cannot serve this run: {reason}: leave it out, or say xla"
        )
    return KernelChoice("xla", kernel, reason)


def with_kernel(config: TrainConfig, kernel: Kernel) -> TrainConfig:
    """The run with its attention by this kernel."""
    execution = dataclasses.replace(config.execution, attention=kernel)
    return dataclasses.replace(config, execution=execution)


def _reason(kernel: Kernel, config: TrainConfig, device: Device, context: int) -> str | None:
    """Why a kernel cannot serve a training step, or None."""
    for cannot, why in _LIMITS:
        if cannot(kernel, device, context):
            return why.format(
                kernel=NAMES[kernel], device=device, needs=PLATFORMS[kernel], context=context
            )
    length = config.data.length
    for sizes in (config.model, config.model.decoder):
        call = AttentionCall(
            num_queries=length,
            num_keys=length,
            key_dim=sizes.key_dim,
            head_dim=sizes.value_dim,
            dtype=config.execution.dtype,
            dropout_rate=sizes.attention_dropout_rate,
            biased=sizes.scores_by_distance,
        )
        if reason := refusal(kernel, call):
            return reason
    return None


def _is_old_gpu(kernel: str, device: Any, _: int) -> bool:
    if kernel != "cudnn":
        return False
    if "cuda" not in device.client.platform_version:
        return True
    return tuple(map(int, device.compute_capability.split("."))) < LEAST_CAPABILITY


_LIMITS: tuple[tuple[Callable[[str, Device, int], bool], str], ...] = (
    (
        lambda kernel, device, _: device.platform != PLATFORMS[kernel],
        "it is for a {needs}, and here is a {device.platform}",
    ),
    (_is_old_gpu, "a {device.device_kind} is not of NVIDIA's Ampere generation or later"),
    (lambda *a: a[2] > 1, "the tokens of a sequence are sharded over mesh.context {context}"),
)
"""The properties of devices that a kernel cannot have, and the reasons; `models.nn.fused_attention`
checks the sizes."""
