"""Reads slices of parameters from the tensors of files, one tensor at a time."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from ....data.common.fields import require
from .layout import Shape
from .mapping import TensorRule, WeightsError

Index: TypeAlias = tuple[slice, ...]

ALIGNMENT = 64
"""The alignment, in bytes, that memory must have for jax to use it without a copy."""
BLOCK = 2**18
"""Number of bytes of a file that are copied at a time."""
BLOCKS_KEPT = 16
"""Number of blocks after which the pages of the file are released."""


@runtime_checkable
class TensorSource(Protocol):
    """A source of named tensors, which are read one at a time."""

    def shapes(self) -> dict[str, Shape]:
        """Returns the shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor."""
        ...

    def release(self) -> None:
        """Frees the memory of tensors that were read and copied."""
        ...

    def file_of(self, name: str) -> str:
        """Returns the file that contains a tensor, for messages."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """Where a parameter is stored: a rule, and the names of its tensors, one per layer."""

    rule: TensorRule
    part: int
    """Index of the parameter among the parameters of the rule."""
    names: tuple[str, ...]
    """Names of the tensors in the files."""


def read_parameter(
    location: TensorLocation,
    tensors: TensorSource,
    *,
    flax: Mapping[str, Shape],
    dtype: DTypeLike,
    index: Index,
) -> np.ndarray:
    """Reads a slice of one parameter, tensor by tensor.

    Args:
      location: Where the parameter is stored.
      tensors: The tensors of the files.
      flax: Shape of every parameter, by its path.
      dtype: The type of the result.
      index: A slice for each axis of the parameter.

    Raises:
      WeightsError: A tensor does not contain floating-point numbers.
    """
    rule = location.rule
    shapes = [flax[path] for path in rule.flax]
    # Allocate aligned memory, which jax uses on the host without a copy.
    lengths = zip(shapes[location.part], index, strict=True)
    shape = tuple(len(range(size)[part]) for size, part in lengths)
    memory = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    result = memory[start : start + memory.size - ALIGNMENT].view(dtype).reshape(shape)

    names, targets = location.names, [result]
    # The leading axes are layers and experts, which are stored as separate tensors.
    if stacked := rule.num_stacked:
        every = np.full(shapes[location.part][:stacked], None, object)
        for position, name in zip(rule.indices(shapes), names, strict=True):
            every[position] = name
        names = every[index[:stacked]].ravel().tolist()
        # For each tensor, the slice of the result that it is copied to.
        targets, index = list(result.reshape(-1, *shape[stacked:])), index[stacked:]
        shapes = [shape[stacked:] for shape in shapes]
    # Copy block by block; the conversion to `dtype` happens in the assignment.
    for name, target in zip(names, targets, strict=True):
        if name is None:  # this layer has no such tensor
            target[...] = 0
            continue
        tensor = tensors.read(name)
        require(
            jnp.issubdtype(tensor.dtype, jnp.floating),
            f"{name} in {tensors.file_of(name)} has the type {tensor.dtype}: "
            "only floating-point numbers are supported",
            WeightsError,
        )
        view = rule.layout.split(tensor, location.part, shapes)[index]
        for block in blocks(view, tensors):
            target[block] = view[block]
    return result


def blocks(view: np.ndarray, tensors: TensorSource) -> Iterator[Index]:
    """Yields slices in file order, each small enough for the processor's cache.

    With this order, the copy of a transposed view is five times as fast, and no tensor stays in
    memory.
    """
    # Cut along the axis with the largest stride, which varies slowest in the file.
    axis = int(np.argmax(view.strides))
    step = max(1, BLOCK // max(1, view.strides[axis]))
    before = (slice(None),) * axis
    for number, start in enumerate(range(0, view.shape[axis], step), 1):
        yield (*before, slice(start, start + step))
        if number % BLOCKS_KEPT == 0:
            tensors.release()
    tensors.release()
