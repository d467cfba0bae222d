"""The process that compiles for `plan`. It reads a request from standard input, and prints JSON."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
from jax.sharding import Mesh

from ...data.chat.policy import PolicyData
from ...data.common.fields import require
from ...models.adapters.lora import lora_of
from ...models.init import parameter_shapes
from ...models.loading import model_config
from ...models.nn.cache import init_cache
from ...models.registry import create
from ..config import TrainConfig, objective_of
from ..distributed.sharding import (
    batch_sharding,
    make_mesh,
    num_batch_shards,
    parameter_shardings,
)
from ..engine.compile import configured_step
from ..engine.memory_summary import bytes_per_device, is_out_of_memory, memory_of, temp_bytes
from ..engine.policy.rollout import RolloutPrograms, samples_stacked
from ..engine.sharded_step import ShardedStep, with_shardings
from ..objectives.online import OnlineConfig
from ..runs.config_json import from_dict
from ..state import count_parameters
from .batch_specs import batch_shapes, model_flops
from .chip import Device
from .hlo.collectives import CollectiveOp, collective_ops
from .hlo.cost import hbm_bytes, matmul_flops
from .hlo.parser import parse_hlo
from .plan import Collective, Plan
from .topology import Topology, parse_topology


def main() -> None:
    """Reads the request from standard input and prints the answer."""
    # `make_plan` has set the environment that the compiler of this topology needs.
    request = json.load(sys.stdin)
    topology = parse_topology(request["topology"])
    devices = topology.devices()
    try:
        reply = dataclasses.asdict(plan_run(from_dict(request["config"]), topology, devices))
    except ValueError as error:
        reply = {"error": str(error)}
    print(json.dumps(reply), flush=True)


def plan_run(config: TrainConfig, topology: Topology, devices: Sequence[Device]) -> Plan:
    """Compiles the step of a run for a topology and describes it.

    Raises:
        UserError: The mesh, the batch or the parameters cannot be divided over the devices.
    """
    require(config.parallel == "jit", f"parallel {config.parallel} cannot be planned: leave it out")
    mesh = make_mesh(config.mesh, devices)
    require(
        mesh.shape["data"] % topology.data_multiple == 0,
        f"mesh.data must be a multiple of the {topology.units} slices, because only data is "
        f"sharded over the slow network between slices, got {mesh.shape['data']}: give a "
        "multiple",
    )
    step = configured_step(config, objective_of(config), mesh, topology.chip.usable_memory)
    batch = batch_shapes(config, step)
    # These sizes are known without compiling.
    plan = Plan(
        topology=topology.name,
        num_devices=len(devices),
        mesh=dict(mesh.shape),
        tokens=config.batch_size * config.data.lengths[0],
        num_parameters=count_parameters(step.state.params),
        model_parameters=count_parameters(parameter_shapes(create(config.model))),
        param_bytes=bytes_per_device(step.state.params),
        frozen_parameters=count_parameters(step.state.frozen),
        frozen_bytes=bytes_per_device(step.state.frozen),
        optimizer_bytes=bytes_per_device((step.state.opt_state, step.state.step)),
        batch_bytes=bytes_per_device(batch),
        attention=step.attention,
        exchange=step.exchange,
    )
    if isinstance(config.objective, OnlineConfig):
        plan = _with_rollout(plan, config, config.objective, step)
    plan = dataclasses.replace(plan, model_flops=model_flops(config))
    return _with_compiled_step(plan, step, batch, mesh, topology=topology)


def _with_rollout(
    plan: Plan, config: TrainConfig, objective: OnlineConfig, step: ShardedStep
) -> Plan:
    """Adds the memory of sampling and of local reward models to the plan."""
    mesh, rows = step.mesh, config.batch_size * objective.num_mini_batches
    config = dataclasses.replace(
        config, execution=dataclasses.replace(config.execution, attention="xla", remat="none")
    )
    model = create(config.model, config.execution)
    layers = config.execution.layers if samples_stacked(mesh) else "separate"
    sampling = dataclasses.replace(config.execution, layers=layers)
    cache = jax.eval_shape(lambda: init_cache(config.model, sampling, rows, config.data.length))
    # The cache is sharded over rows and, if the tensor axis divides them, over key/value heads.
    heads = mesh.shape["tensor"] if config.model.kv_heads % mesh.shape["tensor"] == 0 else 1
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    judges = [_reward_bytes(name, mesh) for name in objective.rewards if Path(name).is_dir()]
    plan = dataclasses.replace(
        plan,
        cache_bytes=whole // (num_batch_shards(mesh) * heads),
        reward_bytes=sum(judges),
    )
    answer_length = objective.answer_length(cast(PolicyData, config.data))
    # Compile the program that samples, because its peak differs from the peak of the update.
    programs = RolloutPrograms(
        model=model,
        apply_fn=model.apply,
        mesh=mesh,
        temperature=objective.temperature,
        answer_length=answer_length,
        end_ids=(0,),
        adapter=lora_of(config.lora, model),
    )
    # Compilation needs only shapes, so do not create arrays.
    group = objective.num_generations
    shape = rows // group, config.data.length - answer_length
    sharding = batch_sharding(mesh, shape)
    prompt = jax.ShapeDtypeStruct(shape, "int32", sharding=sharding)
    key = jax.eval_shape(lambda: jax.random.key(0))
    sample = jax.jit(programs.sample, static_argnames="group_size")
    state = step.state
    program = sample.lower(
        state.params,
        state.frozen,
        {"prompt_ids": prompt, "prompt_mask": prompt},
        key,
        group_size=group,
    ).compile()
    memory = memory_of(program)
    taken = temp_bytes(memory) + memory.generated_code_size_in_bytes
    return dataclasses.replace(plan, rollout_bytes=taken)


def _reward_bytes(folder: str, mesh: Mesh) -> int:
    """Returns the bytes per device of a reward model's parameters."""
    config = model_config(Path(folder))
    shapes = parameter_shapes(create(config))
    return bytes_per_device(with_shardings(shapes, parameter_shardings(shapes, mesh, config)))


def _with_compiled_step(
    plan: Plan,
    step: ShardedStep,
    batch: dict[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
    *,
    topology: Topology,
) -> Plan:
    """Adds the figures of the compiled program to the plan, or the compiler's error."""
    try:
        chosen, executable = step.compile(batch)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # Every way to run the step needs too much memory. Report the way that needs the smallest
        # memory.
        smallest = step.candidates[-1]
        return dataclasses.replace(plan, exchange=smallest.exchange, out_of_memory=str(error))
    memory = memory_of(executable)
    program = parse_hlo(cast(str, executable.as_text()))
    devices = mesh.devices.flatten().tolist()
    return dataclasses.replace(
        plan,
        exchange=chosen.exchange,
        temp_bytes=temp_bytes(memory),
        code_bytes=memory.generated_code_size_in_bytes,
        device_flops=matmul_flops(program),
        hbm_bytes=hbm_bytes(program),
        collectives=sum_by_kind(collective_ops(program, len(devices)), devices, topology),
    )


def sum_by_kind(
    ops: Sequence[CollectiveOp], devices: Sequence[Device], topology: Topology
) -> tuple[Collective, ...]:
    """Adds up collectives by kind, with separate sums within slices or hosts and between them.

    Args:
        ops: The instructions of the compiled program.
        devices: The devices in the order of the mesh. The attributes of virtual devices are not
          used.
        topology: The topology of the devices.
    """
    chip = topology.chip
    sums: dict[str, Collective] = {}
    for op in ops:
        bytes_sent = op.count * op.bytes_sent
        group = [devices[index] for index in op.group]
        # Collectives between units use the slower network, so they are listed separately.
        kind = f"{op.kind} between {chip.unit}s" if chip.crosses(group) else op.kind
        seconds = bytes_sent / chip.bandwidth(group, topology.shape)
        sum_ = sums.get(kind, Collective(kind, 0, 0, 0.0))
        sums[kind] = Collective(
            kind=kind,
            count=sum_.count + op.count,
            bytes_sent=sum_.bytes_sent + bytes_sent,
            seconds=sum_.seconds + seconds,
        )
    return tuple(sums[kind] for kind in sorted(sums))


if __name__ == "__main__":
    main()
