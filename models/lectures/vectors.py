"""Uses vectors as inputs instead of tokens, such as image patches, graph nodes, or measurements."""

from typing import Any

import flax.linen as nn
import numpy as np

from ...data.common.fields import require
from ..model import Model
from ..nn.layers import Embedding
from ..nn.typing import Array, Float, Params

TABLE = "token_embedding"
"""The name of the table of token embeddings in every family."""


def apply_to_vectors(
    model: Model, params: Params, embeddings: Float[Array, "B T D"], **inputs: Any
) -> Any:
    """Applies a model to vectors in place of the embeddings of tokens.

    The model adds positions to the vectors. For a graph, pass a mask `[B, T, T]` that is True where
    the node of a row may attend to the node of a column, and a model with positions "none".

    Example::

        patches = images.reshape(len(images), num_patches, -1)  # [B, T, P]
        output = models.apply_to_vectors(model, params, patches @ projection)

    Args:
      model: a GPT, a BERT or another model with token embeddings of width D.
      params: the parameters of the model. The token embeddings in them are not used.
      embeddings: the vectors. The output is differentiable with respect to them.
      **inputs: additional inputs of the model, such as `attention_mask`.

    Returns:
      The same output as for `input_ids` of shape `[B, T]`.

    Raises:
      UserError: the model is an encoder-decoder, or `embeddings` are not `[B, T, D]`.
    """
    problem = "model must read one sequence, got an encoder-decoder: give a decoder or an encoder"
    require(not hasattr(model.config, "num_decoder_layers"), problem)
    width = getattr(model.config, "d_embedding", None) or model.config.d_model
    require(
        embeddings.ndim == 3 and embeddings.shape[-1] == width,
        f"embeddings must be [B, T, {width}], got {list(embeddings.shape)}: project the vectors to "
        "the width of the model",
    )

    def look_up(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        is_table = isinstance(module, Embedding) and module.name == TABLE
        if not is_table or context.method_name != "__call__":
            return call(*args, **kwargs)
        return embeddings.astype(module.execution.dtype)

    ids = np.zeros(embeddings.shape[:2], np.int32)
    with nn.intercept_methods(look_up):
        return model.apply({"params": params}, input_ids=ids, **inputs)
