"""Initial parameters of a model, and the shapes of these parameters."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from ..data.common.fields import require
from .model import Model
from .nn.typing import Array, Key, Params
from .registry import create, smallest_inputs


def init_params(model: Any, rng: Key[Array, ""]) -> Params:
    """Returns the initial parameters of a model as a nested dict of arrays.

    Example: `params = init_params(model, jax.random.key(0))`. The first call for a model compiles
        one program, which computes only the parameters, and not the outputs.
    """
    return _compiled_init(model, rng)


def trace_init(model: Any, rng: Key[Array, ""]) -> Params:
    """Runs a model's initialization without a cache, so that all its modules are called."""
    return model.init(rng, **smallest_inputs(model.config))["params"]


# Models with equal configurations share one compiled program. With `inline`, the operations become
# part of a surrounding program.
_compiled_init = functools.partial(jax.jit, static_argnums=0, inline=True)(trace_init)


def parameter_shapes(model: nn.Module) -> Params:
    """Returns the tree that `init_params` would return, with `jax.ShapeDtypeStruct` leaves."""
    # Copy the cached tree, so that callers may change it.
    return jax.tree.map(lambda x: x, _traced_shapes(model))


@functools.lru_cache(maxsize=32)
def _traced_shapes(model: nn.Module) -> Params:
    """Caches the shapes, because tracing a model takes as long as reading 100 MB from disk."""
    # Only the shape of the key is needed. To create a real key, JAX would compile a program.
    rng = jax.eval_shape(jax.random.key, 0)
    return jax.eval_shape(lambda rng: init_params(model, rng), rng)


def fitting_params(model: Model, params: Params) -> Params:
    """Returns a model's parameters as float32 arrays, after checking that they fit the model.

    Args:
        model: The model, from `create` or `load`.
        params: Its parameters, a nested dict of arrays of any floating type.

    Returns:
        A nested dict of float32 arrays, on the devices where `params` are.

    Raises:
        UserError: A parameter is missing or unknown, has a wrong shape, or is not floating-point.
            The message names its path.
    """
    require(
        model.execution.layers != "separate",
        'the model has execution layers="separate", which is for decoding: give the model and '
        "the parameters before unstack_layers",
    )
    wanted: Params = flatten_dict(parameter_shapes(create(model.config)), sep="/")
    provided: Params = flatten_dict(unfreeze(params), sep="/")
    # A frequent mistake is to pass the result of `model.init` instead of its entry "params".
    problem = 'params has one entry, "params": give its value, params["params"]'
    require(provided.keys() != {f"params/{path}" for path in wanted}, problem)
    # Report the problem whose path is alphabetically first.
    for path in sorted(wanted.keys() | provided.keys()):
        shape = wanted[path].shape if path in wanted else None
        require(path in provided, f"params has no {path} {shape}: give all parameters of the model")
        x = provided[path]
        problem = f"params has {path}, which the model does not have: leave it out"
        require(shape is not None, problem)
        actual = getattr(x, "shape", type(x).__name__)
        require(
            actual == shape,
            f"params has {path} {actual} where the model has {shape}: give the model "
            f"that they belong to",
        )
        problem = f"params has {path} of the type {x.dtype}: give floating-point numbers"
        require(jnp.issubdtype(x.dtype, jnp.floating), problem)
    return unflatten_dict({path: provided[path].astype(np.float32) for path in wanted}, sep="/")
