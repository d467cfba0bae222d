"""How a tensor of a Hugging Face file stores parameters: transposed, concatenated, or by head."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Shape: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a Hugging Face tensor stores one parameter, or several, concatenated along the outputs.

    A parameter has the shape `[*inputs, *outputs]`. The tensor is a matrix `[outputs, inputs]`: all
    input axes are merged into one axis, and so are all output axes. A key kernel `[D, K, H]` of K
    grouped heads, for example, is the matrix `[K·H, D]` in the layout `LINEAR`.
    """

    input_axes: int = 1
    """Number of leading axes of the parameter that are input axes."""
    transposed: bool = True
    """Whether the tensor's first axis is the output axis (torch's Linear). If False, it is the
    input axis (GPT-2's Conv1D)."""
    flat: bool = False
    """Whether the tensor is a vector, without an input axis."""
    by_head: bool = False
    """Whether parameters with outputs `[N, H]` are interleaved by head (queries, keys and values of
    GPT-NeoX and BLOOM) instead of concatenated. If there are fewer key/value heads than query
    heads, each group of N / K query heads is followed by its key head and its value head
    (Falcon)."""

    def hf_shape(self, flax: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor that stores parameters of the given shapes."""
        inputs = math.prod(flax[0][: self.input_axes])
        outputs = sum(math.prod(shape[self.input_axes :]) for shape in flax)
        if self.flat:
            return (outputs,)
        return (outputs, inputs) if self.transposed else (inputs, outputs)

    def split(self, tensor: np.ndarray, part: int, flax: Sequence[Shape]) -> np.ndarray:
        """Returns one of the parameters that a tensor stores, without a copy if possible.

        Args:
          tensor: A tensor of a Hugging Face file.
          part: Index of the parameter.
          flax: Shape of every parameter in the tensor.
        """
        if self.by_head:
            # The numbers of heads of all parameters, and the size of a head.
            heads, size = [shape[self.input_axes] for shape in flax], flax[part][-1]
            each = [number // min(heads) for number in heads]  # number of heads in a group
            own = slice(sum(each[:part]), sum(each[: part + 1]))
            # [K, heads of a group, H, inputs]; a bias has one input.
            rows = tensor.reshape(min(heads), sum(each), size, -1)[:, own]
            return np.moveaxis(rows, -1, 0).reshape(flax[part])
        widths = [math.prod(shape[self.input_axes :]) for shape in flax]
        start = sum(widths[:part])
        matrix = tensor.T if self.transposed else tensor  # [inputs, outputs], or [outputs]
        return matrix[..., start : start + widths[part]].reshape(flax[part])

    def join(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that stores the given parameters."""
        inputs = math.prod(params[0].shape[: self.input_axes])
        if self.by_head:
            # Each [inputs, N, H] to [K, heads of a group, H, inputs].
            last = [np.moveaxis(x.reshape(inputs, *x.shape[-2:]), 0, -1) for x in params]
            groups = min(map(len, last))
            grouped = [x.reshape(groups, -1, *x.shape[1:]) for x in last]
            matrix = np.concatenate(grouped, axis=1).reshape(-1, inputs).T
        else:
            matrix = np.concatenate([x.reshape(inputs, -1) for x in params], axis=1)
        if self.flat:
            return matrix[0]
        return matrix.T if self.transposed else matrix


@dataclasses.dataclass(frozen=True)
class ConvolutionLayout(Layout):
    """A kernel `[taps, inputs, outputs]`, stored as `[outputs, inputs, taps]` (torch's Conv1d)."""

    def hf_shape(self, flax: Sequence[Shape]) -> Shape:
        """Returns the shape of the tensor."""
        return tuple(reversed(flax[0]))

    def split(self, tensor: np.ndarray, part: int, flax: Sequence[Shape]) -> np.ndarray:
        """Returns the kernel of a tensor, as a view."""
        del part, flax
        return tensor.T

    def join(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that stores the kernel."""
        return params[0].T


VECTOR = Layout(input_axes=0, flat=True)
"""A parameter of any shape, stored as a vector: norm scales, and biases with or without heads."""
ROW = Layout(input_axes=0, transposed=False)
"""A parameter of any shape, stored as a matrix with one row."""
TABLE = Layout(transposed=False)
"""A matrix that is stored unchanged: embeddings, and kernels with the input axis first."""
LINEAR = Layout()
"""A kernel, stored as in torch's Linear; its outputs may have several axes, such as `[D, N, H]`."""
FROM_HEADS = Layout(input_axes=2)
"""A kernel whose inputs are heads `[N, H]`, stored as in torch's Linear."""
BY_HEAD = Layout(by_head=True)
"""The kernels of queries, keys and values, stored as one torch Linear and interleaved by head."""
BY_HEAD_VECTOR = Layout(input_axes=0, flat=True, by_head=True)
"""The biases that belong to `BY_HEAD` kernels."""
CONVOLUTION = ConvolutionLayout()
TABLE_FROM_HEADS = Layout(input_axes=2, transposed=False)
"""A kernel whose inputs are heads `[N, H]`, stored with the input axis first."""
