"""The train step compiled by `pmap`: every device has a copy of the model, and a part of a batch.

It computes what `compile.py` computes with a mesh over `data`, which is the way to go; this one
shows how the same step runs in the older form.
"""

from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...data.common.errors import UserError
from ...models.adapters.lora import make_lora
from ...models.registry import create
from ..config import TrainConfig
from ..distributed.attention_backend import choose_kernel, with_kernel
from ..distributed.sharding import check_batch_divides
from ..losses.eval_step import make_evaluate_fn
from ..losses.objective import Objective, Predictions, Terms
from ..mesh import MESH_AXIS_NAMES
from ..optim.optimizer import make_optimizer
from ..state import Metrics, TrainState
from .compile import CompiledTrainer, NumpyBatch, make_init, run_keys, with_shardings
from .memory_summary import BatchShapes, memory_summary
from .train_step import make_train_step

AXIS = "devices"
T = TypeVar("T")


def compile_with_pmap(config: TrainConfig, objective: Objective) -> CompiledTrainer:
    """Makes the functions of a run for the devices of this process.

    Raises:
        UserError: the run needs what only `jit` does, or the batch does not divide.
    """
    _check(config)
    devices = jax.local_devices()
    number = len(devices)
    chosen = choose_kernel(config, devices[0])
    config = with_kernel(config, chosen.kernel)
    check_batch_divides(config.batch_size, number, config.micro_batches)
    model = create(config.model, config.execution)
    tx = make_optimizer(config.optimizer, config.steps, config.model)
    adapter = None if config.lora is None else make_lora(config.lora, model)
    init, (init_rng, step_rng) = make_init(model, objective, tx, adapter), run_keys(config.seed)
    shapes = jax.eval_shape(init, init_rng)

    # Each device splits its own examples into micro-batches.
    step = jax.pmap(
        make_train_step(
            model.apply,
            objective,
            tx,
            num_micro_batches=config.micro_batches,
            axis_name=AXIS,
            adapter=adapter,
        ),
        AXIS,
        in_axes=(0, 0, None),
        donate_argnums=0,
    )
    evaluate_fn = make_evaluate_fn(model.apply, objective, axis_name=AXIS, adapter=adapter)
    evaluate = jax.pmap(evaluate_fn, AXIS)
    # pmap needs a mapped argument to know the number of devices.
    copy = jax.pmap(lambda x, _: x, in_axes=(None, 0))
    one_device = NamedSharding(Mesh(np.asarray(devices[:1]), ("one",)), PartitionSpec())

    def replicate(state: TrainState) -> TrainState:
        return copy(state, np.arange(number))

    compiled: list[jax.stages.Compiled] = []  # `step` does not find again what is compiled here

    def compile_step(batch: BatchShapes) -> tuple[jax.stages.Compiled, str]:
        copies = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((number, *x.shape), x.dtype), shapes
        )  # [number, …]
        parts = {
            name: jax.ShapeDtypeStruct((number, x.shape[0] // number, *x.shape[1:]), x.dtype)
            for name, x in batch.items()
        }  # [number, B / number, …]
        compiled[:] = [step.lower(copies, parts, step_rng).compile()]
        return compiled[0], ""

    def take_step(state: TrainState, batch: NumpyBatch) -> tuple[TrainState, Metrics]:
        program = compiled[0] if compiled else step
        state, metrics = program(state, _split(batch, number), step_rng)
        return state, _first(metrics)

    def evaluate_batch(state: TrainState, batch: NumpyBatch) -> tuple[Terms, Terms, Predictions]:
        sums, counts, predictions = evaluate(state.params, _split(batch, number), state.frozen)
        whole = {name: x.reshape(-1, *x.shape[2:]) for name, x in predictions.items()}
        return *_first((sums, counts)), whole

    placed = with_shardings(shapes, jax.tree.map(lambda _: one_device, shapes))
    return CompiledTrainer(
        init=lambda: replicate(jax.jit(init)(init_rng)),
        step=take_step,
        lower=lambda state, batch: step.lower(state, _split(batch, number), step_rng),
        compile=compile_step,
        evaluate=evaluate_batch,
        to_global=lambda state: jax.device_put(_first(state), one_device),
        from_global=replicate,
        shapes=placed,
        description=f"pmap over {number} × {devices[0].device_kind}",
        memory_summary=memory_summary(config, placed, number, chosen.description),
    )


def _check(config: TrainConfig) -> None:
    """Raises UserError for what only `jit` does."""
    if jax.process_count() > 1:
        raise UserError(
            f"parallel pmap is for the devices of one process, and here are {jax.process_count()}: "
            "leave it out (--parallel jit)"
        )
    sharded = [name for name in MESH_AXIS_NAMES[1:] if getattr(config.mesh, name) != 1]
    if sharded:
        raise UserError(
            f"mesh.{sharded[0]} {getattr(config.mesh, sharded[0])} is for --parallel jit, for "
            "under pmap every device has the whole model: leave one of them out"
        )
    if config.gather != "auto":
        raise UserError(
            f"gather {config.gather} is for --parallel jit, for under pmap every device has the "
            "whole model: leave one of them out"
        )


def _first(tree: T) -> T:
    """Returns one of the equal copies that pmap has of a tree.

    One program makes it, for a virtual device takes a limited number of them at once (see
    `has_virtual_devices`), and a state has many arrays.
    """
    return _without_leading_axis(jax.tree.map(lambda x: x.addressable_data(0), tree))


@jax.jit
def _without_leading_axis(tree: T) -> T:
    return jax.tree.map(lambda x: x[0], tree)


def _split(batch: NumpyBatch, number: int) -> NumpyBatch:
    """Returns a batch with a leading axis of devices, `[number, B / number, …]`."""
    return {name: x.reshape(number, -1, *x.shape[1:]) for name, x in batch.items()}
