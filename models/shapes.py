"""Shapes of a model's parameters, without making any."""

from typing import Any

import jax
import jax.numpy as jnp


def parameter_shapes(model: Any) -> Any:
    """The tree of parameters that `model.init` would make, as `jax.ShapeDtypeStruct`s."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), input_ids=ids)["params"]
