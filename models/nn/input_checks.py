"""Checks of the shapes of a model's inputs, before anything is computed."""

from ...data.errors import UserError
from ..config import TransformerConfig
from .cache import Cache
from .masks import AnyArray, Size
from .typing import Array, Int


def check_inputs(
    config: TransformerConfig,
    input_ids: AnyArray,
    *,
    attention_mask: AnyArray | None,
    segment_ids: AnyArray | None,
    cache: Cache | None,
) -> None:
    """Checks the shapes of the inputs that every model has.

    Raises:
      UserError: there are more tokens than `max_length`, `attention_mask` does not cover the
        tokens (or the slots of the cache), or a cache is given together with packed sequences.
    """
    length = input_ids.shape[1]
    # With a 3-D mask the query axis holds beams, so `max_length` does not apply.
    beams = attention_mask is not None and attention_mask.ndim == 3
    if length > config.max_length and not beams:
        raise UserError(
            f"input of {length} tokens exceeds max_length {config.max_length}: shorten it"
        )
    if cache is not None and segment_ids is not None:
        raise UserError("a cache cannot continue packed sequences: leave segment_ids out")
    num_keys = length if cache is None else cache.length
    if attention_mask is not None and attention_mask.shape[-1] != num_keys:
        raise UserError(
            f"attention_mask has {attention_mask.shape[-1]} columns for {num_keys} "
            f"{'tokens' if cache is None else 'slots of the cache'}: give one for each"
        )


def source_length(encoder_hidden_states: Array | None, cache: Cache | None) -> Size:
    """Returns the number of encoder positions, from the encoder's output or from the cache."""
    if encoder_hidden_states is not None:
        return encoder_hidden_states.shape[1]
    assert cache is not None
    return cache.source_length


def check_source_mask(
    mask: Int[AnyArray, "B columns"] | None,
    encoder_hidden_states: Array | None,
    cache: Cache | None,
) -> None:
    """Raises UserError unless the mask of the source has a column for each encoder position."""
    if mask is None:
        return
    length = source_length(encoder_hidden_states, cache)
    if mask.shape[1] != length:
        raise UserError(
            f"attention_mask has {mask.shape[1]} columns for {length} encoded tokens: give one "
            "for each"
        )
