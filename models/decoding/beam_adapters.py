"""How beam search runs a model: it reads all rows once, then takes steps with all their beams.

The K beams of a row are K queries to one cache of the row: each has its own visible slots and its
own position.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct

from ...data.common.errors import UserError
from ..model import Model
from ..nn.cache import Cache, init_cache
from ..nn.heads import CAUSAL_HEADS, CausalLMOutput, Seq2SeqLMOutput, require_head
from ..nn.masks import AnyArray
from ..nn.typing import Array, Bool, Float, Int, Params
from .rows import last_logits


@struct.dataclass
class SearchRows:
    """The sources or prompts of a search."""

    ids: Int[AnyArray, "B P"]
    """The rows, padded."""
    mask: Int[AnyArray, "B P"]
    """1 where there is a token."""
    position_ids: Int[AnyArray, "B P"] | None
    """The position of each token of a source; None: they are counted from 0."""
    start_id: Int[Array, ""]
    """The first token of every target, for an encoder-decoder."""


@struct.dataclass
class Prefill:
    """The result of reading the rows."""

    cache: Cache
    visible_slots: Bool[Array, "B S"]
    """The slots that hold what precedes the first token of every beam."""
    logits: Float[Array, "B 1 V"]
    """The logits of that first token."""


@dataclasses.dataclass(frozen=True)
class EncoderDecoderBeams:
    """The encoder reads each row, a source; targets begin with a start token."""

    model: Model

    row = "source"
    pads_left = False

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary of the rows."""
        c = self.model.config
        return c.source_vocab_size or c.vocab_size  # the first, if given, is of a table of its own

    def remaining_positions(self, length: int) -> int:
        """Returns how many tokens the model can write for a row of `length` tokens."""
        del length
        return self.model.config.max_length

    def prefill(self, params: Params, rows: SearchRows, num_beams: int, num_tokens: int) -> Prefill:
        """Reads the rows, with `num_tokens` slots in the cache for each of their beams."""
        config, number = self.model.config, rows.ids.shape[0]
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
        """Runs the model on the newest token of each beam, the `count`-th of its tokens."""
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
    """Rows are prompts, padded on the left; the beams continue them. There is no start token."""

    model: Model

    row = "prompt"
    pads_left = True

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary of the rows."""
        return self.model.config.vocab_size

    def remaining_positions(self, length: int) -> int:
        """Returns how many tokens the model can write behind `length`; it never reads the last."""
        return self.model.config.max_length - length + 1

    def prefill(self, params: Params, rows: SearchRows, num_beams: int, num_tokens: int) -> Prefill:
        """Reads the rows, with `num_tokens` slots in the cache for each of their beams."""
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
        """Runs the model on the newest token of each beam, the `count`-th of its tokens."""
        positions = jnp.sum(rows.mask, axis=1, keepdims=True) + count - 1
        return self.model.apply(
            {"params": params}, tokens, visible_slots, position_ids=positions, cache=cache
        )


BEAMS = {"seq2seq_lm": EncoderDecoderBeams, **dict.fromkeys(CAUSAL_HEADS, CausalBeams)}


def beams_of(model: Model) -> EncoderDecoderBeams | CausalBeams:
    """Returns the adapter for a model.

    Raises:
      UserError: the model writes no text, or sees later tokens.
    """
    require_head(model.config, BEAMS, "writes no text", f"give {' or '.join(BEAMS)}")
    if not model.config.causal:
        raise UserError(
            "the model was trained with causal=False, so that it sees what it is to write: train "
            "one with causal=True to generate"
        )
    return BEAMS[model.config.head](model)
