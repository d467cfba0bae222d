"""The train state, which each train step takes and returns."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ..models.nn.typing import Array, Key, Params, PyTree


@struct.dataclass
class TrainState:
    """The state of training between two steps, as a tree of arrays, of shapes or of shardings."""

    step: PyTree
    """The number of steps taken, int32[]."""
    params: Params
    opt_state: optax.OptState
    frozen: Params | None = None
    """Parameters that no step changes. They belong to an objective's reference model, to the base
    model of adapters or, under the key `auxiliary`, to the objective's frozen auxiliary models. If
    None, all parameters are trained."""
    auxiliary: Params | None = None
    """Parameters of auxiliary models that the objective trains, by the model's name. None if the
    objective has no such models."""


Metrics = dict[str, Array]
StepFn = Callable[[TrainState, Mapping[str, Array], Key[Array, ""]], tuple[TrainState, Metrics]]


def init_state(
    params: Params,
    tx: optax.GradientTransformation,
    frozen: Params | None = None,
    auxiliary: Params | None = None,
) -> TrainState:
    """Returns the state before the first step.

    Args:
        params: the parameters to train.
        tx: the optimizer.
        frozen: parameters of the reference model, for an objective with a `reference`. They must
          not share arrays with `params`, because a compiled step donates its state.
        auxiliary: parameters of auxiliary models that the objective trains; see
          `Objective.initial_models`.
    """
    # A single optimizer updates all trained models, so join their parameters in one tree.
    trained = params if auxiliary is None else {**params, "auxiliary": auxiliary}
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(trained), frozen, auxiliary)


def count_parameters(params: PyTree) -> int:
    """Returns the number of scalar parameters in a tree of arrays or of shapes."""
    return sum(x.size for x in jax.tree.leaves(params))


def in_units(num_bytes: int) -> str:
    """Formats a number of bytes as `61.2 GB`, `3.4 MB` or `5.6 KB`."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
    unit, size = next((x for x in units if num_bytes >= x[1]), units[-1])
    return f"{num_bytes / size:,.1f} {unit}"
