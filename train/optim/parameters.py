"""Determines from parameter names which parameters are matrices or stacked, and along which axes.

How optimizers treat a parameter depends only on its path. The layers of a model are stored in a
stack, `layers/…` of shape `[L, …]` (in two stacks for an encoder-decoder, `encoder/layers/…`). For
optimizers, layer i also has the name `layers/i/…`, and is treated like a layer that is stored
separately.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.tree_util import keystr

from ...models.nn.typing import PyTree

# The names of arrays that are matrices. Biases and the scales of norms have no weight decay.
ROUTED = ("gate", "up", "down")  # of a mixture, stacked over experts
DECAYED = ("kernel", "embedding", "lora_a", "lora_b", "router", *ROUTED)

STACK = "layers"

Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""A parameter, or its shape."""


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of a parameter that is a matrix, or a stack of matrices."""

    stack: tuple[int, ...]
    """The axes of layers and experts. Each index along these axes has a separate matrix."""
    inputs: tuple[int, ...]
    """The axes that a matrix product contracts with the input, such as `(N, H)` in the output map
    of attention."""
    outputs: tuple[int, ...]
    """The axes that appear in the output, such as `(N, H)` in the map to queries."""


def is_decayed(name: str) -> bool:
    """Returns whether a parameter is a matrix and therefore has weight decay."""
    return name.rsplit("/", 1)[-1] in DECAYED


def is_stacked(name: str) -> bool:
    """Returns whether the leading axis of a parameter is the layer axis."""
    return f"/{STACK}/" in f"/{name}"


def split_at_stack(name: str) -> tuple[str, str]:
    """Splits a stacked parameter's path into the path of the stack and the path within a layer."""
    above, below = re.split(rf"(?<![^/]){STACK}/", name, maxsplit=1)
    return above, below


def num_stack_axes(name: str) -> int:
    """Returns the number of a parameter's leading axes of layers and experts: 0, 1 or 2."""
    return is_stacked(name) + (name.rsplit("/", 1)[-1] in ROUTED)


def matrix_axes(name: str, ndim: int) -> MatrixAxes | None:
    """Returns the axes of a parameter's matrix, or of each matrix in a stack.

    Args:
        name: the parameter's path, such as `layers/attention/query/kernel`.
        ndim: the number of its axes.

    Returns:
        The axes. None for biases, scales of norms, and other parameters that are not matrices.
    """
    first = num_stack_axes(name)
    if not is_decayed(name) or ndim < first + 2:
        return None
    parent, _, leaf = f"/{name}".rpartition("/")
    # Either the input or the output has a single axis. The output has a single axis in maps that
    # read heads, such as attention's output map `[…, N, H, D]`, and in the factor A of an adapter.
    reads_all = leaf == "lora_a" or (leaf == "kernel" and parent.endswith("/output"))
    cut = ndim - 1 if reads_all else first + 1
    axes = tuple(range(ndim))
    return MatrixAxes(axes[:first], axes[first:cut], axes[cut:])


def size_along(param: Leaf, axes: tuple[int, ...]) -> int:
    """Returns the product of a parameter's sizes along some axes."""
    return math.prod(param.shape[axis] for axis in axes)


def axes_of_matrix(name: str, ndim: int) -> MatrixAxes:
    """Returns the axes of a parameter that is a matrix; see `matrix_axes`.

    Raises:
        ValueError: the parameter is not a matrix.
    """
    axes = matrix_axes(name, ndim)
    if axes is None:
        raise ValueError(f"parameter {name} with {ndim} axes is not a matrix")
    return axes


def map_named(f: Callable[..., object], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps `f(name, leaf, …)` over a tree of parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *x: f(keystr(path, simple=True, separator="/"), *x), tree, *rest
    )


def named(params: PyTree) -> Iterator[tuple[str, Leaf]]:
    """Yields every parameter (or its shape) with its path."""
    leaves = jax.tree.leaves_with_path(params)
    return ((keystr(path, simple=True, separator="/"), x) for path, x in leaves)


def decay_mask(params: PyTree) -> PyTree:
    """Returns a tree of booleans: whether each parameter has weight decay."""
    return map_named(lambda name, _: is_decayed(name), params)


def own_names(name: str, param: Leaf) -> list[str]:
    """Returns the paths that a parameter would have if each layer were stored separately."""
    if not is_stacked(name):
        return [name]
    above, below = split_at_stack(name)
    return [f"{above}{STACK}/{layer}/{below}" for layer in range(param.shape[0])]
