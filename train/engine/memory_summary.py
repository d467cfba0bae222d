"""Summarizes the memory of a step before compilation, and checks that the step fits."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp

from ...data.common.errors import UserError, counted
from ...data.common.fields import require
from ...models.nn.typing import PyTree
from ..config import TrainConfig
from ..losses.objective import split
from ..state import TrainState, in_units
from .machine_memory import Device, available_bytes, available_on_machine

if TYPE_CHECKING:
    from ...data.common.progress import LogFn  # imports rich, which `flaxzoo bench` does not need

BatchShapes = dict[str, jax.ShapeDtypeStruct]
"""The shape and the dtype of each array of a global batch, by name."""
CLOSE = 0.9
"""A step that needs more than this fraction of the available memory triggers a warning."""


@runtime_checkable
class MemoryAnalysis(Protocol):
    """The memory use of a compiled program on a device, as reported by `jax.stages.Compiled`."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


def memory_summary(config: TrainConfig, shapes: TrainState, num_shards: int, attention: str) -> str:
    """Describes in one line the size of a step and the share of each device.

    Args:
        config: The run.
        shapes: The shapes and shardings of the state.
        num_shards: The number of devices that share a batch.
        attention: A description of the attention kernel, to include in the line.
    """
    rows, length = config.batch_size, config.data.lengths[0]
    rows_per_run = rows // num_shards // config.micro_batches
    at_once = f"{rows_per_run} at once" if config.micro_batches > 1 else "at once"
    params, optimizer, frozen = map(
        bytes_per_device, (shapes.params, shapes.opt_state, shapes.frozen)
    )
    reference = f", {in_units(frozen)} of frozen parameters" if frozen else ""
    return (
        f"a step: {counted(rows, 'row')} of {counted(length, 'token')}, "
        f"{counted(rows * length, 'token')}; each device has "
        f"{counted(rows // num_shards, 'row')}, {at_once}, {in_units(params)} of "
        f"parameters{reference} and {in_units(optimizer)} of optimizer state; "
        f"{attention}"
    )


def bytes_per_device(shapes: PyTree) -> int:
    """Returns the bytes that arrays with these shapes and shardings take on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
    )


def memory_of(program: jax.stages.Compiled) -> MemoryAnalysis:
    """Returns the compiler's analysis of the memory of a compiled program."""
    return cast(MemoryAnalysis, program.memory_analysis())


def temp_bytes(memory: MemoryAnalysis) -> int:
    """Returns the bytes of a program's temporary arrays and new outputs on each device."""
    # Outputs need additional memory, unless they reuse the memory of a donated argument.
    new_results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return memory.temp_size_in_bytes + new_results


def peak_bytes(memory: MemoryAnalysis) -> int:
    """Returns the peak number of bytes that a compiled program takes on each device."""
    inputs = memory.argument_size_in_bytes + memory.generated_code_size_in_bytes
    return inputs + temp_bytes(memory)


def check_state_fits(
    config: TrainConfig, shapes: TrainState, devices: Sequence[Device], *, resumed: bool
) -> None:
    """Checks, before allocation, that the parameters and the optimizer state fit on the devices.

    If the run has tasks, also checks that the whole parameters fit next to the state on one device.

    Args:
        config: The run.
        shapes: The shapes and shardings of the state.
        devices: The devices of this process.
        resumed: Whether the run already exists, so that its batch size must stay the same.

    Raises:
        UserError: The parameters and the optimizer state do not fit.
    """
    needed, available = _needed(bytes_per_device(shapes), devices), available_bytes(devices)
    what, remedy = "parameters and optimizer state", _smaller_model(config, resumed)
    _require_memory(f"{what} need", needed, available, remedy=remedy)
    if config.evaluate.tasks:
        _require_memory(
            f"{what}, and the whole parameters that evaluate.tasks gathers on one device, need",
            needed + _gathered_bytes(config, shapes),
            available,
            remedy="leave evaluate.tasks out, and run flaxzoo evaluate RUN --tasks after training",
        )


def _gathered_bytes(config: TrainConfig, shapes: TrainState) -> int:
    """Returns the bytes that tasks add to a device: a whole copy of each sharded parameter.

    With adapters, tasks use the base model with merged adapters, in float32. A base in another
    precision is therefore copied even if it is not sharded. Tasks use neither the reference model
    nor the auxiliary models.
    """
    merged = config.lora is not None
    params = split(shapes.frozen or {})[0] if merged else shapes.params
    size = 0
    for x in jax.tree.leaves(params):
        dtype = jnp.dtype("float32") if merged else x.dtype
        if dtype != x.dtype or not x.sharding.is_fully_replicated:
            size += math.prod(x.shape) * dtype.itemsize
    return size


def check_batch_fits(config: TrainConfig, batch: BatchShapes, *, resumed: bool) -> None:
    """Checks, before a batch is made, that it fits into the machine's memory.

    Args:
        config: The run.
        batch: The arrays of the global batch.
        resumed: Whether the run already exists, so that its batch size must stay the same.

    Raises:
        UserError: The batch does not fit.
    """
    # The host of each process stores only its own share of the global batch.
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in batch.values())
    needed, remedy = whole // jax.process_count(), _remedies(config, resumed)
    _require_memory("a batch needs", needed, available_on_machine(), remedy=remedy)


def check_step_fits(
    config: TrainConfig,
    compile_step: Callable[[], tuple[jax.stages.Compiled, str]],
    devices: Sequence[Device],
    *,
    resumed: bool,
    log: "LogFn",
) -> None:
    """Checks that a step fits into memory, and logs its memory use, before the first step.

    Args:
        config: The run.
        compile_step: Compiles the step; also returns a description of the changes that made the
          step fit.
        devices: The devices of this process.
        resumed: Whether the run already exists, so that its batch size must stay the same.
        log: Called with lines about the compilation time and the memory that the step needs.

    Raises:
        UserError: The step does not fit.
    """
    started = time.monotonic()
    try:
        step, changed = compile_step()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"a step does not fit into memory ({' '.join(str(error).split())[:300]}): "
            f"{_remedies(config, resumed)}"
        ) from error
    log(f"compiled the step in {time.monotonic() - started:.1f} s")
    if changed:
        log(f"the step was changed: {changed}")
    # A successful compilation may still exceed the free memory at run time.
    memory, available = step.memory_analysis(), available_bytes(devices)
    if memory is None or available is None:
        return
    needed, remedy = _needed(peak_bytes(memory), devices), _remedies(config, resumed)
    figures = _require_memory("a step needs", needed, available, remedy=remedy)
    close = needed > CLOSE * available
    log(f"{figures}; if the memory does not suffice, {remedy}" if close else figures)


def _require_memory(what: str, needed: int, available: int | None, *, remedy: str) -> str:
    """Returns a clause with both sizes; raises UserError if `needed` exceeds `available`."""
    if available is None:
        return ""
    figures = f"{what} {in_units(needed)} of memory, and {in_units(available)} are available"
    require(needed <= available, f"{figures}: {remedy}")
    return figures


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a compiler rejected a program because it needs too much memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def _needed(bytes_on_device: int, devices: Sequence[Device]) -> int:
    """Returns the bytes to compare with `available_bytes`: for CPUs, the sum over devices."""
    return bytes_on_device * (len(devices) if devices[0].platform == "cpu" else 1)


def _remedies(config: TrainConfig, resumed: bool) -> str:
    """Returns a clause that names the options that lower the memory of a step."""
    has_several_rows = config.batch_size > config.micro_batches
    remedies = {
        f"raise micro_batches (now {config.micro_batches})": has_several_rows,
        # A resumed run must keep its batch size.
        f"lower batch_size (now {config.batch_size:,})": has_several_rows and not resumed,
        "choose execution.remat full": config.execution.remat != "full",
        "choose gather layer": config.gather == "step",
    }
    return ", or ".join(filter(remedies.get, remedies)) or _smaller_model(config, resumed)


def _smaller_model(config: TrainConfig, resumed: bool) -> str:
    divided = f"divide the model over more devices (mesh.fsdp, now {config.mesh.fsdp})"
    # A resumed run cannot change its model or its optimizer.
    if resumed:
        return divided
    optimizer, remedies = config.optimizer, ["choose a smaller model"]
    if optimizer.name != "adafactor" and optimizer.state_dtype != "int8":
        now = f"now {optimizer.state_dtype}"
        remedies.append(f"keep moments in 8 bits (optimizer.state_dtype int8, {now})")
    return ", or ".join([*remedies, divided])
