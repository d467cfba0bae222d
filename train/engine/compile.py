"""The functions of a run, compiled for the current devices."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ...data.common.fields import require
from ...models.adapters.lora import lora_of
from ...models.mesh_axes import CONTEXT
from ...models.registry import create
from ..config import TrainConfig
from ..distributed.attention_backend import choose_kernel
from ..distributed.pmap import check_pmap
from ..distributed.sharding import (
    check_batch,
    make_mesh,
    num_batch_shards,
    process_shard,
    shard_batch,
)
from ..losses.objective import Objective, Predictions, Terms, joined
from ..optim.optimizer import make_optimizer
from ..state import Metrics, TrainState
from .machine_memory import memory_of_each
from .memory_summary import BatchShapes, memory_summary
from .sharded_step import ShardedStep, make_sharded_step, run_keys, with_batch_sharding

NumpyBatch = dict[str, np.ndarray]


def configured_step(
    config: TrainConfig, objective: Objective, mesh: Mesh, device_memory: int | None = None
) -> ShardedStep:
    """Makes the train step of a run over a mesh, with the attention kernel for its devices.

    Args:
        config: the run.
        objective: the training objective.
        mesh: a mesh from `make_mesh`, whose devices need not be present.
        device_memory: the memory of a device in bytes; None if unknown.

    Raises:
        UserError: the batch or the parameters do not fit the mesh.
    """
    check_pmap(config)
    chosen = choose_kernel(config, mesh.devices.flat[0], mesh.shape[CONTEXT])
    # Raise an error for sizes that the mesh cannot divide before the step is made.
    require(
        mesh.shape["expert"] == 1 or config.model.num_experts,
        f"mesh.expert {mesh.shape['expert']} shards the experts of a mixture, but the model has no "
        "experts: use mesh.fsdp",
    )
    check_batch(mesh, config.batch_size, config.data.lengths[0], config.micro_batches)
    # The model needs the name of the chosen kernel instead of "auto".
    execution = dataclasses.replace(config.execution, attention=chosen.kernel)
    model = create(config.model, execution)
    sharded = make_sharded_step(
        model,
        objective,
        make_optimizer(config.optimizer, config.steps, config.model, config.schedule_start),
        mesh,
        num_micro_batches=config.micro_batches,
        adapter=lora_of(config.lora, model),
        gather=config.gather,
        parallel=config.parallel,
        device_memory=device_memory,
    )
    return dataclasses.replace(sharded, attention=chosen.description)


@dataclasses.dataclass(frozen=True)
class CompiledTrainer:
    """The functions that the training loop calls to use the devices."""

    init: Callable[[], TrainState]
    """Makes the initial state."""
    step: Callable[[TrainState, NumpyBatch], tuple[TrainState, Metrics]]
    """Runs one step. The memory of the input state is donated."""
    lower: Callable[[TrainState, NumpyBatch], jax.stages.Lowered]
    """Lowers the step for the given arguments. Compiling the result also compiles `step`."""
    compile: Callable[[BatchShapes], tuple[jax.stages.Compiled, str]]
    """Compiles the step for these batch shapes, without a state, so that the first call of `step`
    does not compile. Also returns a description of the changes that made the step fit into memory,
    or an empty string."""
    evaluate: Callable[[TrainState, NumpyBatch], tuple[Terms, Terms, Predictions]]
    """Computes the sums, the counts and the predictions of a batch, without dropout."""
    shapes: TrainState
    """The shapes, dtypes and shardings of the state, which are needed to restore a checkpoint."""
    description: str
    """A description of the devices, to show to the user."""
    memory_summary: str
    """A description of the size of a step on each device, to show to the user."""
    shard: tuple[int, int] = (0, 1)
    """The index of this process's share of each batch, and the number of shares."""
    validation: Objective | None = None
    """The objective of evaluations. If None, evaluations use the training objective."""


def check_devices(config: TrainConfig, stored_in: Path | None = None) -> None:
    """Checks that the mesh fits the devices. The check is cheap, so it runs before data are read.

    Args:
        config: the configuration of the run.
        stored_in: the `config.json` of the run that this command resumes, for the error message.

    Raises:
        UserError: the product of the mesh sizes is not the number of devices, or pmap does not
          support the run.
    """
    if jax.process_count() == 1:
        # With several processes, `make_sharded_step` checks the mesh, and only the first process
        # reports an error.
        check_pmap(config)
    make_mesh(config.mesh, stored_in=stored_in)


def compile_trainer(config: TrainConfig, objective: Objective) -> CompiledTrainer:
    """Makes the functions that run the training on the current devices.

    Raises:
        UserError: the batch or the parameters do not fit the mesh.
    """
    return trainer_of(config, step_of_run(config, objective))


def step_of_run(config: TrainConfig, objective: Objective) -> ShardedStep:
    """Makes the train step of a run over its configured mesh; see `configured_step`."""
    mesh = make_mesh(config.mesh)
    return configured_step(config, objective, mesh, memory_of_each())


def trainer_of(config: TrainConfig, sharded: ShardedStep) -> CompiledTrainer:
    """Makes the functions that run the training with a sharded step."""
    mesh, (init_rng, step_rng) = sharded.mesh, run_keys(config.seed)
    chosen = sharded.candidates[0]

    def put(batch: NumpyBatch) -> dict[str, jax.Array]:
        return shard_batch(batch, mesh)

    def compile_step(batch: BatchShapes) -> tuple[jax.stages.Compiled, str]:
        nonlocal chosen
        # Later calls of `step` and `lower` use the candidate that fits into memory.
        chosen, program = sharded.compile(with_batch_sharding(batch, mesh))
        return program, sharded.change_to(chosen)

    return CompiledTrainer(
        init=lambda: sharded.init(init_rng),
        step=lambda state, batch: chosen.step(state, put(batch), step_rng),
        lower=lambda state, batch: chosen.step.lower(state, put(batch), step_rng),
        compile=compile_step,
        evaluate=lambda state, batch: sharded.evaluate(
            joined(state.params, state.auxiliary), put(batch), state.frozen
        ),
        shapes=sharded.state,
        description=_describe(mesh, config.parallel),
        memory_summary=memory_summary(
            config,
            sharded.state,
            num_batch_shards(mesh),
            "; ".join(filter(None, (sharded.attention, sharded.exchange))),
        ),
        shard=process_shard(mesh),
    )


def _describe(mesh: Mesh, parallel: str) -> str:
    """Describes the devices: `jit over 8 × TPU v4 (data 2, fsdp 4, context 1, tensor 1)`."""
    num_processes = jax.process_count()
    processes = f" of {num_processes} processes" if num_processes > 1 else ""
    # Do not show `expert 1`, because few models have experts. Show no axes for pmap, because it
    # uses only `data`.
    shown = [f"{name} {size}" for name, size in mesh.shape.items() if (name, size) != ("expert", 1)]
    axes = f" ({', '.join(shown)})" if parallel == "jit" else ""
    return f"{parallel} over {mesh.size} × {mesh.devices.flat[0].device_kind}{processes}{axes}"
