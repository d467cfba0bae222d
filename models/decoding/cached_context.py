"""A growing context, such as a conversation, whose tokens are each read only once."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...data.common.fields import require
from ..config import TransformerConfig
from ..model import Model
from ..nn.dropout import RowKeys
from ..nn.typing import Array, Float, Params
from .continuous_batch import ContinuousBatch, Text, tokens_left
from .padding import common_prefix, divided
from .request import GenerationRequest, Sampling
from .rows import RowCaches, read_more
from .sample import sampling_params

CHUNKS = (64, 16, 4, 1)
"""Tokens are read in chunks of these sizes, so that few programs are compiled."""

SPARE = 64
"""The number of tokens that can be removed from the cache of a model with sliding windows. Removal
is needed if the chat template formats the end of an answer differently in the next turn."""


class CachedContext(ContinuousBatch):
    """A batch of one row, where each text replaces the previous text.

    The cached tokens of the common prefix of both texts are reused. In a conversation, each turn
    therefore reads only its new tokens. The cache grows with the context.

    Args:
      model: a causal language model in the layout of `unstack_layers`.
      params: its parameters in that layout.
      tokens_per_call: the number of tokens per call of the compiled loop.
    """

    def __init__(self, model: Model, params: Params, tokens_per_call: int = 1) -> None:
        # `stream` replaces these settings for each text.
        sampling = sampling_params(Sampling(), model.config.vocab_size)
        super().__init__(
            model, params, sampling, num_rows=1, tokens_per_call=tokens_per_call, spare=SPARE
        )
        # The final size of the conversation is unknown: let the cache grow up to the model's limit.
        self._reader.most = model.config.max_length + tokens_per_call
        self._last: Text | None = None
        # The largest number of tokens that this cache has had (`Cache.can_go_back`).
        self._most_written = 0

    @property
    def num_read(self) -> int:
        """The number of tokens that the model has read so far."""
        return self.usage.tokens_read + self.usage.positions_advanced

    def stream(
        self, context: Sequence[int], request: GenerationRequest, keys: RowKeys
    ) -> Iterator[int]:
        """Continues a context token by token, like `Generator.stream`.

        Args:
          context: all tokens of the context, from one up to the model's `max_length`.
          request: a request with one beam.
          keys: a single key, from `sampling_keys(seed, 1)`.

        Yields:
          New tokens, up to `request.max_new_tokens` or the last position.

        Raises:
          UserError: the context is empty or too long, the request asks for beam search, or the
            logits are NaN or infinite.
        """
        config = self._config
        longest = config.max_length
        problem = f"the context has {len(context)} tokens: the model takes 1 to {longest}"
        require(1 <= len(context) <= longest, problem)
        require(
            request.num_beams == 1, f"num_beams {request.num_beams} must be 1 in a conversation"
        )
        self._sampling = sampling_params(
            request,
            config.vocab_size,
            banned=request.bad_words_ids,
            greedy=not request.samples,
            scored=False,
        )
        # If the caller stopped early, drop the unfinished text, but keep its cache.
        self._texts = [None]
        limit = min(request.max_new_tokens or longest, longest - len(context) + 1)
        self.add(0, context, key=keys, limit=limit)
        for written in self:
            yield from written.tokens

    def _read(self, texts: Sequence[Text]) -> tuple[Float[Array, "1 V"], RowCaches]:
        """Reads the tokens of a context that are not in the cache."""
        (text,) = texts
        tokens, reader, config = text.context, self._reader, self._config
        rows, common = self._kept(tokens)
        if rows is None:
            rows = reader.empty(1, len(tokens))
            common = self._most_written = 0
        # Grow the cache if needed, and remove the tokens after the common prefix.
        rows = reader.with_space(rows, len(tokens)).moved_to(jnp.asarray([common]))
        logits: Any = None
        start, sizes = common, divided(len(tokens) - common, CHUNKS)
        # Read the whole text at once if its length determines the rotary frequencies: the first
        # of several chunks would get the frequencies of a short text.
        if start == 0 and rotates_by_length(config, len(tokens)):
            sizes = [len(tokens)]
        for size in sizes:
            piece = np.asarray([tokens[start : start + size]], np.int32)
            logits, rows = read_more(reader.model, reader.params, piece, rows)
            start += size
        self.usage.tokens_read += len(tokens) - common
        text.slot, text.room = len(tokens), tokens_left(config, len(tokens))
        self._last = text
        return logits, rows

    def _kept(self, tokens: Sequence[int]) -> tuple[RowCaches | None, int]:
        """Returns the caches of the last text (or None) and the number of reusable tokens."""
        if self._state is None or self._last is None:
            return None, 0
        rows, config, limit = self._state.context, self._config, self._config.reread_length
        assert isinstance(rows, RowCaches)
        cached = self._last.context[: self._last.slot]
        self._most_written = max(self._most_written, self._last.slot)
        # The last token must be read again, because its logits are needed.
        common = min(common_prefix(cached, tokens), len(tokens) - 1)
        # A convolution stores only the inputs of the last tokens, so no tokens can be removed.
        convolved = common < self._last.slot and bool(config.recent_shapes)
        # The rotation of cached keys depends on whether the text is longer than `reread_length`
        # (LongRoPE), so read the text again when its length crosses this limit.
        crossed = limit is not None and (len(cached) > limit) != (len(tokens) > limit)
        if convolved or crossed or not rows.cache.can_go_back(self._most_written, common):
            return None, 0
        return rows, common


def rotates_by_length(config: TransformerConfig, length: int) -> bool:
    """Returns whether texts of this length have different rotary frequencies than shorter texts."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return False
    return length > (scaling.original_length or config.max_length)
