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

from ...data.errors import UserError
from ...models.init import init_params
from ...models.registry import create
from ..config import TrainConfig
from ..distributed.attention_backend import choose_kernel, with_kernel
from ..distributed.optimizer_offload import from_host_and_back, on_host
from ..distributed.sharding import (
    CONTEXT,
    check_batch,
    check_batch_divides,
    kernels_apart,
    make_mesh,
    process_part,
    rows_apart,
    rows_stay_apart,
    shard_batch,
    state_shardings,
)
from ..objectives.eval_step import make_evaluate_fn
from ..objectives.objectives import Batch, Objective, Predictions, Terms
from ..optim.optimizer import make_optimizer
from ..state import TrainState, init_state
from .memory_summary import footprint
from .train_step import make_train_step

NumpyBatch = dict[str, np.ndarray]
PMAP_AXIS = "devices"


@dataclasses.dataclass(frozen=True)
class Program:
    """A training run's compiled functions."""

    init: Callable[[], Any]
    """Makes the state before the first step, on the devices."""
    step: Callable[[Any, NumpyBatch], tuple[Any, dict[str, jax.Array]]]
    """Takes one step; consumes the state it is given."""
    lower: Callable[[Any, NumpyBatch], Any]
    """What `step` would compile for these, as `jax.stages.Lowered`; once it is compiled, `step`
    need not."""
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
    footprint: str
    """What a step is for each of them, in words."""
    part: tuple[int, int] = (0, 1)
    """Which part of each batch this process reads, and of how many parts."""


def make_program(config: TrainConfig, objective: Objective) -> Program:
    """Compiles `config`'s model, objective and optimizer for the devices at hand.

    Raises:
      UserError: mesh, batch and parameters do not fit each other.
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


def _functions(config: TrainConfig, objective: Objective, mesh: Mesh | None = None) -> _Functions:
    model = create(config.model, config.execution)
    apply_fn = model.apply
    if mesh is not None:
        apply_fn = kernels_apart(rows_stay_apart(apply_fn, mesh), mesh)
    tx = make_optimizer(config.optimizer, config.steps)
    # Named, for a run must not depend on what jax is configured to use.
    root = jax.random.key(config.seed, impl="threefry2x32")
    init_rng, step_rng = jax.random.split(root)

    def init() -> TrainState:
        return init_state(init_params(model, init_rng), tx)

    make_step = functools.partial(
        make_train_step, apply_fn, objective, tx, num_micro_batches=config.micro_batches
    )
    evaluate = make_evaluate_fn(apply_fn, objective)
    if mesh is not None:
        evaluate = _on_mesh(evaluate, mesh)
    return _Functions(init, tx, make_step, evaluate, step_rng)


def _on_mesh(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The function traced where jax says what the mesh is, for `chunks` asks it."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


@dataclasses.dataclass(frozen=True)
class MeshStep:
    """The train step over a mesh, not compiled yet, and where what it takes lies."""

    functions: _Functions
    step: Any
    """What `jax.jit` gave: `step(state, batch, rng)`."""
    state: TrainState
    """Shapes, dtypes and shardings of the state."""
    mesh: Mesh
    attention: str
    """What computes attention, in words."""

    def trace(self, batch: Any) -> Any:
        """The step with shapes for its arrays, to be lowered and compiled for the mesh's devices.

        Args:
          batch: the global batch, as `jax.ShapeDtypeStruct`s that say where they lie.
        """
        return self.step.trace(self.state, batch, jax.eval_shape(lambda: self.functions.rng))


def mesh_step(config: TrainConfig, objective: Objective, mesh: Mesh) -> MeshStep:
    """The train step of a run over a mesh, whose devices need not be at hand.

    Raises:
      UserError: mesh, batch and parameters do not fit each other.
    """
    chosen = choose_kernel(config, mesh.devices.flat[0], mesh.shape[CONTEXT])
    f = _functions(with_kernel(config, chosen.kernel), objective, mesh)
    check_batch(mesh, config.batch_size, config.data.length, config.micro_batches)
    shapes = jax.eval_shape(f.init)
    shardings = state_shardings(shapes, f.tx, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    take_step = _on_mesh(f.make_step(), mesh)
    if config.optimizer.state_memory == "host":
        within, shardings = shardings, on_host(shapes, shardings, mesh.local_devices[0])
        take_step = from_host_and_back(take_step, within, shardings)
    step = jax.jit(
        take_step,
        in_shardings=(shardings, None, everywhere),  # of a batch they are its arrays' own
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
    return MeshStep(f, step, _with_shardings(shapes, shardings), mesh, chosen.description)


def _jit_program(config: TrainConfig, objective: Objective) -> Program:
    mesh = make_mesh(config.mesh)
    compiled = mesh_step(config, objective, mesh)
    f, step = compiled.functions, compiled.step
    shardings = jax.tree.map(lambda x: x.sharding, compiled.state)
    everywhere = NamedSharding(mesh, PartitionSpec())
    evaluate = jax.jit(
        f.evaluate,
        in_shardings=(shardings.params, None),
        out_shardings=everywhere,  # each process scores the predictions of all
    )
    return Program(
        init=jax.jit(f.init, out_shardings=shardings),
        step=lambda state, batch: step(state, shard_batch(batch, mesh), f.rng),
        lower=lambda state, batch: step.lower(state, shard_batch(batch, mesh), f.rng),
        evaluate=lambda state, batch: evaluate(state.params, shard_batch(batch, mesh)),
        to_global=lambda state: state,
        from_global=lambda state: state,
        shapes=compiled.state,
        description=_describe(mesh),
        footprint=footprint(config, compiled.state, rows_apart(mesh), compiled.attention),
        part=process_part(mesh),
    )


def _check_pmap(config: TrainConfig) -> None:
    """Raises ValueError for what is only done under `jit`."""
    if jax.process_count() > 1:
        raise UserError(
            f"parallel pmap is for the devices of one process, and here are {jax.process_count()}: "
            "leave it out (--parallel jit)"
        )
    cut = [name for name in ("fsdp", "context", "tensor") if getattr(config.mesh, name) != 1]
    if cut:
        raise UserError(
            f"mesh.{cut[0]} {getattr(config.mesh, cut[0])} is for --parallel jit, for under pmap "
            "every device has the whole model: leave one of them out"
        )
    if config.optimizer.state_memory != "device":
        raise UserError("optimizer.state_memory host is for --parallel jit: leave one of them out")


def _pmap_program(config: TrainConfig, objective: Objective) -> Program:
    _check_pmap(config)
    devices = jax.local_devices()
    number = len(devices)
    chosen = choose_kernel(config, devices[0])
    f = _functions(with_kernel(config, chosen.kernel), objective)
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

    def take_step(state: Any, batch: NumpyBatch) -> tuple[Any, dict[str, jax.Array]]:
        state, metrics = step(state, _deal(batch, number), f.rng)
        return state, _first(metrics)

    def evaluate_batch(state: Any, batch: NumpyBatch) -> tuple[Terms, Terms, Predictions]:
        sums, counts, predictions = evaluate(state.params, _deal(batch, number))
        whole = {name: x.reshape(-1, *x.shape[2:]) for name, x in predictions.items()}
        return _first(sums), _first(counts), whole

    shapes = jax.eval_shape(f.init)
    placed = _with_shardings(shapes, jax.tree.map(lambda _: one, shapes))
    return Program(
        init=lambda: replicate(jax.jit(f.init)()),
        step=take_step,
        lower=lambda state, batch: step.lower(state, _deal(batch, number), f.rng),
        evaluate=evaluate_batch,
        to_global=lambda state: jax.device_put(_first(state), one),
        from_global=replicate,
        shapes=placed,
        description=f"pmap over {number} × {devices[0].device_kind}",
        footprint=footprint(config, placed, number, chosen.description),
    )


def _first(tree: Any) -> Any:
    """One of the equal copies that pmap has of a tree."""
    return jax.tree.map(lambda x: x[0], tree)


def _deal(batch: NumpyBatch, number: int) -> NumpyBatch:
    """A batch with an axis of devices before its rows."""
    return {name: x.reshape(number, -1, *x.shape[1:]) for name, x in batch.items()}


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def _describe(mesh: Mesh) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    number = jax.process_count()
    of = f" of {number} processes" if number > 1 else ""
    return f"jit over {mesh.size} × {mesh.devices.flat[0].device_kind}{of} ({axes})"
