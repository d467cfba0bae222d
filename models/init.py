"""Initial parameters of a model, or only their shapes."""

import functools
from typing import Any

import flax.linen as nn
import jax

from .nn.typing import Array, Key, Params
from .registry import smallest_inputs


def init_params(model: Any, rng: Key[Array, ""]) -> Params:
    """Returns the initial parameters of a model, a nested dict of arrays.

    `params = init_params(model, jax.random.key(0))`; under `jax.jit` only the parameters are
    computed.
    """
    return model.init(rng, **smallest_inputs(model.config))["params"]


def parameter_shapes(model: nn.Module) -> Params:
    """Returns the tree that `init_params` would return, with `jax.ShapeDtypeStruct` leaves."""
    return jax.tree.map(lambda x: x, _traced_shapes(model))  # a copy, which callers may change


@functools.lru_cache(maxsize=32)
def _traced_shapes(model: nn.Module) -> Params:
    """Caches the shapes: tracing a model takes as long as reading a hundred megabytes."""
    rng = jax.eval_shape(jax.random.key, 0)  # only its shape: a real key would compile a program
    return jax.eval_shape(lambda rng: init_params(model, rng), rng)
