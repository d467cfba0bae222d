"""One step, compiled for the devices at hand: `jit` over a mesh, or `pmap`.

Both give a `Program`, which is all that the training loop knows of devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..models.config import create
from ..models.shapes import init_params
from .config import TrainConfig
from .evaluation import make_evaluate_fn
from .objectives import Batch, Objective, Predictions, Terms
from .optimizer import make_optimizer
from .sharding import (
    batch_sharding,
    check_batch_divides,
    make_mesh,
    shard_batch,
    state_shardings,
)
from .state import TrainState, init_state
from .step import make_train_step

NumpyBatch = dict[str, np.ndarray]
PMAP_AXIS = "devices"


@dataclasses.dataclass(frozen=True)
class Program:
    """A training run's compiled functions."""

    init: Callable[[], Any]
    """Makes the state before the first step, on the devices."""
    step: Callable[[Any, NumpyBatch], tuple[Any, dict[str, jax.Array]]]
    """Takes one step; consumes the state it is given."""
    evaluate: Callable[[Any, NumpyBatch], tuple[Terms, Terms, Predictions]]
    """Sums, counts and predictions of a batch, without dropout."""
    to_global: Callable[[Any], TrainState]
    """The state as every `Program` writes it to a checkpoint."""
    from_global: Callable[[TrainState], Any]
    """The inverse."""
    shapes: TrainState
    """Shapes, dtypes and shardings of the global form, to restore into."""
    description: str
    """The devices, in words."""


def make_program(config: TrainConfig, objective: Objective) -> Program:
    """Compiles `config`'s model, objective and optimizer for the devices at hand.

    Raises:
      ValueError: mesh, batch and parameters do not fit each other.
    """
    return {"jit": _jit_program, "pmap": _pmap_program}[config.parallel](config, objective)


@dataclasses.dataclass(frozen=True)
class _Functions:
    """What both ways of compiling compile."""

    init: Callable[[], TrainState]
    tx: optax.GradientTransformation
    make_step: Callable[..., Any]
    evaluate: Callable[[Any, Batch], tuple[Terms, Terms, Predictions]]
    rng: jax.Array


def _functions(config: TrainConfig, objective: Objective) -> _Functions:
    model = create(config.model, config.execution)
    tx = make_optimizer(config.optimizer, config.steps)
    # Named, for a run must not depend on what jax is configured to use.
    root = jax.random.key(config.seed, impl="threefry2x32")
    init_rng, step_rng = jax.random.split(root)

    def init() -> TrainState:
        return init_state(init_params(model, init_rng), tx)

    make_step = functools.partial(
        make_train_step, model.apply, objective, tx, num_micro_batches=config.micro_batches
    )
    evaluate = make_evaluate_fn(model.apply, objective)
    return _Functions(init, tx, make_step, evaluate, step_rng)


def _jit_program(config: TrainConfig, objective: Objective) -> Program:
    f = _functions(config, objective)
    mesh = make_mesh(config.mesh)
    rows = batch_sharding(mesh, config.batch_size, config.micro_batches)
    shapes = jax.eval_shape(f.init)
    shardings = state_shardings(shapes, f.tx, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        f.make_step(),
        in_shardings=(shardings, rows, everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
    evaluate = jax.jit(
        f.evaluate,
        in_shardings=(shardings.params, rows),
        out_shardings=(everywhere, everywhere, rows),
    )
    return Program(
        init=jax.jit(f.init, out_shardings=shardings),
        step=lambda state, batch: step(state, shard_batch(batch, rows), f.rng),
        evaluate=lambda state, batch: evaluate(state.params, shard_batch(batch, rows)),
        to_global=lambda state: state,
        from_global=lambda state: state,
        shapes=_with_shardings(shapes, shardings),
        description=_describe(mesh),
    )


def _pmap_program(config: TrainConfig, objective: Objective) -> Program:
    f = _functions(config, objective)
    devices = jax.local_devices()
    number = len(devices)
    check_batch_divides(config.batch_size, number, config.micro_batches)
    # Each device cuts its own rows into micro-batches.
    step = jax.pmap(
        f.make_step(axis_name=PMAP_AXIS),
        PMAP_AXIS,
        in_axes=(0, 0, None),
        donate_argnums=0,
    )

    def evaluate_part(params: Any, batch: Batch) -> tuple[Terms, Terms, Predictions]:
        sums, counts, predictions = f.evaluate(params, batch)
        return *jax.lax.psum((sums, counts), PMAP_AXIS), predictions

    evaluate = jax.pmap(evaluate_part, PMAP_AXIS)
    one = NamedSharding(Mesh(np.asarray(devices[:1]), ("one",)), PartitionSpec())
    # pmap wants something that is mapped: the numbers of the devices.
    copy = jax.pmap(lambda x, _: x, in_axes=(None, 0))

    def replicate(state: TrainState) -> Any:
        return copy(state, np.arange(number))

    def first(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[0], tree)

    def deal(batch: NumpyBatch) -> NumpyBatch:
        return {name: x.reshape(number, -1, *x.shape[1:]) for name, x in batch.items()}

    def take_step(state: Any, batch: NumpyBatch) -> tuple[Any, dict[str, jax.Array]]:
        state, metrics = step(state, deal(batch), f.rng)
        return state, first(metrics)

    def evaluate_batch(state: Any, batch: NumpyBatch) -> tuple[Terms, Terms, Predictions]:
        sums, counts, predictions = evaluate(state.params, deal(batch))
        whole = {name: x.reshape(-1, *x.shape[2:]) for name, x in predictions.items()}
        return first(sums), first(counts), whole

    shapes = jax.eval_shape(f.init)
    return Program(
        init=lambda: replicate(jax.jit(f.init)()),
        step=take_step,
        evaluate=evaluate_batch,
        to_global=lambda state: jax.device_put(first(state), one),
        from_global=replicate,
        shapes=_with_shardings(shapes, jax.tree.map(lambda _: one, shapes)),
        description=f"pmap over {number} × {devices[0].device_kind}",
    )


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _describe(mesh: Mesh) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return f"jit over {mesh.size} × {mesh.devices.flat[0].device_kind} ({axes})"
