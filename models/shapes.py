"""A model's parameters: their initial values, or their shapes alone."""

from typing import Any

import jax
from jaxtyping import Array, Key

from .config import smallest_inputs


def init_params(model: Any, rng: Key[Array, ""]) -> Any:
    """Initial parameters of any model, a plain nested dict.

    `params = init_params(model, jax.random.key(0))`; under `jax.jit` only the
    parameters are computed.
    """
    return model.init(rng, **smallest_inputs(model.config))["params"]


def parameter_shapes(model: Any) -> Any:
    """The tree of parameters that `init_params` would make, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda rng: init_params(model, rng), jax.random.key(0))
