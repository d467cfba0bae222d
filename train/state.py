"""The state that a train step takes and returns."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ..models.nn.typing import Array, Key, Params, PyTree


@struct.dataclass
class TrainState:
    """All that a run carries from step to step: arrays, or their shapes or shardings."""

    step: PyTree
    """The number of steps taken, int32[]."""
    params: Params
    opt_state: optax.OptState
    frozen: Params | None = None
    """Parameters that no step changes: the reference of an objective, the base to which adapters
    are trained, or under `further` further models of the objective; None for others."""
    further: Params | None = None
    """Parameters of further models that an objective trains, by name; None for others."""


Metrics = dict[str, Array]
StepFn = Callable[[TrainState, Mapping[str, Array], Key[Array, ""]], tuple[TrainState, Metrics]]


def init_state(
    params: Params,
    tx: optax.GradientTransformation,
    frozen: Params | None = None,
    further: Params | None = None,
) -> TrainState:
    """Returns the state before the first step.

    Args:
        params: the parameters to train.
        tx: the optimizer.
        frozen: parameters for an objective with a `reference`. They must not share arrays with
          `params` when a compiled step consumes its state.
        further: parameters of further models that the objective trains; see
          `Objective.initial_models`.
    """
    trained = params if further is None else {**params, "further": further}
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(trained), frozen, further)


def count_parameters(params: Params) -> int:
    """Counts the numbers in `params`, which are arrays or their shapes."""
    return sum(x.size for x in jax.tree.leaves(params))
