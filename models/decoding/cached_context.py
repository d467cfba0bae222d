"""One context that grows, as a conversation does: what is in the cache is not read again."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ..config import TransformerConfig
from ..model import Model
from ..nn.dropout import RowKeys
from ..nn.typing import Array, Float, Params
from .continuous_batch import ContinuousBatch, Text, tokens_left
from .request import GenerationRequest
from .rows import RowCaches, read_more
from .sample import sampling_params

CHUNKS = (64, 16, 4, 1)
"""Tokens are read in pieces of these sizes, so that few programs are compiled."""

SPARE = 64
"""The number of tokens that can be taken back where layers keep a window, without reading all
others again: the end of an answer, which the template of the next turn writes differently."""


class CachedContext(ContinuousBatch):
    """A row whose text is replaced by another that begins like it.

    Of the next turn of a conversation only what is new is read. The cache grows with the context.

    Args:
      model: a causal language model, with the layout of layers that decodes fastest.
      params: its parameters in that layout.
      tokens_per_call: the tokens that a call of the compiled loop writes.
    """

    def __init__(self, model: Model, params: Params, tokens_per_call: int = 1) -> None:
        super().__init__(
            model, params, None, num_rows=1, tokens_per_call=tokens_per_call, spare=SPARE
        )
        self._reader.most = model.config.max_length + tokens_per_call
        self._last: Text | None = None
        self._most_written = 0  # the most tokens that this cache has had

    @property
    def num_read(self) -> int:
        """The number of tokens that the model has read so far."""
        return self.usage.tokens_read + self.usage.positions_advanced

    def stream(
        self, context: Sequence[int], request: GenerationRequest, keys: RowKeys
    ) -> Iterator[int]:
        """Continues a context token by token, as `Generator.stream` does.

        Args:
          context: all tokens of the context, at least one, and at most as many as the model has
            positions.
          request: with one beam.
          keys: a single key, as of `sampling_keys(seed, 1)`.

        Yields:
          New tokens, until there are `request.max_new_tokens` or no position is left.

        Raises:
          UserError: the context is empty or too long, the request has beams, or the logits are
            NaN or infinite.
        """
        config = self._config
        longest = config.max_length
        if not 1 <= len(context) <= longest:
            raise UserError(
                f"the context has {len(context)} tokens: the model takes 1 to {longest}"
            )
        if request.num_beams > 1:
            raise UserError(f"num_beams {request.num_beams} must be 1 in a conversation")
        self._sampling = sampling_params(
            request,
            config.vocab_size,
            banned=request.bad_words_ids,
            greedy=not request.samples,
            scored=False,
        )
        self._texts = [None]
        limit = min(request.max_new_tokens or longest, longest - len(context) + 1)
        self.add(0, context, key=keys, limit=limit)
        for written in self:
            yield from written.tokens

    def _read(self, texts: Sequence[Text]) -> tuple[Float[Array, "1 V"], RowCaches]:
        """Reads what is new of a context."""
        (text,) = texts
        tokens, reader, config = text.context, self._reader, self._config
        rows, common = self._kept(tokens)
        if rows is None:
            rows = reader.empty(1, len(tokens))
            common = self._most_written = 0
        rows = reader.with_space(rows, len(tokens)).moved_to(jnp.asarray([common]))
        logits, place = None, common
        while place < len(tokens):
            size = next(size for size in CHUNKS if size <= len(tokens) - place)
            if place == 0 and _rotates_by_length(config, len(tokens)):
                size = len(tokens)  # a piece would be taken for a short text
            piece = np.asarray([tokens[place : place + size]], np.int32)
            logits, rows = read_more(reader.model, reader.params, piece, rows)
            place += size
        self.usage.tokens_read += len(tokens) - common
        text.slot, text.room = len(tokens), tokens_left(config, len(tokens))
        self._last = text
        assert logits is not None
        return logits, rows

    def _kept(self, tokens: Sequence[int]) -> tuple[RowCaches | None, int]:
        """Returns the caches of the last text, if they can be kept, and how many of its tokens."""
        if self._state is None or self._last is None:
            return None, 0
        rows, config, limit = self._state.context, self._config, self._config.reread_length
        assert isinstance(rows, RowCaches)
        held = self._last.context[: self._last.slot]
        self._most_written = max(self._most_written, self._last.slot)
        pairs = enumerate(zip(held, tokens, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(held), len(tokens)))
        common = min(common, len(tokens) - 1)  # the last token is read for its logits
        # A convolution keeps the inputs of the last tokens only: it cannot go back.
        convolved = common < self._last.slot and config.head_convolution is not None
        crossed = limit is not None and (len(held) > limit) != (len(tokens) > limit)
        if convolved or crossed or not rows.cache.can_go_back(self._most_written, common):
            return None, 0
        return rows, common


def _rotates_by_length(config: TransformerConfig, length: int) -> bool:
    """Returns whether the rotary frequencies of a text of some length are those of no shorter."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return False
    return length > (scaling.original_length or config.max_length)
