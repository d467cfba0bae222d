"""The train step, which works for any model, objective and mesh."""

from collections.abc import Callable
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import optax

from ...models.adapters.lora import LoRA
from ...models.nn.dropout import row_keys
from ...models.nn.typing import Array, Key, Params
from ..distributed.fsdp import GradientFn
from ..losses.micro_batches import accumulate, micro_batches
from ..losses.objective import ApplyFn, Batch, Objective, Outputs, Terms, joined, split
from ..optim.ema import map_ema
from ..state import Metrics, StepFn, TrainState
from .grad_cache import OUTPUTS, Rows, cached_gradient


def make_train_step(
    apply_fn: ApplyFn,
    objective: Objective,
    tx: optax.GradientTransformation,
    *,
    num_micro_batches: int = 1,
    adapter: LoRA | None = None,
    exchange: Callable[[GradientFn], GradientFn] | None = None,
) -> StepFn:
    """Makes the function `step(state, batch, rng) -> (state, metrics)`, which the caller compiles.

    Args:
        apply_fn: `apply_fn({"params": params}, rng=…, **inputs)`.
        objective: the training objective.
        tx: the optimizer.
        num_micro_batches: the number of equal parts of a batch, processed sequentially to save
          memory. The gradients are the same as without micro-batches. For an objective that needs
          the whole batch, the step runs the model twice (`grad_cache`).
        adapter: the adapters to train, from `models.make_lora`. The train state then holds the
          results of `LoRA.init`: `params` has the trained parameters, such as the adapters, and
          `frozen` has the base model. A `reference` is the base model without adapters.
        exchange: wraps the function that sums gradients over the rows of a batch, so that it also
          sums over devices; from `distributed.fsdp`. If None, the compiler sums over devices.

    Returns:
        The step. `rng` is the key of the run; each step derives a key from this key and the step
        number. The metrics are `loss`, each term of the loss, and `gradient_norm`. A step whose
        loss or gradient is not finite is skipped: it only increments the step number.

    Raises:
        UserError: the objective needs the whole batch, but its outputs do not have a row for each
          example. This error is raised when the step is traced with several micro-batches.
    """
    if adapter is not None:
        apply_fn = adapter.adapt(apply_fn)

    def step(state: TrainState, batch: Batch, rng: Key[Array, ""]) -> tuple[TrainState, Metrics]:
        num_examples = next(iter(batch.values())).shape[0]
        trained = joined(state.params, state.auxiliary)
        # Derive the dropout key of each example [B] from its index in the global batch.
        keys = row_keys(jax.random.fold_in(rng, state.step), num_examples)
        # Compute the counts before the batch is split, so that the loss does not depend on the
        # split.
        counts = objective.checked_counts(batch)
        scales = counts, objective.weights(state.step)
        rows = batch, keys

        def run(params: Params, frozen: Params | None, rows: Rows) -> Outputs:
            batch, keys = rows
            if adapter is not None:
                params, frozen = adapter.combine(params, frozen)
            return objective.all_outputs(apply_fn, params, batch, frozen=frozen, rng=keys)

        def loss_of(
            outputs: Outputs, batch: Batch, scales: tuple[Terms, Terms]
        ) -> tuple[Array, Terms]:
            counts, weights = scales
            sums = objective.sums(outputs, batch)
            objective.check_counted(sums, counts)
            # Divide the sums of a micro-batch by the counts of the whole batch, so that the results
            # of all micro-batches add up to the mean over the batch.
            means = divide(sums, counts)
            return weigh(means, weights), means

        def sums_of_rows(
            params: Params, frozen: Params | None, scales: tuple[Terms, Terms], rows: Rows
        ) -> tuple[Params, Terms]:
            def loss_fn(params: Params, rows: Rows) -> tuple[Array, Terms]:
                outputs = run(params, frozen, rows)
                with jax.named_scope(OUTPUTS) if objective.whole_batch else nullcontext():
                    return loss_of(outputs, rows[0], scales)

            gradient_fn = jax.grad(loss_fn, has_aux=True)
            if num_micro_batches == 1:
                return gradient_fn(params, rows)

            def of_part(part: Rows) -> tuple[Params, Terms]:
                gradients, means = gradient_fn(params, part)
                # The exchange may have gathered parameters in the compute dtype.
                return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, trained), means

            return accumulate(of_part, micro_batches(rows, num_micro_batches))

        # Sum gradients over micro-batches and devices.
        if objective.whole_batch and num_micro_batches > 1:
            gradients, means = cached_gradient(
                run,
                lambda outputs: loss_of(outputs, batch, scales),
                (trained, state.frozen),
                rows,
                num_micro_batches=num_micro_batches,
                exchange=exchange,
            )
        else:
            summed = sums_of_rows if exchange is None else exchange(sums_of_rows)
            gradients, means = summed(trained, state.frozen, scales, rows)
        loss, norm = weigh(means, scales[1]), optax.tree.norm(gradients)

        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        trained, opt_state = update_if(
            finite, trained, state.opt_state, gradients, objective=objective, tx=tx
        )
        params, auxiliary = split(trained)
        metrics = {"loss": loss, **means, "gradient_norm": norm}
        return TrainState(
            state.step + 1, params, opt_state, state.frozen, auxiliary or None
        ), metrics

    return step


def update_if(
    finite: Array,
    params: Params,
    opt_state: optax.OptState,
    gradients: Params,
    *,
    objective: Objective,
    tx: optax.GradientTransformation,
) -> tuple[Params, optax.OptState]:
    """Updates parameters and optimizer state, or returns them unchanged if `finite` is false."""

    def update(params: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
        # The optimizer updates the learned differences of shared embeddings, but the moving average
        # is stored for the embeddings themselves.
        opt_state = map_ema(objective.differences, opt_state)
        updates, opt_state = tx.update(gradients, opt_state, objective.differences(params))
        opt_state = map_ema(objective.followed, opt_state)
        followed = objective.followed(updates)  # pyright: ignore[reportArgumentType]
        return optax.apply_updates(params, followed), opt_state  # pyright: ignore[reportReturnType]

    def keep(params: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
        return params, opt_state

    # `cond` updates in place. A `where` would keep both the old and the new state in memory, which
    # takes 1,743 instead of 1,112 MiB for GPT-2 (tests/benchmarks/ledger.py).
    return jax.lax.cond(finite, update, keep, params, opt_state)


def divide(sums: Terms, counts: Terms) -> Terms:
    """Returns the mean of each term; a term without items in the batch has the mean 0."""
    return {name: sums[name] / jnp.maximum(counts[name], 1) for name in sums}


def weigh(means: Terms, weights: Terms) -> Array:
    """Returns the loss, Σ weight · mean."""
    return sum((weight * means[name] for name, weight in weights.items()), jnp.float32(0))
