"""The Transformer as published, said in the terms of Marian's code: another basis, the same model.

Marian's models have biases in attention's projections, a bias for each score, and all sines before
the cosines. Zeros are as good as no biases; and since a Transformer treats all D dimensions of its
residual stream alike, they may stand in any order, so long as every array has the same.
"""

import dataclasses
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ..config import create
from ..shapes import parameter_shapes
from ..transformer import EncoderDecoderConfig

FROM_STREAM = ("query/kernel", "key/kernel", "value/kernel", "up/kernel")
"""Arrays whose first axis behind that of layers is D."""
WITHIN = ("query/bias", "key/bias", "value/bias", "up/bias", "output_bias")
"""Arrays without an axis of size D; of all others it is the last."""


def as_marian(config: EncoderDecoderConfig, params: Any) -> tuple[EncoderDecoderConfig, Any]:
    """The same function with Marian's biases and order of sines.

    Args:
      config: of the model.
      params: its parameters, layers stacked.

    Returns:
      Configuration and parameters that differ from the given ones only in `attention_bias`,
      `output_bias` and `position_layout`, where these were another.
    """
    marian: Any = dataclasses.replace(
        config, attention_bias=True, output_bias=True, position_layout="halves"
    )
    given: dict[str, Any] = flatten_dict(params, sep="/")
    order = np.arange(config.d_model)
    if config.positions == "sinusoidal" and config.position_layout == "interleaved":
        order = np.concatenate([order[0::2], order[1::2]])
    shapes: dict[str, Any] = flatten_dict(parameter_shapes(create(marian)), sep="/")
    arrays = {
        path: _reordered(path, given[path], order)
        if path in given
        else np.zeros(target.shape, target.dtype)
        for path, target in shapes.items()
    }
    return marian, unflatten_dict(arrays, sep="/")


def _reordered(path: str, x: Any, order: np.ndarray) -> Any:
    if path.endswith(WITHIN):
        return x
    return np.take(np.asarray(x), order, axis=1 if path.endswith(FROM_STREAM) else -1)
