"""The train step, compiled by `jit` over a mesh of the current devices."""

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
from ...models.mesh_axes import CONTEXT
from ...models.model import Model
from ...models.nn.typing import Array, Key, PyTree
from ...models.registry import create
from ..config import Gather, Parallel, TrainConfig
from ..distributed.activations import shard_map_attention
from ..distributed.attention_backend import choose_kernel, with_kernel
from ..distributed.expert_parallel import over_mesh
from ..distributed.fsdp import Exchange, choose_exchanges, reading
from ..distributed.multiprocess import greatest_everywhere
from ..distributed.pmap import check_pmap, pmap_exchange
from ..distributed.sharding import (
    batch_sharding,
    check_batch,
    make_mesh,
    num_batch_shards,
    process_shard,
    shard_batch,
    state_shardings,
)
from ..losses.eval_step import make_evaluate_fn
from ..losses.objective import Batch, Objective, Predictions, Terms, joined
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
class Candidate:
    """One way to run a step."""

    step: jax.stages.Wrapped
    """`step(state, batch, rng) -> (state, metrics)`; it consumes its state."""
    exchange: str
    """How gradients are exchanged, for a message; empty if they are not."""


@dataclasses.dataclass(frozen=True)
class ShardedStep:
    """The train step, initialization and evaluation over a mesh, compiled at their first call."""

    init: Callable[[Key[Array, ""]], TrainState]
    """Makes the sharded initial state from a key."""
    candidates: tuple[Candidate, ...]
    """Equivalent ways to run the step. Each needs less memory than the previous one, and takes
    longer."""
    evaluate: jax.stages.Wrapped
    """`evaluate(params, batch, frozen) -> (sums, counts, predictions)`, without dropout."""
    state: TrainState
    """Shapes, dtypes and shardings of the state, to restore a checkpoint into or to trace with."""
    mesh: Mesh
    attention: str = ""
    """The attention kernel, for a message; empty if none was chosen."""
    device_memory: int | None = None
    """The memory of a device in bytes; None if unknown."""

    @property
    def step(self) -> jax.stages.Wrapped:
        """The step of the first candidate."""
        return self.candidates[0].step

    @property
    def exchange(self) -> str:
        """The exchange of the first candidate."""
        return self.candidates[0].exchange

    def compile(
        self, batch: dict[str, jax.ShapeDtypeStruct]
    ) -> "tuple[ShardedStep, jax.stages.Compiled]":
        """Compiles the first candidate that fits into memory, or the last one.

        All processes compile together and choose the same candidate.

        Args:
            batch: the global batch, each array with its sharding.

        Returns:
            The step with that candidate only, and the program.
        """
        *larger, smallest = (dataclasses.replace(self, candidates=(c,)) for c in self.candidates)
        for step in larger:
            program = step._compile_if_it_fits(batch)
            if program is not None:
                return step, program
        # The last one is not checked here: `check_step_fits` reports if it does not fit.
        return smallest, smallest.trace(batch).lower().compile()

    def change_from(self, other: "ShardedStep") -> str:
        """Describes what `compile` changed to make a step fit, or returns an empty string."""
        return "" if self.exchange == other.exchange else self.exchange

    def _compile_if_it_fits(
        self, batch: dict[str, jax.ShapeDtypeStruct]
    ) -> jax.stages.Compiled | None:
        """Returns the program, or None if it does not fit on a device of any process."""
        program = failure = None
        try:
            program = self.trace(batch).lower().compile()
        except Exception as error:
            failure = error
        # Programs with different exchanges would deadlock, so all processes agree before one raises
        # its error.
        fits = program is not None and self._fits(program)
        fits_everywhere = not greatest_everywhere(not fits)
        if failure is not None and not is_out_of_memory(failure):
            raise failure
        return program if fits_everywhere else None

    def _fits(self, program: jax.stages.Compiled) -> bool:
        """Returns whether a program fits; the TPU compiler rejects programs that do not."""
        memory = program.memory_analysis()
        accepted = self.mesh.devices.flat[0].platform == "tpu"
        assert self.device_memory is not None
        return accepted or memory is None or peak_bytes(memory) <= self.device_memory

    def trace(self, batch: dict[str, jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        """Traces the first candidate with shapes only; its devices need not be present.

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
    parallel: Parallel = "jit",
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
        mesh: from `make_mesh`; its devices need not be present.
        num_micro_batches: the number of sequential parts of a batch, to save memory.
        adapter: the adapters to train on a frozen model, from `models.make_lora`.
        gather: when parameters that are sharded over `fsdp` are gathered; see `TrainConfig`.
        parallel: "pmap" computes gradients by `pmap` over the devices of the mesh, which has only
            the axis `data`.
        device_memory: the memory of a device in bytes, for `gather="auto"`; None if unknown.

    Raises:
        UserError: the parameters cannot be divided over the mesh, or `gather="step"` does not
          support the mesh or the objective.
    """
    apply_fn = shard_map_attention(over_mesh(model.apply, mesh, model.config), mesh)
    init = make_init(model, objective, tx, adapter)
    # Shapes alone give shardings and memory, so large states are never made on one device.
    shapes = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    shardings = state_shardings(shapes, mesh, model.config)
    replicated = NamedSharding(mesh, PartitionSpec())

    # Choose the ways to exchange parameters and gradients over the devices.
    if parallel == "pmap":
        trained_fn = model.apply  # in pmap a model runs on one device
        exchanges = (pmap_exchange(mesh, whole_batch=objective.whole_batch),)
    elif mesh.size == 1:
        trained_fn, exchanges = apply_fn, (Exchange(),)
    else:
        trained_fn = reading(apply_fn)
        exchanges = choose_exchanges(
            gather,
            mesh,
            state=shapes,
            state_bytes=bytes_per_device(with_shardings(shapes, shardings)),
            shardings=shardings,
            # Further models are not sharded: the compiler places them.
            whole_batch=objective.whole_batch or bool(objective.models),
            micro_batches=num_micro_batches,
            execution=model.execution,
            device_memory=device_memory,
            has_adapter=adapter is not None,
        )

    def candidate(exchange: Exchange) -> Candidate:
        step = make_train_step(
            trained_fn,
            objective,
            tx,
            num_micro_batches=num_micro_batches,
            adapter=adapter,
            exchange=exchange.wrap,
        )
        # Donate the state, so that the old and the new state share memory.
        compiled = jax.jit(
            _on_mesh(step, mesh),
            in_shardings=(shardings, None, replicated),  # None: the batch keeps its shardings
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )
        return Candidate(compiled, exchange.description)

    return ShardedStep(
        init=jax.jit(init, out_shardings=shardings),
        candidates=tuple(map(candidate, exchanges)),
        evaluate=jax.jit(
            _on_mesh(make_evaluate_fn(apply_fn, objective, adapter=adapter), mesh),
            in_shardings=(joined(shardings.params, shardings.further), None, shardings.frozen),
            out_shardings=replicated,  # each process computes metrics from all predictions
        ),
        state=with_shardings(shapes, shardings),
        mesh=mesh,
        device_memory=device_memory,
    )


def make_init(
    model: Model,
    objective: Objective,
    tx: optax.GradientTransformation,
    adapter: LoRA | None = None,
) -> Callable[[Key[Array, ""]], TrainState]:
    """Makes the function that maps a key to the initial state.

    The state gets a frozen copy of the initial parameters if the objective has a `reference` or
    `keeps_initial`. With an adapter the initial parameters themselves are frozen.

    Raises:
        UserError: there is an adapter, and the objective has further models.
    """
    if objective.models and adapter is not None:
        raise UserError(f"lora cannot be given with further models ({', '.join(objective.models)})")

    def init(rng: Key[Array, ""]) -> TrainState:
        params = init_params(model, rng)
        kept = objective.reference or objective.keeps_initial
        if objective.models:
            # Derive another key, so that further models differ from the model.
            further, fixed = objective.initial_models(jax.random.fold_in(rng, 1))
            frozen = {**(params if kept else {}), **(fixed or {})} or None
            return init_state(params, tx, frozen, further)
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
    """Makes the train step of a run over a mesh, with the attention kernel for its devices.

    Args:
        config: the run.
        objective: what is learned.
        mesh: from `make_mesh`; its devices need not be present.
        device_memory: the memory of a device in bytes; None if unknown.

    Raises:
        UserError: mesh, batch and parameters do not fit each other.
    """
    check_pmap(config)
    chosen = choose_kernel(config, mesh.devices.flat[0], mesh.shape[CONTEXT])
    # From here on the configuration names the kernel, not "auto".
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
        parallel=config.parallel,
        device_memory=device_memory,
    )
    return dataclasses.replace(sharded, attention=chosen.description)


@dataclasses.dataclass(frozen=True)
class CompiledTrainer:
    """The functions of a run on the devices, the interface of the training loop to them."""

    init: Callable[[], TrainState]
    """Makes the initial state."""
    step: Callable[[TrainState, NumpyBatch], tuple[TrainState, Metrics]]
    """Takes one step; it consumes its state."""
    lower: Callable[[TrainState, NumpyBatch], jax.stages.Lowered]
    """Lowers the step for these arguments; after compiling the result `step` does not compile."""
    compile: Callable[[BatchShapes], tuple[jax.stages.Compiled, str]]
    """Compiles the step for these batch shapes, without a state, so that `step` does not compile.
    Also returns what was changed to make it fit, for a message, or an empty string."""
    evaluate: Callable[[TrainState, NumpyBatch], tuple[Terms, Terms, Predictions]]
    """Sums, counts and predictions of a batch, without dropout."""
    shapes: TrainState
    """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
    description: str
    """The devices, for a message."""
    memory_summary: str
    """The size of a step on each device, for a message."""
    shard: tuple[int, int] = (0, 1)
    """The index of this process's part of each batch, and the number of parts."""
    validation: Objective | None = None
    """How terms combine into the loss of an evaluation, if not as in training."""


def run_keys(seed: int) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Returns the keys of a run: for its initial parameters, and for its steps."""
    # Name the implementation: a run must not depend on jax's configuration.
    init_rng, step_rng = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    return init_rng, step_rng


def check_devices(config: TrainConfig) -> None:
    """Checks the mesh against the devices, which is cheap, before data are read.

    Raises:
        UserError: the sizes of the mesh do not multiply to the number of devices, or pmap does not
          support the run.
    """
    if jax.process_count() == 1:
        # Several processes check this in `make_sharded_step`, where only the first one reports.
        check_pmap(config)
    make_mesh(config.mesh)


def compile_trainer(config: TrainConfig, objective: Objective) -> CompiledTrainer:
    """Makes the functions of a run for the current devices.

    Raises:
        UserError: mesh, batch and parameters do not fit each other.
    """
    return trainer_of(config, step_of_run(config, objective))


def step_of_run(config: TrainConfig, objective: Objective) -> ShardedStep:
    """Makes the train step of a run over its configured mesh; see `configured_step`."""
    mesh = make_mesh(config.mesh)
    return configured_step(config, objective, mesh, memory_of_each())


def trainer_of(config: TrainConfig, sharded: ShardedStep) -> CompiledTrainer:
    """Returns the functions of a run, given its step over a mesh."""
    mesh, (init_rng, step_rng) = sharded.mesh, run_keys(config.seed)
    chosen = sharded

    def put(batch: NumpyBatch) -> Batch:
        return shard_batch(batch, mesh)

    def compile_step(batch: BatchShapes) -> tuple[jax.stages.Compiled, str]:
        nonlocal chosen
        # Later calls of `step` and `lower` use the candidate that fits.
        shardings = {name: batch_sharding(mesh, x.shape) for name, x in batch.items()}
        chosen, program = sharded.compile(with_shardings(batch, shardings))
        return program, chosen.change_from(sharded)

    return CompiledTrainer(
        init=lambda: sharded.init(init_rng),
        step=lambda state, batch: chosen.step(state, put(batch), step_rng),
        lower=lambda state, batch: chosen.step.lower(state, put(batch), step_rng),
        compile=compile_step,
        evaluate=lambda state, batch: sharded.evaluate(
            joined(state.params, state.further), put(batch), state.frozen
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
    number, over = jax.process_count(), f"{parallel} over {mesh.size} × "
    of = f" of {number} processes" if number > 1 else ""
    # Few models have experts; pmap has the axis `data` only, so its axes are not shown.
    shown = [name for name in mesh.shape if name != "expert" or mesh.shape[name] > 1]
    axes = f" ({', '.join(f'{name} {mesh.shape[name]}' for name in shown)})"
    return f"{over}{mesh.devices.flat[0].device_kind}{of}{axes if parallel == 'jit' else ''}"
