"""The exponential moving average (EMA) of the parameters, as an optimizer's last transformation.

The average is part of the optimizer's state. Therefore it is sharded and restored like a moment,
and a skipped step does not change it. A checkpoint stores the average in a separate subfolder, with
the same tree structure as the parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...models.nn.typing import Params, PyTree
from ..losses.objective import split
from ..state import TrainState


class ParameterEma(NamedTuple):
    """The state of `parameter_ema`."""

    ema: PyTree


def parameter_ema(decay: float) -> optax.GradientTransformation:
    """Updates the average to decay · ema + (1 - decay) · parameters; the updates are unchanged.

    The average starts at the initial parameters, so that it needs no bias correction (Polyak &
    Juditsky 1992 average uniformly; Morales-Brotons et al. 2024 compare decays).
    """

    def init(params: PyTree) -> ParameterEma:
        # Copy the parameters, because a step donates its state, which must not contain a buffer
        # twice.
        return ParameterEma(jax.tree.map(jnp.array, params))

    def update(
        updates: PyTree, state: ParameterEma, params: PyTree | None = None
    ) -> tuple[PyTree, ParameterEma]:
        # This is the optimizer's last transformation, so it gets the final updates.
        new = optax.apply_updates(params, updates)  # pyright: ignore[reportArgumentType]
        ema = jax.tree.map(lambda old, x: decay * old + (1 - decay) * x, state.ema, new)
        return updates, ParameterEma(ema)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def ema_of(opt_state: optax.OptState) -> Params | None:
    """Returns the averaged parameters in an optimizer state, or None if the state has none."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_ema)
    return next((x.ema for x in leaves if _is_ema(x)), None)


def with_ema(opt_state: optax.OptState, ema: PyTree) -> optax.OptState:
    """Replaces the averaged parameters in an optimizer state, if they exist."""
    return map_ema(lambda _: ema, opt_state)


def map_ema(function: Callable[[Params], Params], opt_state: optax.OptState) -> optax.OptState:
    """Applies `function` to the averaged parameters in an optimizer state, if they exist."""
    return jax.tree.map(
        lambda x: ParameterEma(function(x.ema)) if _is_ema(x) else x, opt_state, is_leaf=_is_ema
    )


def evaluated_by_ema(state: TrainState) -> TrainState | None:
    """Returns a train state with the averaged parameters, or None without an average."""
    ema = ema_of(state.opt_state)
    if ema is None:
        return None
    # The average is a single tree for all trained models, so separate the auxiliary models again.
    params, auxiliary = split(ema)
    return dataclasses.replace(state, params=params, auxiliary=auxiliary or None)


def _is_ema(x: object) -> bool:
    return isinstance(x, ParameterEma)
