"""Times a run's train step on the local devices, with synthetic examples."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from ...data.common.fields import require
from ..compilation_cache import cache_hits
from ..config import TrainConfig, objective_of
from ..engine.compile import CompiledTrainer, NumpyBatch, compile_trainer
from ..engine.machine_memory import memory_stats
from ..engine.memory_summary import memory_of, peak_bytes
from ..state import TrainState, count_parameters
from .batch_specs import model_flops, synthetic_batch
from .chip import Device
from .chips import PEAK_FLOPS
from .report import format_bytes, format_seconds

WARMUP_STEPS = 3
PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measurements of a train step."""

    num_parameters: int
    tokens: int
    """The number of token positions in a batch over all devices, including padding."""
    dtype: str
    devices: str
    """A description of the devices and their mesh for the user."""
    memory_summary: str
    """A description of the batch and of the memory per device for the user."""
    num_devices: int
    device_kind: str
    trace_seconds: float
    """Time to trace and lower the Python function, up to the compiler's input."""
    compile_seconds: float
    cached: bool
    """Whether the program came from the compilation cache."""
    seconds: tuple[float, ...]
    """The duration of each timed step."""
    model_flops: int
    """FLOPs of the step's matmuls over all devices, without recomputation."""
    peak_bytes: int
    """Peak memory of the fullest device."""
    peak_source: str
    """The source of `peak_bytes`, which is a measurement or the compiler's analysis."""

    @property
    def median(self) -> float:
        """Median time of a step, in seconds."""
        return statistics.median(self.seconds)

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization in the median step, or None if the peak rate is unknown."""
        peak = PEAK_FLOPS.get(self.device_kind)
        return None if peak is None else self.model_flops / self.median / self.num_devices / peak


def bench(config: TrainConfig, *, timed_steps: int, profile: Path | None = None) -> Bench:
    """Times a run's train step, called in the same way as in the training loop.

    Args:
        config: The run, from `placeholders.without_data`.
        timed_steps: The number of steps to time, after `WARMUP_STEPS` warm-up steps.
        profile: An existing folder for a trace of `PROFILED_STEPS` more steps.

    Raises:
        UserError: The mesh, the batch or the parameters cannot be divided over the devices, or
          there are several processes.
    """
    require(
        jax.process_count() == 1,
        f"bench requires a single process, got {jax.process_count()}: start a single process",
    )
    trainer = compile_trainer(config, objective_of(config))
    devices = jax.local_devices()
    batch = synthetic_batch(config)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    state = trainer.init()
    # Time tracing and compilation separately.
    with cache_hits() as hits:
        started = time.perf_counter()
        trainer.lower(state, batch)
        traced = time.perf_counter()
        executable, changed = trainer.compile(shapes)
        compiled = time.perf_counter()
    # The first steps are slower, so they are not timed.
    state, _ = _take_steps(trainer, state, batch, WARMUP_STEPS)
    state, seconds = _take_steps(trainer, state, batch, timed_steps)
    peak_bytes, peak_source = _peak_memory(executable, devices)
    # Profile last, so that the trace does not affect the figures above.
    if profile is not None:
        with jax.profiler.trace(profile):
            _take_steps(trainer, state, batch, PROFILED_STEPS)
    return Bench(
        num_parameters=count_parameters(trainer.shapes.params),
        tokens=config.batch_size * config.data.lengths[0],
        dtype=config.execution.dtype,
        devices=trainer.description,
        memory_summary=trainer.memory_summary + (f"; changed: {changed}" if changed else ""),
        num_devices=len(devices),
        device_kind=devices[0].device_kind,
        trace_seconds=traced - started,
        compile_seconds=compiled - traced,
        cached=bool(hits),
        seconds=seconds,
        model_flops=model_flops(config),
        peak_bytes=peak_bytes,
        peak_source=peak_source,
    )


def _take_steps(
    trainer: CompiledTrainer, state: TrainState, batch: NumpyBatch, num_steps: int
) -> tuple[TrainState, tuple[float, ...]]:
    """Returns the state after some steps, and the seconds between the ends of successive steps.

    As in training, a step is dispatched before the loss of the previous step is read, so that the
    devices do not wait for Python.
    """
    ends = []
    pending = None
    started = time.perf_counter()
    for _ in range(num_steps):
        state, metrics = trainer.step(state, batch)
        if pending is not None:
            float(pending["loss"])
            ends.append(time.perf_counter())
        pending = metrics
    jax.block_until_ready((state, pending))
    ends.append(time.perf_counter())
    return state, tuple(b - a for a, b in zip([started, *ends], ends, strict=False))


def _peak_memory(executable: jax.stages.Compiled, devices: Sequence[Device]) -> tuple[int, str]:
    """Returns the peak memory of the fullest device, and the source of this figure."""
    stats = memory_stats(devices)
    if all("peak_bytes_in_use" in x for x in stats):
        return max(x["peak_bytes_in_use"] for x in stats), "measured since this process began"
    # If the devices have no statistics, as on a CPU, use the compiler's analysis.
    return peak_bytes(memory_of(executable)), "by the compiler's analysis"


def report(b: Bench) -> Iterator[str]:
    """Yields the lines that `flaxzoo bench` prints."""
    yield f"{b.num_parameters:,} parameters, {b.devices}, {b.dtype}"
    yield b.memory_summary
    where = "from" if b.cached else "not in"
    yield (
        f"compile      {format_seconds(b.compile_seconds)}, after "
        f"{format_seconds(b.trace_seconds)} of tracing, {where} the compilation cache"
    )
    yield (
        f"step         {format_seconds(b.median)} (median), {format_seconds(min(b.seconds))} "
        f"(minimum) of {len(b.seconds)} steps after {WARMUP_STEPS}"
    )
    yield f"speed        {b.tokens / b.median:,.0f} tokens/s at the median (padding included)"
    yield (
        f"model        {b.model_flops:.4g} FLOPs a step: 2mnk for every matmul of the forward and "
        "backward pass, no recomputation; attention counts all pairs, masked ones too"
    )
    if b.utilization is None:
        yield f"utilization  unknown, because the peak of {b.device_kind} is unknown"
    else:
        yield (
            f"utilization  {b.utilization:.1%} = FLOPs / (median × {b.num_devices} × "
            f"{PEAK_FLOPS[b.device_kind]:.3g}), the peak of {b.device_kind} in bfloat16"
        )
    yield f"memory       {format_bytes(b.peak_bytes)} on a device at the peak, {b.peak_source}"
