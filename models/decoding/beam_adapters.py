"""Adapters that run a model for beam search: first a prefill of all rows, then one step per token.

The K beams of a row share the cache of the row. A step has K queries per row, and each query has
separate visible slots and a separate position.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct

from ...data.common.fields import require
from ..heads.outputs import CausalLMOutput, Seq2SeqLMOutput
from ..heads.specs import CAUSAL_HEADS, require_head
from ..model import Model
from ..nn.cache import Cache, init_cache
from ..nn.masks import AnyArray
from ..nn.typing import Array, Bool, Float, Int, Params
from .rows import last_logits


@struct.dataclass
class SearchRows:
    """The sources or prompts of a beam search."""

    ids: Int[AnyArray, "B P"]
    """The token ids of the rows, padded."""
    mask: Int[AnyArray, "B P"]
    """1 for tokens, 0 for padding."""
    position_ids: Int[AnyArray, "B P"] | None
    """The position of each token of a source. If None, positions count from 0."""
    start_id: Int[Array, ""]
    """The first token of every target, for an encoder-decoder."""


@struct.dataclass
class Prefill:
    """The state of a search after the model has read the sources or prompts."""

    cache: Cache
    visible_slots: Bool[Array, "B S"]
    """Whether each cache slot contains a token that precedes the beams."""
    logits: Float[Array, "B 1 V"]
    """The logits of the first new token."""


@dataclasses.dataclass(frozen=True)
class EncoderDecoderBeams:
    """The adapter for encoder-decoders.

    Rows are sources, which the encoder reads. Targets begin with a start token.
    """

    model: Model

    row = "source"
    pads_left = False

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary of sources."""
        return self.model.config.input_vocab_size

    def remaining_positions(self, length: int) -> int:
        """Returns the maximum number of new tokens for a row of `length` tokens."""
        del length
        return self.model.config.max_length

    def prefill(self, params: Params, rows: SearchRows, num_beams: int, num_tokens: int) -> Prefill:
        """Reads the sources into a cache with `num_tokens` slots for each beam."""
        config, number = self.model.config, rows.ids.shape[0]
        # Add one slot for the start token, which is shared by all beams.
        slots = num_beams * num_tokens + 1
        cache = init_cache(config, self.model.execution, number, slots, num_beams=num_beams)
        output = self.model.apply(
            {"params": params},
            rows.ids,
            rows.mask,
            decoder_input_ids=jnp.full((number, 1), rows.start_id),
            position_ids=rows.position_ids,
            cache=cache,
        )
        visible = jnp.broadcast_to(jnp.arange(slots) == 0, (number, slots))  # the start token
        return Prefill(output.cache, visible, output.logits)

    def step(
        self,
        params: Params,
        rows: SearchRows,
        tokens: Int[Array, "B K"],
        *,
        visible_slots: Bool[Array, "B K S"],
        count: Int[Array, ""],
        cache: Cache,
    ) -> Seq2SeqLMOutput:
        """Runs the model on the newest token of each beam, which is its `count`-th token."""
        return self.model.apply(
            {"params": params},
            None,
            rows.mask,
            decoder_input_ids=tokens,
            decoder_attention_mask=visible_slots,
            decoder_position_ids=jnp.full((1, 1), count),
            cache=cache,
        )


@dataclasses.dataclass(frozen=True)
class CausalBeams:
    """The adapter for causal language models.

    Rows are prompts, padded on the left. The beams continue the prompts without a start token.
    """

    model: Model

    row = "prompt"
    pads_left = True

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary of prompts."""
        return self.model.config.vocab_size

    def remaining_positions(self, length: int) -> int:
        """Returns the maximum number of new tokens for a prompt of `length` tokens."""
        # The last new token is not read, so it needs no position.
        return self.model.config.max_length - length + 1

    def prefill(self, params: Params, rows: SearchRows, num_beams: int, num_tokens: int) -> Prefill:
        """Reads the prompts into a cache with `num_tokens` slots for each beam."""
        # The slot of a new token becomes visible to a beam when the token is written.
        visible = jnp.pad(rows.mask, ((0, 0), (0, num_beams * num_tokens)))
        cache = init_cache(
            self.model.config, self.model.execution, *visible.shape, num_beams=num_beams
        )
        output = self.model.apply({"params": params}, rows.ids, visible, cache=cache)
        return Prefill(output.cache, visible != 0, last_logits(output))

    def step(
        self,
        params: Params,
        rows: SearchRows,
        tokens: Int[Array, "B K"],
        *,
        visible_slots: Bool[Array, "B K S"],
        count: Int[Array, ""],
        cache: Cache,
    ) -> CausalLMOutput:
        """Runs the model on the newest token of each beam, which is its `count`-th token."""
        # All beams of a row have the same number of tokens, so they share one position.
        positions = jnp.sum(rows.mask, axis=1, keepdims=True) + count - 1
        return self.model.apply(
            {"params": params}, tokens, visible_slots, position_ids=positions, cache=cache
        )


BEAMS = {"seq2seq_lm": EncoderDecoderBeams, **dict.fromkeys(CAUSAL_HEADS, CausalBeams)}


def beams_of(model: Model) -> EncoderDecoderBeams | CausalBeams:
    """Returns the adapter for a model.

    Raises:
      UserError: the model does not generate text, or is not causal.
    """
    require_head(model.config, BEAMS, "cannot generate text", f"give {' or '.join(BEAMS)}")
    require(
        model.config.causal,
        "the model was trained with causal=False, so that it sees the tokens that it should "
        "predict: train a model with causal=True to generate",
    )
    return BEAMS[model.config.head](model)
