"""The report that `flaxzoo plan` prints about a plan."""

from collections.abc import Iterator

from ...data.common.errors import counted
from ..config import TrainConfig
from .chip import DEFAULT_MEMORY_FRACTION, GIB, MEMORY_FRACTION, Gpu, memory_fraction
from .plan import Estimate, Plan, used_bytes
from .topology import Topology


def format_bytes(number: int | float) -> str:
    """Formats bytes as `61.20 GiB` or `3.40 MiB`."""
    for unit, factor in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """Formats a time as `2,190 s`, `14.9 s` or `3.2 ms`."""
    return f"{format_amount(seconds)} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def format_mesh(mesh: dict[str, int]) -> str:
    """Formats a mesh as `fsdp 64 × tensor 8`, without the axes of length 1."""
    return " × ".join(f"{name} {n}" for name, n in mesh.items() if n > 1) or "one device"


def format_amount(amount: float) -> str:
    """Formats an amount with three digits, such as `4.62`, or with all digits before the point."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


GPT3_TOKENS, GPT3_BYTES = 300 * 10**9, 570 * 10**9
"""GPT-3's number of training tokens, and the size of its filtered Common Crawl (Brown et al.
2020)."""


def report(
    plan: Plan,
    config: TrainConfig,
    topology: Topology,
    *,
    price: float | None = None,
    bytes_per_token: float = 4.0,
) -> Iterator[str]:
    """Yields the lines that `flaxzoo plan` prints.

    Args:
        plan: The plan.
        config: The run.
        topology: The devices.
        price: The price of one device for an hour, or None if unknown.
        bytes_per_token: The size of the text of a token, to convert between tokens and bytes of
          text.
    """
    yield f"{plan.topology}: {counted(plan.num_devices, 'device')}, {format_mesh(plan.mesh)}"
    yield (
        f"a step: {config.batch_size:,} sequences of {config.data.lengths[0]:,} tokens, "
        f"micro-batches {config.micro_batches}, {config.execution.dtype}, "
        f"remat {config.execution.remat}"
    )
    yield (
        f"the model: {plan.model_parameters:,} parameters, a vocabulary of "
        f"{config.model.vocab_size:,}"
    )
    yield from filter(None, (plan.attention, plan.exchange))
    # First state whether the step fits, and then report the figures that explain the answer.
    yield verdict(plan, topology)
    yield from _advice(plan, config, topology)
    yield ""
    yield from _memory(plan, topology)
    yield ""
    yield from _work(plan)
    estimate = None
    if not topology.is_virtual and plan.out_of_memory is None:
        estimate = Estimate.from_plan(plan, topology)
        yield ""
        yield from _estimate(estimate, plan, topology)
    yield ""
    yield from _run(plan, config, estimate, price=price, bytes_per_token=bytes_per_token)
    yield ""
    yield f"planned in {format_seconds(plan.seconds)}"


def verdict(plan: Plan, topology: Topology) -> str:
    """Formats a line that states whether the step fits into the memory of each device."""
    if topology.is_virtual:
        return "fits: unknown, because virtual devices have no separate memory"
    limit = topology.chip.usable_memory
    if plan.out_of_memory is not None:
        used = used_bytes(plan.out_of_memory)
        if used is None:
            return f"does not fit: the compiler says: {plan.out_of_memory.strip()[:300]}"
        return _excess(used, limit)
    if not plan.fits(topology):
        return _excess(plan.peak_bytes, limit)
    if plan.peak_bytes > limit:
        return (
            "may not fit: the compiler accepts the step, but all parts add up to "
            f"{format_bytes(plan.peak_bytes)} of {format_bytes(limit)}"
        )
    return (
        f"fits: {format_bytes(plan.peak_bytes)} of {format_bytes(limit)} on each device at the peak"
    )


def _excess(used: int | float, limit: int) -> str:
    return (
        f"does not fit: {format_bytes(used)} on a device of {format_bytes(limit)}, "
        f"{format_bytes(used - limit)} too much"
    )


def _advice(plan: Plan, config: TrainConfig, topology: Topology) -> Iterator[str]:
    """Yields options that lower the peak if the step does not fit or may not fit."""
    chip = topology.chip
    if topology.is_virtual or plan.peak_bytes <= chip.usable_memory:
        return
    if isinstance(chip, Gpu) and memory_fraction() <= DEFAULT_MEMORY_FRACTION:
        yield (
            f"would help: {MEMORY_FRACTION}=0.92 in the environment, because jax takes "
            f"{memory_fraction():.0%} of a GPU's {format_bytes(chip.memory)} (also for plan)"
        )
    mesh, memory = plan.mesh, chip.usable_memory
    # If the state fills half of the memory, shard it over more devices first.
    is_large = plan.param_bytes + plan.frozen_bytes + plan.optimizer_bytes > memory / 2
    is_whole = mesh["fsdp"] * mesh["tensor"] < plan.num_devices
    has_wide_moments = config.optimizer.state_dtype == "float32"
    # A micro-batch has at least one sequence for each shard of the batch.
    num_shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    most = config.batch_size // num_shards
    divides = config.batch_size // config.micro_batches > num_shards
    # The first division into micro-batches adds a float32 buffer for the sum of the gradients.
    adds = f"; their sum of gradients needs {format_bytes(plan.param_bytes)}"
    added = adds if config.micro_batches == 1 else ""
    options = {
        "parameters on more devices (--mesh.fsdp, --mesh.tensor)": is_large and is_whole,
        "more devices, or a chip with more memory": is_large and not is_whole,
        "--optimizer.state-dtype int8 (or bfloat16_stochastic)": has_wide_moments
        and plan.optimizer_bytes > memory / 4,
        "--gather layer": config.gather == "step",
        "--execution.remat full": config.execution.remat != "full",
        f"more --micro-batches, up to {most} (one sequence at a time{added})": divides,
        "heads and vocabulary sharded over several devices (--mesh.tensor)": not divides
        and mesh["tensor"] == 1,
    }
    yield from (f"would help: {option}" for option in filter(options.get, options))


def _uncompiled(plan: Plan, message: str) -> str:
    """Formats the size of temporary buffers from the compiler's error message."""
    used = used_bytes(message)
    if used is None:
        return "unknown"
    # If the message lacks this phrase, the size in it includes the arguments of the step.
    if "HLO temporaries" not in message:
        used -= plan.argument_bytes
    return f"about {format_bytes(used)}, from the compiler's error message"


def _memory(plan: Plan, topology: Topology) -> Iterator[str]:
    yield "bytes on each device"
    trained, size = f"{plan.num_parameters:,}", format_bytes(plan.param_bytes)
    # Without frozen parameters, all parameters of the model are trained.
    if not plan.frozen_parameters:
        yield f"  parameters    {size} (the model has {trained})"
    else:
        yield f"  parameters    {size} ({trained} are trained)"
        frozen = f"{plan.frozen_parameters:,} that no step changes"
        yield f"  frozen        {format_bytes(plan.frozen_bytes)} ({frozen})"
    yield f"  optimizer     {format_bytes(plan.optimizer_bytes)}"
    if plan.reward_bytes:
        yield f"  reward models {format_bytes(plan.reward_bytes)}"
    yield f"  batch         {format_bytes(plan.batch_bytes)}"
    if plan.rollout_bytes:
        cache = f"{format_bytes(plan.cache_bytes)} of keys and values"
        size = format_bytes(plan.rollout_bytes)
        yield f"  a rollout     {size} in addition to the state, with {cache}"
    if plan.out_of_memory is not None:
        yield f"  temp buffers  {_uncompiled(plan, plan.out_of_memory)}: the step was not compiled"
    else:
        compiler = topology.chip.compiler
        yield f"  temp buffers  {format_bytes(plan.temp_bytes)} at the peak, by {compiler}"
        if plan.code_bytes:
            yield f"  program       {format_bytes(plan.code_bytes)}"


def _work(plan: Plan) -> Iterator[str]:
    yield "work of a step"
    yield (
        f"  model        {plan.model_flops:.3g} FLOPs: 2mnk for every matmul of the forward and "
        "backward pass in every layer; attention counts all pairs, masked ones too"
    )
    if plan.device_flops:
        # A ratio above 1 means that work is repeated. A ratio below 1 means that kernels or frozen
        # parameters save work.
        ratio = round(plan.device_flops * plan.num_devices / plan.model_flops, 2)
        why = ": recomputed or done on several" if ratio > 1 else ""
        if ratio < 1:
            why = ": no masked pairs, no gradients of frozen parameters"
        yield (
            f"  each device  {plan.device_flops:.3g} FLOPs (all devices together {ratio:.2f} × the "
            f"model's{why}), HBM bytes read and written: {format_bytes(plan.hbm_bytes)}"
        )
    if plan.collectives:
        yield "  bytes sent by each device"
        width = max(18, *(len(one.kind) for one in plan.collectives))
        for one in plan.collectives:
            size = format_bytes(one.bytes_sent)
            yield f"    {one.kind:<{width}} {size:>10} in {one.count:,} collectives"


def _estimate(estimate: Estimate, plan: Plan, topology: Topology) -> Iterator[str]:
    # The utilization without overlap is the lower end of the range.
    low, high = estimate.utilization(plan, topology)
    yield "estimate, not a measurement: the work above at the chip's peak rates"
    yield f"  matmuls       {format_seconds(estimate.matmuls)}"
    yield f"  HBM           {format_seconds(estimate.hbm)}"
    yield f"  interconnect  {format_seconds(estimate.interconnect)}"
    yield (
        f"  a step        {format_seconds(estimate.overlapped)} if everything overlaps, "
        f"{format_seconds(estimate.sequential)} if nothing does"
    )
    yield (
        f"  speed         {plan.tokens / estimate.sequential:,.0f} to "
        f"{plan.tokens / estimate.overlapped:,.0f} tokens/s, {low:.0%} to {high:.0%} of peak"
    )


def _run(
    plan: Plan,
    config: TrainConfig,
    estimate: Estimate | None,
    *,
    price: float | None,
    bytes_per_token: float,
) -> Iterator[str]:
    """Yields the totals of all steps: tokens, text, FLOPs and, if estimated, time and cost."""
    steps = config.steps
    tokens = plan.tokens * steps
    yield f"the run of {steps:,} steps"
    size = format_amount(tokens * bytes_per_token / 1e9)
    yield f"  tokens       {tokens:.3g}, {size} GB of text at {bytes_per_token:g} bytes each"
    # Convert the training of GPT-3 to steps of this size.
    by_tokens = GPT3_TOKENS / plan.tokens
    by_bytes = GPT3_BYTES / (plan.tokens * bytes_per_token)
    yield (
        f"  for scale    300 billion tokens (GPT-3) are {by_tokens:,.0f} steps, and 570 GB of text "
        f"{by_bytes:,.0f}"
    )
    yield f"  model        {plan.model_flops * steps:.3g} FLOPs"
    if estimate is None:
        return
    hours = [steps * each / 3600 for each in (estimate.overlapped, estimate.sequential)]
    least, most = (each * plan.num_devices for each in hours)
    cost = ""
    if price is not None:
        cost = f", {least * price:,.2f} to {most * price:,.2f} at {price:g} each"
    first, last, low, high = map(format_amount, (*hours, least, most))
    yield (
        f"  time         {first} to {last} hours by the estimate, {low} to {high} "
        f"device-hours{cost}"
    )
