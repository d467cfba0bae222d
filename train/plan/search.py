"""The search for a run's fastest mesh and rematerialization on a topology."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from ...data.common.errors import UserError
from ...data.common.progress import LogFn
from ...models.config import divisors
from ..config import MeshConfig, TrainConfig
from .plan import Estimate, Plan, make_plan, plan_arguments
from .report import format_bytes, format_mesh, format_seconds
from .topology import Topology

MAX_TENSOR_OR_CONTEXT = 16
"""The longest axis that divides a layer (tensor) or a sequence (context) over devices."""
Remat = Literal["none", "dots", "full"]


class Candidate(NamedTuple):
    """A run with a mesh and a rematerialization, and its plan."""

    config: TrainConfig
    plan: Plan

    def cost(self, topology: Topology) -> float:
        """Returns the figure that the search minimizes.

        The figure is the seconds of a step if nothing overlaps. For virtual devices, whose rates
        are unknown, the figure is the bytes at the peak.
        """
        if self.plan.peak_bytes is None or not self.plan.fits(topology):
            return math.inf
        if topology.chip is None:
            return float(self.plan.peak_bytes)
        return Estimate.from_plan(self.plan, topology).sequential


def candidates(config: TrainConfig, topology: Topology) -> Iterator[TrainConfig]:
    """Yields the run on every mesh over which its batch can be divided.

    Each candidate has the configured number of micro-batches, or the next lower number that divides
    the batch.
    """
    num_devices = topology.num_devices
    for layer_shards in divisors(num_devices):
        for tensor in divisors(layer_shards):
            context = layer_shards // tensor
            if max(tensor, context) > MAX_TENSOR_OR_CONTEXT:
                continue
            left = num_devices // layer_shards
            for fsdp, expert in itertools.product(divisors(left), divisors(left)):
                data, rest = divmod(left, fsdp * expert)
                if rest or data % topology.data_multiple:
                    continue
                if max(config.model.num_experts, 1) % expert:
                    continue
                sequences, rest = divmod(config.batch_size, data * fsdp * expert)
                if rest:
                    continue
                mesh = MeshConfig(
                    data=data, fsdp=fsdp, expert=expert, tensor=tensor, context=context
                )
                parts = max(n for n in divisors(sequences) if n <= config.micro_batches)
                yield dataclasses.replace(config, mesh=mesh, micro_batches=parts)


def approximate_bytes_sent(plan: Plan, config: TrainConfig) -> float:
    """Estimates the bytes that each device sends in a step, to choose what to compile first.

    The rough estimate has parameters gathered twice and gradients scattered once per micro-batch
    (fsdp, expert), gradients summed over copies of the parameters (data, context), activations
    summed four times a layer (tensor), keys and values gathered twice and their gradients scattered
    once (context), and tokens exchanged between experts four times a layer (expert). An array
    divided over n devices costs (1 - 1 / n) of its bytes.
    """
    model = config.model
    data, fsdp, expert, tensor, context = (
        plan.mesh[axis] for axis in ("data", "fsdp", "expert", "tensor", "context")
    )
    # Experts stay where they are, and tokens are gathered and scattered, forward and backward.
    exchanged = (expert - 1) * 4 * 2 * model.num_layers * 2 * model.d_model * plan.tokens
    exchanged /= data * fsdp * expert * context
    fsdp *= expert
    read = plan.num_parameters + plan.frozen_parameters
    gathered = 3 * 2 * config.micro_batches * read / tensor * (1 - 1 / fsdp)
    copies = data * context
    summed = 2 * 4 * plan.num_parameters / tensor / fsdp * (1 - 1 / copies)
    activation = 2 * model.d_model * plan.tokens / data / fsdp  # bfloat16, of one layer
    activations = 4 * 2 * model.num_layers * activation / context * (1 - 1 / tensor)
    keys_and_values = 3 * 2 * model.num_layers * activation / tensor * (1 - 1 / context)
    return gathered + summed + activations + keys_and_values + exchanged


def search(config: TrainConfig, topology: Topology, tries: int, log: LogFn) -> int:
    """Compiles the most promising meshes and prints a table of them, best first.

    All meshes are compiled with `remat="full"`, which needs the least memory. The best mesh is
    then compiled with less rematerialization as long as it fits.

    Args:
        config: The run, with the default mesh.
        topology: The devices.
        tries: The largest number of steps to compile.
        log: Receives a line on each compiled step.

    Returns:
        The exit status: 0 if a step fits, else 1.

    Raises:
        UserError: No mesh suits the batch and the model, or the configuration has one already.
    """
    if tries < 1:
        raise UserError(f"tries {tries} must be at least 1")
    if config.mesh != MeshConfig():
        raise UserError(
            f"mesh {dataclasses.asdict(config.mesh)}: --search chooses the mesh: leave out "
            "--mesh.* or --search"
        )
    configs = _promising(config, topology, log)
    num_meshes = max(1, tries - 2)  # two tries are for less rematerialization
    found = [_compile(one, topology, log) for one in configs[:num_meshes]]
    fitting = [x for x in found if x.plan.fits(topology)]
    if fitting:
        best = min(fitting, key=lambda x: x.cost(topology)).config
        for remat in ("dots", "none")[: tries - len(found)]:
            found.append(_compile(_with_remat(best, remat), topology, log))
            if not found[-1].plan.fits(topology):
                break
    if len(configs) > num_meshes:
        log(
            f"not compiled: {len(configs) - num_meshes} further meshes that by a rough count "
            f"would send more (--tries {tries})"
        )
    _print_table(found, topology)
    return 0 if fitting else 1


def _promising(config: TrainConfig, topology: Topology, log: LogFn) -> list[TrainConfig]:
    """Returns the run on each mesh whose arguments fit in memory, by bytes sent, fewest first."""
    configs = [_with_remat(one, "full") for one in candidates(config, topology)]
    replies = plan_arguments(configs, topology)
    limit = topology.chip.usable_memory if topology.chip else math.inf
    planned = [
        Candidate(c, p) for c, p in zip(configs, replies, strict=True) if isinstance(p, Plan)
    ]
    # A step holds its arguments and the gradients, which are as large as the parameters.
    able = [x for x in planned if x.plan.argument_bytes + x.plan.param_bytes <= limit]
    reasons = [reply for reply in replies if isinstance(reply, str)]
    log(
        f"{len(configs)} meshes: over {len(reasons)} the model cannot be sharded, on "
        f"{len(planned) - len(able)} its state does not fit, {len(able)} are left"
    )
    if not able:
        why = reasons[-1] if reasons else "parameters, optimizer and gradients are too large"
        raise UserError(f"no mesh of {topology.name} is possible: {why}")
    able.sort(key=lambda x: approximate_bytes_sent(x.plan, x.config))
    return [x.config for x in able]


def _compile(config: TrainConfig, topology: Topology, log: LogFn) -> Candidate:
    plan = make_plan(config, topology)
    result = "fits" if plan.fits(topology) else "does not fit"
    if topology.chip is None:
        result = "planned"
    log(
        f"{format_mesh(plan.mesh)}, remat {config.execution.remat}: {result} "
        f"({format_seconds(plan.seconds)} to plan)"
    )
    return Candidate(config, plan)


def _with_remat(config: TrainConfig, remat: Remat) -> TrainConfig:
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, remat=remat))


def _print_table(found: list[Candidate], topology: Topology) -> None:
    """Prints a row per candidate, and on real chips the estimates of its speed."""
    speed = ("step (estimate)", "of peak") if topology.chip else ()
    table = Table("mesh", "remat", "micro-batches", "peak", *speed, box=None)
    for one in sorted(found, key=lambda x: x.cost(topology)):
        config, plan = one
        cells = [format_mesh(plan.mesh), config.execution.remat, str(config.micro_batches)]
        fits = plan.peak_bytes is not None and plan.fits(topology)
        cells.append(format_bytes(plan.peak_bytes or 0) if fits else "does not fit")
        if topology.chip is not None and plan.out_of_memory is None:
            estimate = Estimate.from_plan(plan, topology)
            low, high = estimate.utilization(plan, topology)
            cells.append(
                f"{format_seconds(estimate.overlapped)} to {format_seconds(estimate.sequential)}"
            )
            cells.append(f"{low:.0%} to {high:.0%}")
        table.add_row(*cells)
    Console(soft_wrap=True, width=120).print(table)
