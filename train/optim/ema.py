"""The exponential moving average (EMA) of the parameters, as the last part of an optimizer.

The average is part of the optimizer's state, and therefore sharded, skipped and resumed like a
moment. A checkpoint stores the average as a separate part in the form of the parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...models.nn.typing import Params, PyTree
from ..state import TrainState


class ParameterEma(NamedTuple):
    """The state of `parameter_ema`."""

    ema: PyTree


def parameter_ema(decay: float) -> optax.GradientTransformation:
    """Keeps decay · ema + (1 - decay) · parameters after each update, and changes no update.

    The average starts at the initial parameters, so that it needs no bias correction (Polyak &
    Juditsky 1992 average uniformly; Morales-Brotons et al. 2024 compare decays).
    """

    def init(params: PyTree) -> ParameterEma:
        # Copy the parameters: a step donates its state, which must not have a buffer twice.
        return ParameterEma(jax.tree.map(jnp.array, params))

    def update(
        updates: PyTree, state: ParameterEma, params: PyTree | None = None
    ) -> tuple[PyTree, ParameterEma]:
        # This transformation is the last part of an optimizer, so it gets the final updates.
        new = optax.apply_updates(params, updates)  # pyright: ignore[reportArgumentType]
        ema = jax.tree.map(lambda old, x: decay * old + (1 - decay) * x, state.ema, new)
        return updates, ParameterEma(ema)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def ema_of(opt_state: optax.OptState) -> Params | None:
    """Returns the average in the state of an optimizer, or None if the state has no average."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_ema)
    return next((x.ema for x in leaves if _is_ema(x)), None)


def with_ema(opt_state: optax.OptState, ema: PyTree) -> optax.OptState:
    """Returns the state of an optimizer with another average, if the state has an average."""
    return jax.tree.map(
        lambda x: ParameterEma(ema) if _is_ema(x) else x, opt_state, is_leaf=_is_ema
    )


def map_ema(function: Callable[[Params], Params], opt_state: optax.OptState) -> optax.OptState:
    """Returns the state of an optimizer with `function` applied to its average, if any."""
    ema = ema_of(opt_state)
    return opt_state if ema is None else with_ema(opt_state, function(ema))


def evaluated_by_ema(state: TrainState) -> TrainState | None:
    """Returns a state with the average as its parameters, or None without an average."""
    ema = ema_of(state.opt_state)
    if ema is None:
        return None
    # The average is one tree of all trained models, like the parameters that the optimizer gets.
    further = ema.get("further")
    params = {name: x for name, x in ema.items() if name != "further"}
    return dataclasses.replace(state, params=params, further=further)


def _is_ema(x: object) -> bool:
    return isinstance(x, ParameterEma)
