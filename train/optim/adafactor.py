"""Adafactor (Shazeer & Stern 2018), which factors second moments into rows and columns.

The module implements algorithms 4 and 5 of the paper. The squared gradient of a matrix is averaged
over each row and over each column, and the second moment is the product of the running means of
these averages. Updates are clipped to a root mean square of 1. The learning rate is multiplied by
the root mean square of the parameter, but at least by 0.001. optax's `scale_by_factored_rms`
factors an array along its two largest axes. This module instead treats the kernel of each layer and
each expert as a separate matrix, which contains all heads.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...models.nn.typing import Array, PyTree
from .parameters import (
    Leaf,
    axes_of_matrix,
    map_named,
    matrix_axes,
    num_stack_axes,
    size_along,
)

DECAY_EXPONENT = 0.8
"""beta2 of step t, counted from 1, is 1 - t^-0.8 (section 7.2)."""
REGULARIZER = 1e-30
"""ε₁, which is added to the squared gradient (section 8)."""
SMALLEST_FACTORED = 128
"""Matrices with fewer rows or columns have a full second moment, as in optax."""


class Factored(NamedTuple):
    """The factored second moment of a matrix, or of each matrix in a stack."""

    rows: Array
    """Means over the output axes, float32. The shape is the parameter's shape without these
    axes."""
    columns: Array
    """Means over the input axes, float32. The shape is the parameter's shape without these axes."""


class FactoredState(NamedTuple):
    """The state of `scale_by_factored_rms`."""

    steps: Array
    """The number of steps taken, int32[]."""
    nu: PyTree
    """`Factored`, or a float32 array of the parameter's shape, for each parameter."""


def is_factored(name: str, param: Leaf) -> bool:
    """Returns whether a parameter's second moment is stored as rows and columns."""
    axes = matrix_axes(name, len(param.shape))
    if axes is None:
        return False
    sizes = (size_along(param, axes.inputs), size_along(param, axes.outputs))
    return min(sizes) >= SMALLEST_FACTORED


def scale_by_factored_rms() -> optax.GradientTransformation:
    """Divides updates by the square root of the second moment, which is factored for matrices."""

    def init(params: PyTree) -> FactoredState:
        def moment(name: str, param: Array) -> Factored | Array:
            # Moments start at 0, so only their shapes are needed here.
            kept = jax.ShapeDtypeStruct(param.shape, jnp.float32)
            if is_factored(name, param):
                kept = jax.eval_shape(functools.partial(_means, name), kept)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)

        return FactoredState(jnp.zeros((), jnp.int32), map_named(moment, params))

    def update(
        updates: PyTree, state: FactoredState, params: PyTree | None = None
    ) -> tuple[PyTree, FactoredState]:
        del params
        steps = state.steps + 1
        decay = 1 - steps.astype(jnp.float32) ** -DECAY_EXPONENT

        def moment(name: str, gradient: Array, old: Factored | Array) -> Factored | Array:
            squared = jnp.square(gradient.astype(jnp.float32)) + REGULARIZER
            new = _means(name, squared) if isinstance(old, Factored) else squared
            return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)

        def scale(name: str, gradient: Array, moment: Factored | Array) -> Array:
            gradient = gradient.astype(jnp.float32)
            if not isinstance(moment, Factored):
                return gradient * jax.lax.rsqrt(moment)
            axes = axes_of_matrix(name, gradient.ndim)
            rows = jnp.expand_dims(moment.rows, axes.outputs)
            columns = jnp.expand_dims(moment.columns, axes.inputs)
            # The second moment is rows · columns / mean(rows), because both factors contain the
            # overall scale.
            mean = jnp.mean(rows, axes.inputs, keepdims=True)
            return gradient * jax.lax.rsqrt(rows / mean) * jax.lax.rsqrt(columns)

        nu = map_named(moment, updates, state.nu)
        return map_named(scale, updates, nu), FactoredState(steps, nu)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def per_matrix(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a stateless transformation separately to each layer and each expert of a stack."""

    def apply(update: Array, param: Array) -> Array:
        # The transformation is stateless, so use a new state each time.
        return transformation.update(update, transformation.init(param), param)[0]  # pyright: ignore[reportReturnType]

    def apply_named(name: str, update: Array, param: Array) -> Array:
        return _vmapped(apply, num_stack_axes(name))(update, param)

    return optax.stateless(lambda updates, params: map_named(apply_named, updates, params))


def _vmapped(function: Callable[..., Array], axes: int) -> Callable[..., Array]:
    # Apply a `vmap` for each leading axis (layers and experts).
    return functools.reduce(lambda f, _: jax.vmap(f), range(axes), function)


def _means(name: str, squared: Array) -> Factored:
    axes = axes_of_matrix(name, squared.ndim)
    return Factored(jnp.mean(squared, axes.outputs), jnp.mean(squared, axes.inputs))
