"""Which mesh, and what to recompute: several plans of one run, best first."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from ...data.errors import UserError
from ...models.config import divisors
from ..config import MeshConfig, TrainConfig
from .plan import Estimate, Plan, make_plan, survey
from .report import duration, mesh_name, size
from .topologies import Topology

MOST_SHARED = 16
"""Further apart than this devices share neither a layer (tensor) nor a row (context)."""
Remat = Literal["none", "dots", "full"]
Say = Callable[[str], None]


def candidates(config: TrainConfig, topology: Topology) -> Iterator[TrainConfig]:
    """The run on every mesh, each with as few rows at a time as asked."""
    for mesh in _meshes(topology.num_devices):
        rows, left = divmod(config.batch_size, mesh.data * mesh.fsdp)
        if left or mesh.data % topology.slices:
            continue
        parts = max(n for n in divisors(rows) if n <= config.micro_batches)
        yield dataclasses.replace(config, mesh=mesh, micro_batches=parts)


def _meshes(number: int) -> Iterator[MeshConfig]:
    for shared in divisors(number):
        for tensor in divisors(shared):
            context = shared // tensor
            if max(tensor, context) > MOST_SHARED:
                continue
            for fsdp in divisors(number // shared):
                data = number // shared // fsdp
                yield MeshConfig(data=data, fsdp=fsdp, tensor=tensor, context=context)


def sent_bytes(plan: Plan, config: TrainConfig) -> float:
    """About how much each device sends in a step: what decides which meshes are compiled first.

    Parameters are gathered twice and gradients dealt out once for every part of the batch;
    tensor-parallel layers sum activations four times; where rows are cut, keys and values are
    gathered twice and their gradients dealt out.
    """
    model: Any = config.model
    data, fsdp, tensor, context = (
        plan.mesh[axis] for axis in ("data", "fsdp", "tensor", "context")
    )
    gathered = 3 * 2 * config.micro_batches * plan.num_parameters / tensor * (1 - 1 / fsdp)
    copies = data * context
    summed = 2 * 4 * plan.num_parameters / tensor / fsdp * (1 - 1 / copies)
    width = 2 * model.d_model * plan.tokens / data / fsdp
    activations = 4 * 2 * model.num_layers * width / context * (1 - 1 / tensor)
    keys_and_values = 3 * 2 * model.num_layers * width / tensor * (1 - 1 / context)
    return gathered + summed + activations + keys_and_values


def search(config: TrainConfig, topology: Topology, tries: int, say: Say) -> int:
    """Compiles the likeliest meshes and prints them; answers 0 if one fits, else 1.

    Raises:
      UserError: no mesh goes with the batch and the model, or one is given.
    """
    if tries < 1:
        raise UserError(f"tries {tries} must be at least 1")
    if config.mesh != MeshConfig():
        raise UserError(
            f"mesh {dataclasses.asdict(config.mesh)}: --search chooses the mesh: leave out "
            "--mesh.* or --search"
        )
    asked = list(candidates(config, topology))
    able = _able(asked, topology, say)
    meshes = [full for full, _ in able]
    tried = meshes[: max(1, tries - 2)]
    found = [_plan(config, topology, say) for config in tried]
    fitting = [(c, p) for c, p in found if p.refusal is None]
    if fitting:
        best = min(fitting, key=lambda pair: _seconds(pair[1], topology))[0]
        for remat in ("dots", "none")[: tries - len(found)]:
            found.append(_plan(_with_remat(best, remat), topology, say))
            if found[-1][1].refusal is not None:
                break
    if untried := len(meshes) - len(tried):
        say(
            f"not compiled: {untried} further meshes that by a rough count would send more "
            f"(--tries {tries})"
        )
    _print(found, topology)
    return 0 if fitting else 1


def _able(asked: list[TrainConfig], topology: Topology, say: Say) -> list[tuple[TrainConfig, Plan]]:
    """Those whose arguments fit, the ones that send least first, with everything recomputed."""
    full = [_with_remat(one, "full") for one in asked]
    surveyed = survey(full, topology) if full else []
    room = topology.chip.memory if topology.chip else math.inf
    made = [(c, p) for c, p in zip(full, surveyed, strict=True) if isinstance(p, Plan)]
    # Gradients are as large as the parameters.
    able = [(c, p) for c, p in made if p.arguments + p.parameters <= room]
    reasons = [p for p in surveyed if isinstance(p, str)]
    say(
        f"{len(asked)} meshes: {len(reasons)} cannot cut the model, {len(made) - len(able)} have "
        f"too much to hold, {len(able)} are left"
    )
    if not able:
        why = reasons[-1] if reasons else "parameters, optimizer and gradients are too large"
        raise UserError(f"no mesh of {topology.name} does: {why}")
    return sorted(able, key=lambda pair: sent_bytes(pair[1], pair[0]))


def _plan(config: TrainConfig, topology: Topology, say: Say) -> tuple[TrainConfig, Plan]:
    plan = make_plan(config, topology)
    fits = "fits" if plan.refusal is None else "does not fit"
    if topology.chip is None:
        fits = "planned"
    say(
        f"{mesh_name(plan.mesh)}, remat {config.execution.remat}: {fits} "
        f"({duration(plan.seconds)} to plan)"
    )
    return config, plan


def _with_remat(config: TrainConfig, remat: Remat) -> TrainConfig:
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, remat=remat))


def _seconds(plan: Plan, topology: Topology) -> float:
    """What a plan is judged by: its step at worst, or where nothing is known its memory."""
    if plan.refusal is not None or plan.peak is None:
        return math.inf
    return Estimate.of(plan, topology).most if topology.chip else float(plan.peak)


def _print(found: list[tuple[TrainConfig, Plan]], topology: Topology) -> None:
    timed = ("step (estimate)", "of peak") if topology.chip else ()
    table = Table("mesh", "remat", "micro-batches", "peak", *timed, box=None)
    for config, plan in sorted(found, key=lambda pair: _seconds(pair[1], topology)):
        table.add_row(
            mesh_name(plan.mesh),
            config.execution.remat,
            str(config.micro_batches),
            "does not fit" if plan.peak is None else size(plan.peak),
            *_speed(plan, topology),
        )
    Console(soft_wrap=True, width=120).print(table)


def _speed(plan: Plan, topology: Topology) -> tuple[str, ...]:
    if topology.chip is None or plan.refusal is not None:
        return ()
    estimate = Estimate.of(plan, topology)
    best, worst = estimate.utilisation(plan, topology)
    return (
        f"{duration(estimate.least)} to {duration(estimate.most)}",
        f"{worst:.0%} to {best:.0%}",
    )
