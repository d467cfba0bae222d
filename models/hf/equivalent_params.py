"""A model in the terms of another library's code: other parameters, the same function.

- Zeros are as good as no biases.
- Sinusoidal positions are a table, which may be stored where others are learned.
- A Transformer treats all D dimensions of its residual stream alike, so they may stand in any
  order, so long as every array has the same: all sines before the cosines, say.
"""

import dataclasses
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ..config import TransformerConfig
from ..gpt import GPTConfig
from ..init import parameter_shapes
from ..nn.positions import sinusoidal_positions
from ..registry import create
from ..transformer import EncoderDecoderConfig

FROM_STREAM = ("query/kernel", "key/kernel", "value/kernel", "up/kernel")
"""Arrays whose first axis behind that of layers is D."""
WITHIN = ("query/bias", "key/bias", "value/bias", "up/bias", "output_bias")
"""Arrays without an axis of size D; of all others it is the last."""
POSITIONS = "position_embedding/embedding"


def as_gpt2(config: GPTConfig, params: Any) -> tuple[GPTConfig, Any]:
    """The same function with biases and a table of positions.

    Args:
      config: of the model.
      params: its parameters, layers stacked.

    Returns:
      Configuration and parameters of the same model.
    """
    given: dict[str, Any] = flatten_dict(params, sep="/")
    if config.positions == "sinusoidal":
        given[POSITIONS] = sinusoidal_positions(
            config.max_length, config.d_model, config.position_base
        )
    theirs = dataclasses.replace(config, use_bias=True, positions="learned")
    return theirs, _with_zeros(theirs, given)


def as_marian(config: EncoderDecoderConfig, params: Any) -> tuple[EncoderDecoderConfig, Any]:
    """The same function with biases in attention and of scores, and all sines before the cosines.

    Args:
      config: of the model.
      params: its parameters, layers stacked.

    Returns:
      Configuration and parameters of the same model.
    """
    given: dict[str, Any] = flatten_dict(params, sep="/")
    if config.positions == "sinusoidal" and config.position_layout == "interleaved":
        order = np.arange(config.d_model)
        order = np.concatenate([order[0::2], order[1::2]])
        given = {path: _reordered(path, x, order) for path, x in given.items()}
    theirs = dataclasses.replace(
        config, attention_bias=True, output_bias=True, position_layout="halves"
    )
    return theirs, _with_zeros(theirs, given)


def _reordered(path: str, x: Any, order: np.ndarray) -> Any:
    if path.endswith(WITHIN):
        return x
    return np.take(np.asarray(x), order, axis=1 if path.endswith(FROM_STREAM) else -1)


def _with_zeros(config: TransformerConfig, given: dict[str, Any]) -> Any:
    """All parameters of a model: those that are given, and zeros."""
    shapes: dict[str, Any] = flatten_dict(parameter_shapes(create(config)), sep="/")
    arrays = {
        path: given[path] if path in given else np.zeros(target.shape, target.dtype)
        for path, target in shapes.items()
    }
    return unflatten_dict(arrays, sep="/")
