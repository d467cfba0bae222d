"""Splits a batch into equal parts that run one by one, to save memory."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from ...models.nn.typing import Params
from .objective import Terms

T = TypeVar("T")
U = TypeVar("U")


def micro_batches(tree: T, num_parts: int) -> T:
    """Splits arrays `[B, …]` into `[num_parts, B / num_parts, …]`.

    Example i goes to micro-batch i mod `num_parts`, so that each micro-batch has examples of every
    device.
    """
    # [B, …] to [B / num_parts, num_parts, …] to [num_parts, B / num_parts, …].
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, num_parts, *x.shape[1:]), 1, 0), tree)


def in_parts(function: Callable[[T], U], tree: T, num_parts: int) -> U:
    """Applies a function to equal parts of arrays `[B, …]`, one by one.

    Args:
        function: maps a part of the arrays to arrays with the same number of rows.
        tree: arrays `[B, …]`.
        num_parts: the number of parts.

    Returns:
        The results for all rows, in the order of `tree`.
    """
    if num_parts == 1:
        return function(tree)
    parts = jax.lax.map(function, micro_batches(tree, num_parts))  # [num_parts, B / num_parts, …]
    # The inverse of `micro_batches`: [num_parts, B / num_parts, …] to [B, …].
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), parts)


def accumulate(function: Callable[[T], tuple[Params, Terms]], parts: T) -> tuple[Params, Terms]:
    """Sums `function(part)` over the leading axis of `parts`, one part at a time."""

    def body(total: tuple[Params, Terms], part: T) -> tuple[tuple[Params, Terms], None]:
        return jax.tree.map(jnp.add, total, function(part)), None

    # Start the sum with zeros, which have the shapes of the results for one part.
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zeros, parts)[0]
