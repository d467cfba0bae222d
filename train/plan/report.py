"""A plan in words."""

from collections.abc import Iterator

from ..config import TrainConfig
from .plan import Estimate, Plan, used_bytes
from .topologies import GIB, Topology


def size(number: int) -> str:
    """Bytes as `61.2 GiB`, `3.4 MiB`."""
    for unit, factor in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f} bytes"


def duration(seconds: float) -> str:
    """`14.9 s`, `3.2 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def mesh_name(mesh: dict[str, int]) -> str:
    """`fsdp 64 × tensor 8`, without the axes of length 1."""
    return " × ".join(f"{name} {n}" for name, n in mesh.items() if n > 1) or "one device"


def report(plan: Plan, config: TrainConfig, topology: Topology) -> Iterator[str]:
    """The lines that `flaxzoo plan` prints."""
    yield f"{plan.topology}: {plan.num_devices:,} devices, {mesh_name(plan.mesh)}"
    yield (
        f"a step: {config.batch_size:,} rows of {config.data.length:,} tokens, micro-batches "
        f"{config.micro_batches}, {config.execution.dtype}, remat {config.execution.remat}"
    )
    yield plan.attention
    yield verdict(plan, topology)
    yield from _advice(plan, config, topology)
    yield ""
    yield from _memory(plan, topology)
    yield ""
    yield from _work(plan)
    if topology.chip is not None and plan.refusal is None:
        yield ""
        yield from _estimate(plan, topology)
    yield ""
    yield f"planned in {duration(plan.seconds)}"


def verdict(plan: Plan, topology: Topology) -> str:
    """Whether it fits."""
    if topology.chip is None:
        return "fits: unknown, for virtual devices have no memory of their own"
    room = topology.chip.memory
    if plan.refusal is not None:
        used = used_bytes(plan.refusal)
        return (
            f"does not fit: the compiler says: {plan.refusal.strip()[:300]}"
            if used is None
            else f"does not fit: {size(used)} on a device of {size(room)}, {size(used - room)} "
            "too much"
        )
    assert plan.peak is not None
    if plan.peak > room:
        return (
            f"may not fit: the compiler takes it, but all parts add up to {size(plan.peak)} of "
            f"{size(room)}"
        )
    return f"fits: {size(plan.peak)} of {size(room)} on each device at the peak"


def _advice(plan: Plan, config: TrainConfig, topology: Topology) -> Iterator[str]:
    """What would help where it does not fit, or hardly."""
    if topology.chip is None or (plan.peak is not None and plan.peak <= topology.chip.memory):
        return
    if plan.parameters + plan.optimizer > topology.chip.memory / 2:
        spread = plan.mesh["fsdp"] * plan.mesh["tensor"]
        if spread < plan.num_devices:
            yield "what would help: parameters on more devices (--mesh.fsdp, --mesh.tensor)"
        else:
            yield "what would help: more devices, or a chip with more memory"
    if config.execution.remat != "full":
        yield "what would help: --execution.remat full"
    rows = config.batch_size // config.micro_batches
    spread = plan.mesh["data"] * plan.mesh["fsdp"]
    if rows > spread:
        most = config.batch_size // spread
        yield f"what would help: more --micro-batches, up to {most} (one row at a time)"
    elif plan.mesh["tensor"] == 1:
        yield "what would help: heads and vocabulary on several devices (--mesh.tensor)"


def _memory(plan: Plan, topology: Topology) -> Iterator[str]:
    yield "bytes on each device"
    yield f"  parameters   {size(plan.parameters)} (the model has {plan.num_parameters:,})"
    yield f"  optimizer    {size(plan.optimizer)}"
    if plan.host:
        yield f"    on its host  {size(plan.host)} of the optimizer; its way is not estimated"
    yield f"  batch        {size(plan.batch)}"
    if plan.temporaries is None:
        yield "  temporaries  unknown, for the step was not compiled"
    else:
        of = "the TPU compiler's" if topology.chip else "as compiled for a CPU"
        yield f"  temporaries  {size(plan.temporaries)} at the peak, {of}"
        if plan.program:
            yield f"  program      {size(plan.program)}"


def _work(plan: Plan) -> Iterator[str]:
    yield "work of a step"
    yield (
        f"  model        {plan.model_flops:.3g} FLOPs: 2mnk of every matrix product, forward and "
        "backward, each layer; all pairs of attention, hidden ones too"
    )
    if plan.device_flops:
        more = plan.device_flops * plan.num_devices / plan.model_flops
        yield (
            f"  each device  {plan.device_flops:.3g} FLOPs (all together {more:.2f} × the model's: "
            f"recomputed or done twice), {size(plan.device_traffic)} read and written"
        )
    if plan.exchanges:
        yield "  sent by each device"
        for one in plan.exchanges:
            yield f"    {one.kind:<18} {size(one.bytes_sent):>10} in {one.number:,} operations"


def _estimate(plan: Plan, topology: Topology) -> Iterator[str]:
    estimate = Estimate.of(plan, topology)
    best, worst = estimate.utilisation(plan, topology)
    yield "estimate, not a measurement: the work above at the chip's peak rates"
    yield f"  products     {duration(estimate.compute)}"
    yield f"  memory       {duration(estimate.memory)}"
    yield f"  links        {duration(estimate.exchange)}"
    yield (
        f"  a step       {duration(estimate.least)} if all overlaps, {duration(estimate.most)} if "
        "nothing does"
    )
    yield (
        f"  speed        {plan.tokens / estimate.most:,.0f} to "
        f"{plan.tokens / estimate.least:,.0f} tokens/s, {worst:.0%} to {best:.0%} of peak"
    )
