"""The process that `plan` compiles in: a request on standard input, a line of JSON per run."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ...data.errors import UserError
from ..config import TrainConfig, from_dict
from ..distributed.optimizer_offload import HOST
from ..distributed.sharding import make_mesh
from ..engine.compile import ShardedStep, configured_step
from ..engine.memory_summary import bytes_per_device
from ..objectives.tasks import objective_of
from ..state import count_parameters
from .batch_specs import batch_shapes, model_flops
from .hlo.collectives import Collective, collectives
from .hlo.cost import matrix_flops as compiled_flops
from .hlo.cost import memory_traffic
from .hlo.parser import parse_hlo
from .plan import Exchange, Plan
from .topologies import Chip, Topology, parse_topology, topology_devices


def main() -> None:
    """Answers the request on standard input."""
    request = json.load(sys.stdin)
    topology = parse_topology(request["topology"])
    devices = topology_devices(topology)
    for fields in request["configs"]:
        try:
            plan = plan_run(from_dict(fields), topology, devices, compiled=request["compiled"])
            answer = dataclasses.asdict(plan)
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def plan_run(
    config: TrainConfig, topology: Topology, devices: Sequence[Any], *, compiled: bool
) -> Plan:
    """The plan of one run.

    Raises:
      UserError: mesh, batch and parameters do not fit each other.
    """
    if config.parallel != "jit":
        raise UserError(f"parallel {config.parallel} cannot be planned: leave it out")
    mesh = make_mesh(config.mesh, devices)
    _check_slices(mesh, topology)
    step = configured_step(config, objective_of(config), mesh)
    batch = batch_shapes(config, step)
    plan = Plan(
        topology=topology.name,
        num_devices=len(devices),
        mesh=dict(mesh.shape),
        tokens=config.batch_size * config.data.length,
        num_parameters=count_parameters(step.state.params),
        parameters=bytes_per_device((step.state.params, step.state.frozen)),
        optimizer=bytes_per_device((step.state.opt_state, step.state.step)),
        host=bytes_per_device(step.state.opt_state, HOST),
        batch=bytes_per_device(batch),
        model_flops=0,
        seconds=0.0,
        attention=step.attention,
    )
    return _compiled(plan, config, step, batch, mesh, topology) if compiled else plan


def _check_slices(mesh: Mesh, topology: Topology) -> None:
    if mesh.shape["data"] % topology.slices:
        raise UserError(
            f"mesh.data {mesh.shape['data']} over {topology.slices} slices: what is slow between "
            f"slices is cut along data alone: make it a multiple of {topology.slices}"
        )


def _compiled(
    plan: Plan, config: TrainConfig, step: ShardedStep, batch: Any, mesh: Mesh, topology: Topology
) -> Plan:
    plan = dataclasses.replace(plan, model_flops=model_flops(config))
    try:
        executable = step.trace(batch).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return dataclasses.replace(plan, refusal=str(error))
    memory = executable.memory_analysis()
    assert memory is not None
    program = parse_hlo(executable.as_text() or "")
    devices = mesh.devices.flatten().tolist()
    return dataclasses.replace(
        plan,
        temporaries=memory.temp_size_in_bytes
        + max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0),
        program=memory.generated_code_size_in_bytes,
        device_flops=compiled_flops(program),
        device_traffic=memory_traffic(program),
        exchanges=exchanges(collectives(program, len(devices)), devices, topology),
    )


def exchanges(
    found: Sequence[Collective], devices: Sequence[Any], topology: Topology
) -> tuple[Exchange, ...]:
    """Collectives summed by kind, those between slices apart."""
    sums: dict[str, list[float]] = {}
    for one in found:
        members = [devices[place] for place in one.group]
        far = topology.slices > 1 and len({d.slice_index for d in members}) > 1
        sent = one.times * one.bytes_sent
        seconds = 0.0
        if topology.chip is not None:
            seconds = sent / _bandwidth(members, far, topology.chip, topology.shape)
        kind = f"{one.kind} between slices" if far else one.kind
        entry = sums.setdefault(kind, [0, 0, 0.0])
        for place, amount in enumerate((one.times, sent, seconds)):
            entry[place] += amount
    known = topology.chip is not None
    return tuple(
        Exchange(kind, int(number), int(sent), seconds if known else None)
        for kind, (number, sent, seconds) in sorted(sums.items())
    )


def _bandwidth(members: Sequence[Any], far: bool, chip: Chip, shape: tuple[int, ...]) -> float:
    """Bytes per second that a device can send within its group, along every axis that it spans.

    Along an axis that is a ring a device sends both ways, else one.
    """
    if far:
        return chip.network_bandwidth
    total = 0.0
    for axis, length in enumerate(shape):
        if len({d.coords[axis] for d in members}) > 1:
            total += chip.link_bandwidth * (1 if length % chip.wraps else 2)
    return total or chip.link_bandwidth


if __name__ == "__main__":
    main()
