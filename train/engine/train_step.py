"""The one train step: knows neither the model, nor the objective, nor the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ...models.nn.dropout import row_keys
from ...models.nn.typing import Array, Key
from ..objectives.objectives import Batch, Objective, Terms
from ..state import Metrics, StepFn, TrainState


def make_train_step(
    apply_fn: Callable[..., Any],
    objective: Objective,
    tx: optax.GradientTransformation,
    *,
    num_micro_batches: int = 1,
    axis_name: str | None = None,
) -> StepFn:
    """Makes `step(state, batch, rng) -> (state, metrics)`, to be compiled by the caller.

    Args:
      apply_fn: `apply_fn({"params": params}, rng=…, **inputs)`.
      objective: what is learned.
      tx: the optimizer.
      num_micro_batches: into how many parts the batch is cut, one after the
        other, to save memory; the result is that of the whole batch.
      axis_name: the mapped axis under pmap, whose sums make the batch global.

    Returns:
      The step. `rng` is the run's key, from which the step's own is derived
      by the step number. Metrics: `loss`, its terms, `gradient_norm`. A step whose
      loss or gradient is not finite is skipped: it counts, and changes nothing else.
    """

    def total(tree: Any) -> Any:
        return tree if axis_name is None else jax.lax.psum(tree, axis_name)

    def step(state: TrainState, batch: Batch, rng: Key[Array, ""]) -> tuple[TrainState, Metrics]:
        rows = next(iter(batch.values())).shape[0]
        first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * rows
        keys = row_keys(jax.random.fold_in(rng, state.step), rows, first)
        counts = total(objective.counts(batch))

        def loss_fn(params: Any, batch: Batch, keys: Array) -> tuple[Array, Terms]:
            outputs = apply_fn({"params": params}, rng=keys, **objective.inputs(batch))
            means = divide(objective.terms(outputs, batch), counts)
            return weigh(means, objective), means

        gradient_fn = jax.grad(loss_fn, has_aux=True)
        if num_micro_batches == 1:
            gradients, means = gradient_fn(state.params, batch, keys)
        else:
            micro = micro_batches((batch, keys), num_micro_batches)
            gradients, means = accumulate(gradient_fn, state.params, micro)
        gradients, means = total((gradients, means))
        loss, norm = weigh(means, objective), optax.tree.norm(gradients)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        params, opt_state = select(finite, (params, opt_state), (state.params, state.opt_state))
        metrics = {"loss": loss, **means, "gradient_norm": norm}
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


def select(condition: Array, one: Any, other: Any) -> Any:
    """`one` where the scalar `condition` holds, `other` where it does not: two trees alike."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)


def divide(sums: Terms, counts: Terms) -> Terms:
    """Each term's mean; 0 where a batch has nothing of a term."""
    return {name: sums[name] / jnp.maximum(counts[name], 1) for name in sums}


def weigh(means: Terms, objective: Objective) -> Array:
    """Σ coefficient · mean."""
    return sum((c * means[name] for name, c in objective.coefficients.items()), jnp.float32(0))


def micro_batches(tree: Any, number: int) -> Any:
    """Cuts `[B, …]` into `[number, B / number, …]`.

    Row r goes to part r mod `number`, so that each part of a batch that is
    spread over devices has rows of every device.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, number, *x.shape[1:]), 1, 0), tree)


def accumulate(gradient_fn: Callable[..., Any], params: Any, micro: Any) -> Any:
    """Sums `gradient_fn(params, *part)` over the leading axis of `micro`."""

    def body(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient_fn(params, *part)), None

    shapes = jax.eval_shape(gradient_fn, params, *jax.tree.map(lambda x: x[0], micro))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zeros, micro)[0]
