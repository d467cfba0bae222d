"""A model's parameters: their initial values, or their shapes alone."""

import functools
from typing import Any

import jax

from .nn.typing import Array, Key
from .registry import smallest_inputs


def init_params(model: Any, rng: Key[Array, ""]) -> Any:
    """Initial parameters of any model, a plain nested dict.

    `params = init_params(model, jax.random.key(0))`; under `jax.jit` only the
    parameters are computed.
    """
    return model.init(rng, **smallest_inputs(model.config))["params"]


def parameter_shapes(model: Any) -> Any:
    """The tree of parameters that `init_params` would make, as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: x, _traced_shapes(model))  # a tree of its own


@functools.lru_cache(maxsize=32)
def _traced_shapes(model: Any) -> Any:
    """Found once: to trace a model takes as long as to read a hundred megabytes."""
    rng = jax.eval_shape(jax.random.key, 0)  # not made: that would compile a program
    return jax.eval_shape(lambda rng: init_params(model, rng), rng)
