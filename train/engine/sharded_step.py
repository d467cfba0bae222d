"""The train step of a model, compiled by `jit` over a mesh of devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...data.common.fields import require
from ...models.adapters.lora import LoRA
from ...models.init import init_params
from ...models.model import Model
from ...models.nn.typing import Array, Key, PyTree
from ..config import Gather, Parallel
from ..distributed.activations import shard_map_attention
from ..distributed.expert_parallel import over_mesh
from ..distributed.fsdp import reading
from ..distributed.gradient_exchange import Exchange, choose_exchanges
from ..distributed.multiprocess import greatest_everywhere
from ..distributed.pmap import pmap_exchange
from ..distributed.sharding import batch_sharding, state_shardings
from ..losses.eval_step import make_evaluate_fn
from ..losses.objective import Objective, joined
from ..state import TrainState, init_state
from .memory_summary import BatchShapes, bytes_per_device, is_out_of_memory, peak_bytes
from .train_step import make_train_step

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One of several equivalent ways to run a step."""

    step: jax.stages.Wrapped
    """The function `step(state, batch, rng) -> (state, metrics)`, which donates the memory of
    `state`."""
    exchange: str
    """A description for the user of how devices exchange gradients; empty if they exchange none."""


@dataclasses.dataclass(frozen=True)
class ShardedStep:
    """The train step, init and evaluation over a mesh, each compiled at its first call."""

    init: Callable[[Key[Array, ""]], TrainState]
    """Makes the sharded initial state from a random key."""
    candidates: tuple[Candidate, ...]
    """Equivalent ways to run the step. Each candidate needs less memory but more time than the
    candidate before it."""
    evaluate: jax.stages.Wrapped
    """`evaluate(params, batch, frozen) -> (sums, counts, predictions)`, without dropout."""
    state: TrainState
    """The shapes, dtypes and shardings of the state, which are needed for tracing and to restore a
    checkpoint."""
    mesh: Mesh
    attention: str = ""
    """A description of the attention kernel for the user; empty if no kernel was chosen."""
    device_memory: int | None = None
    """The memory of a device in bytes; None if unknown."""

    @property
    def step(self) -> jax.stages.Wrapped:
        """The step of the first candidate."""
        return self.candidates[0].step

    @property
    def exchange(self) -> str:
        """How the devices exchange gradients in the first candidate."""
        return self.candidates[0].exchange

    def compile(self, batch: BatchShapes) -> tuple[Candidate, jax.stages.Compiled]:
        """Compiles the first candidate that fits into memory, or the last candidate if none fits.

        All processes compile together and choose the same candidate.

        Args:
            batch: the global batch, each array with its sharding.

        Returns:
            The candidate, and its compiled program.
        """
        *larger, smallest = self.candidates
        for candidate in larger:
            program = self._compile_if_it_fits(candidate, batch)
            if program is not None:
                return candidate, program
        # Do not check whether the last candidate fits, because `check_step_fits` raises an error if
        # it does not.
        return smallest, self.trace(batch, smallest).lower().compile()

    def change_to(self, chosen: Candidate) -> str:
        """Describes the changes by `compile` that made the step fit; empty if there are none."""
        return "" if chosen.exchange == self.exchange else chosen.exchange

    def _compile_if_it_fits(
        self, candidate: Candidate, batch: BatchShapes
    ) -> jax.stages.Compiled | None:
        """Returns the program, or None if it does not fit on every device of every process."""
        program = failure = None
        try:
            program = self.trace(batch, candidate).lower().compile()
        except Exception as error:
            failure = error
        # Processes that run different candidates would deadlock. Before any process raises its
        # error, all processes therefore agree on whether the candidate fits.
        fits = program is not None and self._fits(program)
        fits_everywhere = not greatest_everywhere(not fits)
        if failure is not None and not is_out_of_memory(failure):
            raise failure
        return program if fits_everywhere else None

    def _fits(self, program: jax.stages.Compiled) -> bool:
        """Returns whether a program fits into memory; on TPUs, the compiler has checked this."""
        memory = program.memory_analysis()
        accepted = self.mesh.devices.flat[0].platform == "tpu"
        assert self.device_memory is not None
        return accepted or memory is None or peak_bytes(memory) <= self.device_memory

    def trace(self, batch: BatchShapes, candidate: Candidate | None = None) -> jax.stages.Traced:
        """Traces a candidate from shapes only, so its devices need not be present.

        Args:
            batch: the global batch, each array with its sharding.
            candidate: the candidate. Defaults to the first candidate.
        """
        step = (candidate or self.candidates[0]).step
        return step.trace(self.state, batch, jax.eval_shape(lambda: run_keys(0)[1]))


def run_keys(seed: int) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Returns two keys of a run: the key of its initial parameters, and the key of its steps."""
    # Set the PRNG implementation explicitly, because a run must not depend on jax's configuration.
    init_rng, step_rng = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    return init_rng, step_rng


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
    """Makes the train step of a model over a mesh of devices, as `train.train` does.

    The parameters and the moments of the optimizer are sharded over the mesh axes `fsdp` and
    `tensor`. The examples of a batch are sharded over `data` and `fsdp`, and their tokens over
    `context`. On any mesh, the step gives the same results as `make_train_step` on one
    device.

    Example::

        mesh = train.make_mesh(train.MeshConfig(data=1, fsdp=8))
        sharded = train.make_sharded_step(model, train.CAUSAL, optax.adamw(1e-4), mesh)
        state = sharded.init(jax.random.key(0))
        state, metrics = sharded.step(state, train.shard_batch(batch, mesh), jax.random.key(1))

    Args:
        model: a model of flaxzoo, from `models.create`.
        objective: the training objective. If the objective has a `reference`, the state gets a
          frozen copy of the initial parameters.
        tx: the optimizer.
        mesh: a mesh from `make_mesh`, whose devices need not be present.
        num_micro_batches: the number of equal parts of a batch, processed sequentially to save
          memory.
        adapter: the adapters to train on a frozen model, from `models.make_lora`.
        gather: when parameters that are sharded over `fsdp` are gathered; see `TrainConfig`.
        parallel: if "pmap", gradients are computed by `pmap` over the devices of the mesh, which
            then has only the axis `data`.
        device_memory: the memory of a device in bytes, for `gather="auto"`; None if unknown.

    Raises:
        UserError: the parameters cannot be divided over the mesh, or `gather="step"` does not
          support the mesh or the objective.
    """
    apply_fn = shard_map_attention(over_mesh(model.apply, mesh, model.config), mesh)
    init = make_init(model, objective, tx, adapter)
    # Compute shardings and memory from shapes alone, so that no device stores a whole large state.
    shapes = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    shardings = state_shardings(shapes, mesh, model.config)
    state = with_shardings(shapes, shardings)
    replicated = NamedSharding(mesh, PartitionSpec())

    # Choose how the devices may exchange parameters and gradients; each way becomes a candidate.
    has_experts = model.config.num_experts > 0
    if parallel == "pmap":
        trained_fn = model.apply  # with pmap, a model runs on one device
        exchanges = (pmap_exchange(mesh, whole_batch=objective.whole_batch),)
    elif mesh.size == 1:
        trained_fn, exchanges = apply_fn, (Exchange(),)
    else:
        trained_fn = reading(apply_fn)
        exchanges = choose_exchanges(
            gather,
            mesh,
            state=shapes,
            state_bytes=bytes_per_device(state),
            shardings=shardings,
            # Auxiliary models have no shardings: the compiler places their parameters.
            whole_batch=objective.whole_batch or bool(objective.models),
            # With experts, the output of an example depends on the other examples of the batch,
            # because each expert accepts a limited number of tokens.
            by_rows=not objective.models
            and (not objective.whole_batch or (num_micro_batches > 1 and not has_experts)),
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
            _on_mesh(
                make_evaluate_fn(
                    apply_fn, objective, adapter=adapter, num_micro_batches=num_micro_batches
                ),
                mesh,
            ),
            in_shardings=(joined(shardings.params, shardings.auxiliary), None, shardings.frozen),
            out_shardings=replicated,  # each process computes metrics from all predictions
        ),
        state=state,
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

    The state gets a frozen copy of the initial parameters if the objective needs it. With an
    adapter, the initial parameters become the frozen base.

    Raises:
        UserError: `adapter` is set, but the objective has auxiliary models.
    """
    problem = f"lora does not support auxiliary models ({', '.join(objective.models)})"
    require(adapter is None or not objective.models, problem)

    def init(rng: Key[Array, ""]) -> TrainState:
        params = init_params(model, rng)
        if adapter is not None:
            trained, frozen = adapter.init(rng, params, keep_initial=objective.needs_initial)
            return init_state(trained, tx, frozen)
        # Derive a different key, so that auxiliary models start with different random parameters.
        auxiliary, fixed = objective.initial_models(jax.random.fold_in(rng, 1), params)
        kept = params if objective.needs_initial else {}
        return init_state(params, tx, {**kept, **(fixed or {})} or None, auxiliary)

    return init


def _on_mesh(function: Callable[P, T], mesh: Mesh) -> Callable[P, T]:
    """Sets jax's current mesh to `mesh` while the function is traced, because the loss reads it."""

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
    """Returns each shape as a `jax.ShapeDtypeStruct` with its sharding."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def with_batch_sharding(batch: BatchShapes, mesh: Mesh) -> BatchShapes:
    """Returns the shapes of a global batch with the sharding of each array."""
    shardings = {name: batch_sharding(mesh, x.shape) for name, x in batch.items()}
    return with_shardings(batch, shardings)
