"""The train step compiled for the devices at hand, by `jit` over a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...data.common.errors import UserError
from ...models.adapters.lora import LoRA, make_lora
from ...models.init import init_params
from ...models.model import Model
from ...models.nn.typing import Array, Key, PyTree
from ...models.registry import create
from ..config import Gather, TrainConfig
from ..distributed.attention_backend import choose_kernel, with_kernel
from ..distributed.expert_parallel import over_mesh
from ..distributed.fsdp import Exchange, choose_exchange, reading
from ..distributed.multiprocess import greatest_everywhere
from ..distributed.sharding import (
    CONTEXT,
    batch_sharding,
    check_batch,
    make_mesh,
    num_batch_shards,
    process_shard,
    shard_batch,
    shard_map_attention,
    state_shardings,
)
from ..losses.eval_step import make_evaluate_fn
from ..losses.objective import Batch, Objective, Predictions, Terms
from ..optim.optimizer import make_optimizer
from ..state import Metrics, TrainState, init_state
from .machine_memory import memory_of_each
from .memory_summary import (
    BatchShapes,
    bytes_per_device,
    is_out_of_memory,
    memory_summary,
    peak_bytes,
)
from .train_step import make_train_step

NumpyBatch = dict[str, np.ndarray]
P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ShardedStep:
    """A train step over a mesh and its companions, compiled at their first call."""

    init: Callable[[Key[Array, ""]], TrainState]
    """Makes the sharded state before the first step from a key."""
    step: jax.stages.Wrapped
    """`step(state, batch, rng) -> (state, metrics)`; the state that it is given is consumed."""
    evaluate: jax.stages.Wrapped
    """`evaluate(params, batch, frozen) -> (sums, counts, predictions)`, without dropout."""
    state: TrainState
    """Shapes, dtypes and shardings of the state, to restore a checkpoint into or to trace with."""
    mesh: Mesh
    attention: str = ""
    """The kernel that computes attention, for a message; empty if nobody chose one."""
    exchange: str = ""
    """How gradients are exchanged, for a message; empty where they are not."""
    device_memory: int | None = None
    """The bytes of a device's memory; None: unknown."""
    smaller: "Callable[[], ShardedStep] | None" = None
    """Makes the same step with parameters gathered layer by layer, which takes less memory, if they
    are gathered once a step unasked."""

    def compile(
        self, batch: dict[str, jax.ShapeDtypeStruct]
    ) -> "tuple[ShardedStep, jax.stages.Compiled]":
        """Compiles the step, or the `smaller` one if it does not fit into memory.

        All processes compile together.

        Args:
            batch: the global batch, each array with its sharding.

        Returns:
            The step that was compiled, and the program.
        """
        if self.smaller is None:
            return self, self.trace(batch).lower().compile()
        program = failure = None
        try:
            program = self.trace(batch).lower().compile()
        except Exception as error:
            failure = error
        # Programs of different exchanges would wait for each other.
        fits_here = program is not None and self._fits(program)
        fits_everywhere = not greatest_everywhere(not fits_here)
        if failure is not None and not is_out_of_memory(failure):
            raise failure  # the others have heard that this process has no program
        if not fits_everywhere:
            return self.smaller().compile(batch)
        assert program is not None
        return self, program

    def _fits(self, program: jax.stages.Compiled) -> bool:
        """Returns whether a program fits; the compiler for TPUs accepts no other."""
        memory = program.memory_analysis()
        accepted = self.mesh.devices.flat[0].platform == "tpu"
        assert self.device_memory is not None
        return accepted or memory is None or peak_bytes(memory) <= self.device_memory

    def trace(self, batch: dict[str, jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        """Traces the step with shapes only, to be compiled for devices that need not be at hand.

        Args:
            batch: the global batch, each array with its sharding.
        """
        return self.step.trace(self.state, batch, jax.eval_shape(lambda: run_keys(0)[1]))


def make_sharded_step(
    model: Model,
    objective: Objective,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    num_micro_batches: int = 1,
    adapter: LoRA | None = None,
    gather: Gather = "layer",
    device_memory: int | None = None,
) -> ShardedStep:
    """Makes the train step of a model over a mesh of devices, as `train.train` takes it.

    Parameters, and the moments of the optimizer with them, are sharded over the mesh axes
    `fsdp` and `tensor`; a batch over `data` and `fsdp`, its tokens over `context`. Whatever the
    mesh, the step computes what `make_train_step` computes on one device.

    Example::

        mesh = train.make_mesh(train.MeshConfig(data=1, fsdp=8))
        sharded = train.make_sharded_step(model, train.CAUSAL, optax.adamw(1e-4), mesh)
        state = sharded.init(jax.random.key(0))
        state, metrics = sharded.step(state, train.shard_batch(batch, mesh), jax.random.key(1))

    Args:
        model: a model of flaxzoo, from `models.create`.
        objective: what is learned. If it has a `reference`, the state gets a frozen copy of the
          initial parameters.
        tx: the optimizer.
        mesh: from `make_mesh`; its devices need not be at hand.
        num_micro_batches: the number of equal parts that a batch is processed in, to save memory.
        adapter: the adapters that are trained to a frozen model, from `models.make_lora`.
        gather: when the parameters that are sharded over `fsdp` are gathered, as in `TrainConfig`.
        device_memory: the bytes of a device's memory, for `gather="auto"`; None: unknown.

    Raises:
        UserError: the parameters cannot be divided over the mesh, or `gather="step"` is not for
          the mesh or the objective.
    """
    apply_fn = shard_map_attention(over_mesh(model.apply, mesh, model.config), mesh)
    init = make_init(model, objective, tx, adapter)
    shapes = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    shardings = state_shardings(shapes, mesh, model.config)
    replicated = NamedSharding(mesh, PartitionSpec())
    exchange = Exchange()
    if mesh.size > 1:
        apply_fn = reading(apply_fn)
        exchange = choose_exchange(
            gather,
            mesh,
            state=shapes,
            state_bytes=bytes_per_device(with_shardings(shapes, shardings)),
            shardings=shardings,
            whole_batch=objective.whole_batch,
            micro_batches=num_micro_batches,
            execution=model.execution,
            device_memory=device_memory,
            has_adapter=adapter is not None,
        )

    def by_layer() -> ShardedStep:
        made = make_sharded_step(
            model,
            objective,
            tx,
            mesh,
            num_micro_batches=num_micro_batches,
            adapter=adapter,
            gather="layer",
        )
        told = f"{made.exchange} (gathered once a step they do not fit)"
        return dataclasses.replace(made, exchange=told)

    step = make_train_step(
        apply_fn,
        objective,
        tx,
        num_micro_batches=num_micro_batches,
        adapter=adapter,
        exchange=exchange.wrap,
    )
    step = _on_mesh(step, mesh)
    return ShardedStep(
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(
            step,
            in_shardings=(shardings, None, replicated),  # a batch keeps the shardings it has
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ),
        evaluate=jax.jit(
            _on_mesh(make_evaluate_fn(apply_fn, objective, adapter=adapter), mesh),
            in_shardings=(shardings.params, None, shardings.frozen),
            out_shardings=replicated,  # each process computes metrics from all predictions
        ),
        state=with_shardings(shapes, shardings),
        mesh=mesh,
        exchange=exchange.description,
        device_memory=device_memory,
        smaller=by_layer if exchange.is_default else None,
    )


def make_init(
    model: Model,
    objective: Objective,
    tx: optax.GradientTransformation,
    adapter: LoRA | None = None,
) -> Callable[[Key[Array, ""]], TrainState]:
    """Makes the function from a key to the state before the first step.

    An objective with a `reference`, or that `keeps_initial` parameters, gets a frozen copy of them;
    with an adapter the initial parameters are frozen.
    """

    def init(rng: Key[Array, ""]) -> TrainState:
        params = init_params(model, rng)
        kept = objective.reference or objective.keeps_initial
        if adapter is not None:
            trained, frozen = adapter.init(rng, params, keep_initial=kept)
            return init_state(trained, tx, frozen)
        return init_state(params, tx, frozen=params if kept else None)

    return init


def _on_mesh(function: Callable[P, T], mesh: Mesh) -> Callable[P, T]:
    """Returns the function traced with `mesh` as jax's current mesh, which the loss looks up."""

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Returns `jax.ShapeDtypeStruct`s that have both shape and sharding."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def configured_step(
    config: TrainConfig, objective: Objective, mesh: Mesh, device_memory: int | None = None
) -> ShardedStep:
    """Makes the train step of a run over a mesh, with the attention kernel that suits its devices.

    Args:
        config: the run.
        objective: what is learned.
        mesh: from `make_mesh`; its devices need not be at hand.
        device_memory: the bytes of a device's memory; None: unknown.

    Raises:
        UserError: mesh, batch and parameters do not fit each other.
    """
    chosen = choose_kernel(config, mesh.devices.flat[0], mesh.shape[CONTEXT])
    config = with_kernel(config, chosen.kernel)
    if mesh.shape["expert"] > 1 and not config.model.num_experts:
        raise UserError(
            f"mesh.expert {mesh.shape['expert']} shards the experts of a mixture, and the model "
            "has none: use mesh.fsdp"
        )
    check_batch(mesh, config.batch_size, config.data.length, config.micro_batches)
    model = create(config.model, config.execution)
    sharded = make_sharded_step(
        model,
        objective,
        make_optimizer(config.optimizer, config.steps, config.model),
        mesh,
        num_micro_batches=config.micro_batches,
        adapter=None if config.lora is None else make_lora(config.lora, model),
        gather=config.gather,
        device_memory=device_memory,
    )
    return dataclasses.replace(sharded, attention=chosen.description)


@dataclasses.dataclass(frozen=True)
class CompiledTrainer:
    """The functions of a run on the devices: all that the training loop knows of them."""

    init: Callable[[], TrainState]
    """Makes the state before the first step."""
    step: Callable[[TrainState, NumpyBatch], tuple[TrainState, Metrics]]
    """Takes one step; the state that it is given is consumed."""
    lower: Callable[[TrainState, NumpyBatch], jax.stages.Lowered]
    """The step lowered for these arguments; once that is compiled, `step` does not compile."""
    compile: Callable[[BatchShapes], tuple[jax.stages.Compiled, str]]
    """Compiles the step for batches of these shapes, so that `step` does not; needs no state. Also
    returns what was changed to make it fit, for a message, or an empty string."""
    evaluate: Callable[[TrainState, NumpyBatch], tuple[Terms, Terms, Predictions]]
    """Sums, counts and predictions of a batch, without dropout."""
    to_global: Callable[[TrainState], TrainState]
    """The state in the form in which checkpoints hold it, which is the same for all trainers."""
    from_global: Callable[[TrainState], TrainState]
    """The inverse of `to_global`."""
    shapes: TrainState
    """Shapes, dtypes and shardings of the global form, to restore into."""
    description: str
    """The devices, for a message."""
    memory_summary: str
    """The size of a step on each device, for a message."""
    shard: tuple[int, int] = (0, 1)
    """The index of this process's part of each batch, and the number of parts."""
    validation: Objective | None = None
    """How the terms of an evaluation make up its loss, if not as in training."""


def run_keys(seed: int) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Returns the keys of a run: for its initial parameters, and for its steps."""
    # The implementation is named: a run must not depend on what jax is configured to use.
    init_rng, step_rng = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    return init_rng, step_rng


def check_devices(config: TrainConfig) -> None:
    """Checks the mesh against the devices, which costs nothing, before data are read.

    Raises:
        UserError: the sizes of the mesh do not multiply to the number of devices.
    """
    if config.parallel == "jit":
        make_mesh(config.mesh)


def compile_trainer(config: TrainConfig, objective: Objective) -> CompiledTrainer:
    """Makes the functions of a run for the devices at hand.

    Raises:
        UserError: mesh, batch and parameters do not fit each other.
    """
    if config.parallel == "pmap":
        from .pmap import compile_with_pmap

        return compile_with_pmap(config, objective)
    return trainer_of(config, step_of_run(config, objective))


def step_of_run(config: TrainConfig, objective: Objective) -> ShardedStep:
    """Makes the train step of a run over the mesh of its configuration; see `configured_step`."""
    mesh = make_mesh(config.mesh)
    return configured_step(config, objective, mesh, memory_of_each())


def trainer_of(config: TrainConfig, sharded: ShardedStep) -> CompiledTrainer:
    """Returns the functions of a run whose step is that of a mesh."""
    mesh, (init_rng, step_rng) = sharded.mesh, run_keys(config.seed)
    chosen = [sharded]  # a smaller one takes its place if it does not fit

    def place(batch: NumpyBatch) -> Batch:
        return shard_batch(batch, mesh)

    def compile_step(batch: BatchShapes) -> tuple[jax.stages.Compiled, str]:
        shardings = {name: batch_sharding(mesh, x.shape) for name, x in batch.items()}
        chosen[0], program = sharded.compile(with_shardings(batch, shardings))
        return program, "" if chosen[0] is sharded else chosen[0].exchange

    return CompiledTrainer(
        init=lambda: sharded.init(init_rng),
        step=lambda state, batch: chosen[0].step(state, place(batch), step_rng),
        lower=lambda state, batch: chosen[0].step.lower(state, place(batch), step_rng),
        compile=compile_step,
        evaluate=lambda state, batch: sharded.evaluate(state.params, place(batch), state.frozen),
        to_global=lambda state: state,
        from_global=lambda state: state,
        shapes=sharded.state,
        description=_describe(mesh),
        memory_summary=memory_summary(
            config, sharded.state, num_batch_shards(mesh), _settings(sharded)
        ),
        shard=process_shard(mesh),
    )


def _settings(sharded: ShardedStep) -> str:
    return "; ".join(one for one in (sharded.attention, sharded.exchange) if one)


def _describe(mesh: Mesh) -> str:
    # Few models have experts.
    shown = {name: size for name, size in mesh.shape.items() if name != "expert" or size > 1}
    axes = ", ".join(f"{name} {size}" for name, size in shown.items())
    number = jax.process_count()
    of = f" of {number} processes" if number > 1 else ""
    return f"jit over {mesh.size} × {mesh.devices.flat[0].device_kind}{of} ({axes})"
