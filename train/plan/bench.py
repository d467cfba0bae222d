"""How fast a run's own train step is on the devices at hand, on rows that are made up."""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ...data.errors import UserError
from ..compilation_cache import cache_hits
from ..config import TrainConfig
from ..engine.compile import CompiledTrainer, NumpyBatch, compile_trainer
from ..objectives.tasks import objective_of
from ..state import count_parameters
from .batch_specs import model_flops, synthetic_batch
from .peaks import PEAK_FLOPS
from .report import duration, size

UNTIMED_STEPS = 3
"""Before those that are timed."""
PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Bench:
    """What was measured."""

    num_parameters: int
    tokens: int
    """Places for tokens in a step, over all devices."""
    dtype: str
    devices: str
    """And the mesh, in words."""
    memory_summary: str
    """What a step is for each device, in words."""
    num_devices: int
    device_kind: str
    trace_seconds: float
    """From Python to the compiler's input."""
    compile_seconds: float
    cached: bool
    """Whether the compiler was not needed, for the cache had the program."""
    seconds: tuple[float, ...]
    """Of each timed step."""
    model_flops: int
    """Of all matrix products of a step without recomputation, over all devices."""
    peak_bytes: int
    """Of the memory of a device."""
    peak_source: str
    """Who says so."""

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs over what the devices could do in the median step; None: nobody knows."""
        peak = PEAK_FLOPS.get(self.device_kind)
        return None if peak is None else self.model_flops / self.median / self.num_devices / peak


def bench(config: TrainConfig, *, timed_steps: int, profile: Path | None = None) -> Bench:
    """Times a run's train step as the training loop takes it.

    Args:
      config: the run, with all that only its data would tell (`plan_assumptions.without_data`).
      timed_steps: how many steps are timed.
      profile: a folder that is there, for a trace of `PROFILED_STEPS` more steps.

    Raises:
      UserError: mesh, batch and parameters do not fit each other, or there are
        several processes.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"bench is for the devices of one process, and here are {jax.process_count()}: start "
            "it alone"
        )
    program = compile_trainer(config, objective_of(config))
    devices = jax.local_devices()
    batch = synthetic_batch(config)
    state = program.init()
    with cache_hits() as hits:
        started = time.perf_counter()
        lowered = program.lower(state, batch)
        traced = time.perf_counter()
        executable = lowered.compile()
        compiled = time.perf_counter()
    state, _ = _take_steps(program, state, batch, UNTIMED_STEPS)
    state, seconds = _take_steps(program, state, batch, timed_steps)
    peak_bytes, peak_source = _peak(executable, devices)
    if profile is not None:
        with jax.profiler.trace(profile):
            _take_steps(program, state, batch, PROFILED_STEPS)
    return Bench(
        num_parameters=count_parameters(program.shapes.params),
        tokens=config.batch_size * config.data.length,
        dtype=config.execution.dtype,
        devices=program.description,
        memory_summary=program.memory_summary,
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
    program: CompiledTrainer, state: Any, batch: NumpyBatch, number: int
) -> tuple[Any, tuple[float, ...]]:
    """The state after some steps, and the seconds from each one's end to the next one's.

    As in training a step is begun before the loss of the one before it is looked at, so that the
    devices do not wait for Python.
    """
    ends = []
    pending = None
    started = time.perf_counter()
    for _ in range(number):
        state, metrics = program.step(state, batch)
        if pending is not None:
            float(pending["loss"])
            ends.append(time.perf_counter())
        pending = metrics
    jax.block_until_ready((state, pending))
    ends.append(time.perf_counter())
    return state, tuple(b - a for a, b in zip([started, *ends], ends, strict=False))


def _peak(executable: Any, devices: list[Any]) -> tuple[int, str]:
    """Bytes at the peak on the fullest device, and who says so."""
    stats = [device.memory_stats() or {} for device in devices]
    if all("peak_bytes_in_use" in x for x in stats):
        return max(x["peak_bytes_in_use"] for x in stats), "measured since this process began"
    memory = executable.memory_analysis()
    new = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return held + new + memory.generated_code_size_in_bytes, "by the compiler's analysis"


def report(b: Bench) -> Iterator[str]:
    """The lines that `flaxzoo bench` prints."""
    yield f"{b.num_parameters:,} parameters, {b.devices}, {b.dtype}"
    yield b.memory_summary
    where = "from" if b.cached else "not in"
    yield (
        f"compile      {duration(b.compile_seconds)}, after {duration(b.trace_seconds)} of "
        f"tracing, {where} the compilation cache"
    )
    yield (
        f"step         {duration(b.median)} (median), {duration(min(b.seconds))} (least) of "
        f"{len(b.seconds)} steps after {UNTIMED_STEPS}"
    )
    yield f"speed        {b.tokens / b.median:,.0f} tokens/s at the median (all places of rows)"
    yield (
        f"model        {b.model_flops:.4g} FLOPs a step: 2mnk of every matrix product, forward and "
        "backward, nothing recomputed; all pairs of attention, those that causality hides too"
    )
    yield f"utilisation  {_utilisation(b)}"
    yield f"memory       {size(b.peak_bytes)} on a device at the peak, {b.peak_source}"


def _utilisation(b: Bench) -> str:
    if b.utilisation is None:
        return f"unknown, as is the peak of {b.device_kind}"
    peak = PEAK_FLOPS[b.device_kind]
    return (
        f"{b.utilisation:.1%} = FLOPs / (median × {b.num_devices} × {peak:.3g}), the peak of "
        f"{b.device_kind} in bfloat16"
    )
