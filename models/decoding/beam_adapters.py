"""What beam search asks of a model: to read its rows, and to take a step with all their beams.

The K beams of a row are K queries to one cache: each says which slots it sees, and where it stands.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from ..nn.cache import Cache, init_cache
from ..nn.heads import require_head
from ..nn.typing import Array, Bool, Float, Int


@struct.dataclass
class Beginning:
    """Rows that were read."""

    cache: Cache
    sees: Bool[Array, "B S"]
    """The slots that hold what stands before the first token that is searched for."""
    logits: Float[Array, "B 1 V"]
    """Of that token."""


@dataclasses.dataclass(frozen=True)
class EncoderDecoderBeams:
    """Rows are sources, which the encoder reads; what is searched for begins with a start token."""

    model: Any

    row = "source"
    pads_left = False

    @property
    def vocab_size(self) -> int:
        """Of the rows."""
        c = self.model.config
        return c.vocab_size if c.share_embeddings else c.source_vocab_size or c.vocab_size

    def room(self, length: int) -> int:
        """How many tokens can be searched for, given a row of so many."""
        del length
        return self.model.config.max_length

    def begin(
        self,
        params: dict[str, Any],
        ids: Int[Array, "B P"],
        mask: Int[Array, "B P"],
        start_id: Int[Array, ""],
        slots: int,
    ) -> Beginning:
        """Reads the rows.

        Args:
          params: of the model.
          ids: padded rows.
          mask: 1 where there is a token.
          start_id: what all that is searched for begins with.
          slots: how many of the cache there are to be for what follows.
        """
        rows, slots = ids.shape[0], slots + 1
        output = self.model.apply(
            {"params": params},
            ids,
            mask,
            decoder_input_ids=jnp.full((rows, 1), start_id),
            cache=init_cache(self.model.config, self.model.execution, rows, slots),
        )
        sees = jnp.broadcast_to(jnp.arange(slots) == 0, (rows, slots))
        return Beginning(output.cache, sees, output.logits)

    def step(
        self,
        params: dict[str, Any],
        mask: Int[Array, "B P"],
        tokens: Int[Array, "B K"],
        sees: Bool[Array, "B K S"],
        count: Int[Array, ""],
        cache: Cache,
    ) -> Any:
        """What the model answers to the newest token of each beam, the `count`-th of them."""
        return self.model.apply(
            {"params": params},
            None,
            mask,
            decoder_input_ids=tokens,
            decoder_attention_mask=sees,
            decoder_position_ids=jnp.full((1, 1), count),
            cache=cache,
        )


@dataclasses.dataclass(frozen=True)
class CausalBeams:
    """Rows are prompts, read once; what is searched for continues them."""

    model: Any

    row = "prompt"
    pads_left = True

    @property
    def vocab_size(self) -> int:
        """Of the rows."""
        return self.model.config.vocab_size

    def room(self, length: int) -> int:
        """How many tokens can be searched for, given a row of so many: the last one is not read."""
        return self.model.config.max_length - length + 1

    def begin(
        self,
        params: dict[str, Any],
        ids: Int[Array, "B P"],
        mask: Int[Array, "B P"],
        start_id: Int[Array, ""],
        slots: int,
    ) -> Beginning:
        """Reads the rows; see `EncoderDecoderBeams.begin`. There is no start token."""
        del start_id
        sees = jnp.pad(mask, ((0, 0), (0, slots)))
        cache = init_cache(self.model.config, self.model.execution, *sees.shape)
        output = self.model.apply({"params": params}, ids, sees, cache=cache)
        projection = output.projection
        last = dataclasses.replace(projection, hidden=projection.hidden[:, -1:])
        return Beginning(output.cache, sees != 0, last.logits())

    def step(
        self,
        params: dict[str, Any],
        mask: Int[Array, "B P"],
        tokens: Int[Array, "B K"],
        sees: Bool[Array, "B K S"],
        count: Int[Array, ""],
        cache: Cache,
    ) -> Any:
        """What the model answers to the newest token of each beam, the `count`-th of them."""
        positions = jnp.sum(mask, axis=1, keepdims=True) + count - 1
        return self.model.apply(
            {"params": params}, tokens, sees, position_ids=positions, cache=cache
        )


BEAMS = {"seq2seq_lm": EncoderDecoderBeams, "causal_lm": CausalBeams}


def beams_of(model: Any) -> EncoderDecoderBeams | CausalBeams:
    """How beams of a model are made.

    Raises:
      UserError: it writes no text.
    """
    require_head(model.config, BEAMS, "writes no text", f"give {' or '.join(BEAMS)}")
    return BEAMS[model.config.head](model)
