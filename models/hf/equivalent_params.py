"""Rewrites a model with other parameters that compute the same function.

transformers lacks some variants of flaxzoo, but has equivalent variants:

- A bias of zeros is equivalent to no bias.
- Computed positions can be stored as a learned table.
- A Transformer treats all D dimensions of its residual stream alike, so the dimensions of all
  arrays can be permuted, for example from interleaved sines and cosines to all sines before the
  cosines.
"""

import dataclasses

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ..config import TransformerConfig
from ..decoders.gpt.gpt import GPTConfig
from ..encoder_decoders.transformer import EncoderDecoderConfig
from ..init import parameter_shapes
from ..lectures.options import LectureOptions
from ..lectures.positions import position_vectors
from ..nn.typing import Params
from ..registry import create

FROM_STREAM = tuple(
    f"{part}/{name}" for part in ("query", "key", "value", "up") for name in ("kernel", "lora_a")
)
"""Path suffixes of arrays whose first axis, after the layer axis, has size D."""
WITHIN = (
    *(f"{part}/{name}" for part in ("query", "key", "value", "up") for name in ("bias", "lora_b")),
    *("attention/output/lora_a", "down/lora_a", "output_bias"),
)
"""Path suffixes of arrays without an axis of size D. In all other arrays, the last axis has size D.
"""
POSITIONS = "position_embedding/embedding"


def as_gpt2(config: GPTConfig, params: Params) -> tuple[GPTConfig, Params]:
    """Rewrites a GPT as a GPT with biases and learned positions.

    Args:
      config: The configuration of the model.
      params: Its parameters, with stacked layers.

    Returns:
      Configuration and parameters of an equivalent model.
    """
    flat: Params = flatten_dict(params, sep="/")
    equivalent = dataclasses.replace(config, use_bias=True)
    if config.adds_positions and config.positions != "learned":
        flat[POSITIONS] = position_vectors(config, config.max_length)
        if isinstance(equivalent, LectureOptions):
            equivalent = dataclasses.replace(equivalent, position_table=None, positions="learned")
        equivalent = dataclasses.replace(equivalent, positions="learned")
    return equivalent, with_zeros(equivalent, flat)


def as_marian(config: EncoderDecoderConfig, params: Params) -> tuple[EncoderDecoderConfig, Params]:
    """Adds biases to attention and output, and puts all sines before the cosines.

    Args:
      config: The configuration of the model.
      params: Its parameters, with stacked layers.

    Returns:
      Configuration and parameters of an equivalent model.
    """
    flat: Params = flatten_dict(params, sep="/")
    layout = config.position_layout
    if config.positions == "sinusoidal" and layout == "interleaved":
        layout = "halves"
        # Permute the residual stream: even dimensions (sines) first, then odd dimensions (cosines).
        order = np.arange(config.d_model)
        order = np.concatenate([order[0::2], order[1::2]])
        for path, x in flat.items():
            if not path.endswith(WITHIN):
                axis = 1 if path.endswith(FROM_STREAM) else -1
                flat[path] = np.take(np.asarray(x), order, axis=axis)
    equivalent = dataclasses.replace(
        config, attention_bias=True, output_bias=True, position_layout=layout
    )
    return equivalent, with_zeros(equivalent, flat)


def with_zeros(config: TransformerConfig, params: Params) -> Params:
    """Adds zeros for the parameters that a model lacks; adapter parameters are kept."""
    flat: Params = flatten_dict(params, sep="/")
    shapes: Params = flatten_dict(parameter_shapes(create(config)), sep="/")
    missing = {path: np.zeros(x.shape, x.dtype) for path, x in shapes.items() if path not in flat}
    return unflatten_dict(flat | missing, sep="/")
