"""A continuous batch for a server: texts join and leave while others grow, each with its settings.

A text is read alone, in pieces of few sizes, so that a long context does not stall the rows, and
its tokens do not depend on other texts. The number of rows grows and shrinks in powers of four, so
that few programs are compiled.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...model import Model
from ...nn.typing import Array, Float, Params
from ..banned_sequences import BannedSequences, banned_sequences
from ..cached_context import rotates_by_length
from ..continuous_batch import ContinuousBatch, Text, Written, num_slots, read_length, tokens_left
from ..padding import round_up, shortened
from ..rows import (
    NewTokens,
    RowCaches,
    RowStates,
    choose_first,
    enter_rows,
    read_contexts,
    read_more,
    take_rows,
)
from ..sample import History, SamplingParams
from .row_sampling import OpenText, TextSampling, row_history, row_sampling

CHUNKS = (512, 128, 32)
"""Contexts are read in pieces of these sizes."""
ROW_STEP = 4
"""The numbers of rows are powers of this number."""


@dataclasses.dataclass
class _Reading:
    """A text whose context is being read."""

    text: OpenText
    row: int
    ids: np.ndarray
    """The tokens with padding on the left, int32[1, T]."""
    pieces: list[int]
    """The sizes of the pieces that have not been read."""
    rows: RowCaches | None = None


class OpenBatch(ContinuousBatch):
    """A continuous batch that texts may enter at any time.

    Example::

        batch.enter(0, [1, 2, 3], key=key, limit=9, sampling=TextSampling())
        while batch.is_busy:
            for written in batch.step():
                ...

    Args:
      model: a causal language model, in the layout of `unstack_layers`.
      params: its parameters.
      max_rows: the maximum number of rows.
      tokens_per_call: the number of tokens per call of the compiled loop.
      banned: sequences of tokens that are never generated.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        max_rows: int,
        tokens_per_call: int = 1,
        banned: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(model, params, None, num_rows=1, tokens_per_call=tokens_per_call)
        longest = model.config.max_length
        # The lengths of later texts are unknown, so caches may grow up to the model's limit.
        self._reader.most = round_up(longest, CHUNKS[-1]) + tokens_per_call
        self._max_rows = max_rows
        self._banned: BannedSequences = banned_sequences(banned, model.config.vocab_size)
        self._reading: _Reading | None = None
        self._has_changed = False

    @property
    def is_busy(self) -> bool:
        """Whether a text waits or grows."""
        return bool(self._waiting or self._reading or any(self._texts))

    @property
    def num_rows(self) -> int:
        """The number of rows at present."""
        return len(self._texts)

    @property
    def num_growing(self) -> int:
        """The number of rows that have a text."""
        return sum(text is not None for text in self._texts)

    @property
    def row_numbers(self) -> list[int]:
        """The numbers of rows that the batch may have."""
        sizes = [1]
        while sizes[-1] < self._max_rows:
            sizes.append(min(sizes[-1] * ROW_STEP, self._max_rows))
        return sizes

    def enter(
        self,
        number: int,
        prompt: Sequence[int],
        *,
        key: np.ndarray,
        limit: int,
        sampling: TextSampling,
    ) -> None:
        """Adds a text, which waits for a free row.

        Args:
          number: a unique number that identifies the text.
          prompt: the tokens of the prompt, at least one.
          key: the words of its random key, from `text_key`.
          limit: the maximum number of new tokens.
          sampling: how they are chosen.
        """
        context = list(prompt)
        self._waiting[number] = OpenText(
            number, context, set(context), None, limit, words=key, sampling=sampling
        )

    def stop(self, number: int) -> None:
        """Ends a text, or removes one that waits or is read."""
        super().stop(number)
        self._has_changed = True
        if self._reading is not None and self._reading.text.number == number:
            self._reading = None

    def clear(self) -> None:
        """Removes all texts."""
        self._waiting.clear()
        self._reading, self._state, self._texts = None, None, [None]

    def step(self) -> list[Written]:
        """Reads at most one large piece of contexts, then advances all rows by one call.

        Raises:
          UserError: the logits are NaN or infinite.
        """
        self._resize()
        written = self._read_pieces()
        if any(self._texts):
            self._renew()
            written += self._advance()
            self._leave_full()
        return written

    def _resize(self) -> None:
        """Changes the number of rows to the number that the texts need."""
        taken = [row for row, text in enumerate(self._texts) if text is not None]
        needed = len(taken) + len(self._waiting) + (self._reading is not None)
        most = next(size for size in self.row_numbers if size >= min(needed, self._max_rows))
        now = len(self._texts)
        # Shrink only if the rows would soon be shrunk again, because each change copies the caches.
        if most == now or (most < now and needed * ROW_STEP > now):
            return
        if self._reading is not None and most < now:
            return
        state = self._state
        if state is not None and taken:
            # Move the texts to the first rows. Free rows repeat the first text as a placeholder.
            rows = [*taken, *taken[:1] * (most - len(taken))]
            context = take_rows(state.context, np.asarray(rows, np.int32))
            self._state = dataclasses.replace(state, context=context)
        else:
            self._state = None
        texts = [self._texts[row] for row in taken]
        self._texts = [*texts, *[None] * (most - len(texts))]
        # The text that is being read keeps a free row, the first one after the moved texts.
        if self._reading is not None:
            self._reading.row = len(texts)
        self._has_changed = True

    def _read_pieces(self) -> list[Written]:
        """Reads contexts up to the size of the largest piece; returns the first new tokens."""
        left, written = CHUNKS[0], []
        while left > 0:
            reading = self._reading or self._begin_reading()
            if reading is None:
                break
            self._reading = reading
            size = reading.pieces.pop(0)
            left -= size
            logits = self._read_piece(reading, size)
            if not reading.pieces:
                self._reading = None
                written.append(self._finish(reading, logits))
        return written

    def _begin_reading(self) -> _Reading | None:
        """Returns the next text to read, if one waits and a row is free."""
        row = next((row for row, text in enumerate(self._texts) if text is None), None)
        if row is None or not self._waiting:
            return None
        text, config = self._next(), self._config
        assert isinstance(text, OpenText)
        text.context = shortened(text.context, config.max_length)
        length = len(text.context)
        # Pad to a multiple of the smallest piece, then divide into the largest pieces that fit.
        padded, pieces = round_up(length, CHUNKS[-1]), []
        if rotates_by_length(config, length):
            # The first piece alone would be rotated like a short text, so read all at once.
            padded = read_length(length, config.max_length)
            pieces = [padded]
        while sum(pieces) < padded:
            pieces.append(next(size for size in CHUNKS if size <= padded - sum(pieces)))
        ids = np.zeros((1, padded), np.int32)
        ids[0, padded - length :] = text.context
        text.slot, text.room = padded, tokens_left(config, length)
        return _Reading(text, row, ids, pieces)

    def _read_piece(self, reading: _Reading, size: int) -> Float[Array, "1 V"]:
        """Reads the next tokens of a context; returns the logits after them."""
        reader, total = self._reader, reading.ids.shape[1]
        # `pieces` lists the pieces after this one, so this one ends `left` tokens before the end.
        left = sum(reading.pieces)
        ids = reading.ids[:, total - left - size : total - left]
        self.usage.tokens_read += size
        self.usage.positions_read += size
        # The first piece creates caches for the whole context, and further pieces extend them.
        if reading.rows is None:
            padding = np.asarray([total - len(reading.text.context)], np.int32)
            logits, reading.rows = read_contexts(
                reader.model,
                reader.params,
                ids,
                padding,
                kind=RowCaches,
                length=num_slots(total + reader.step, reader.most),
                spare=0,
            )
        else:
            logits, reading.rows = read_more(reader.model, reader.params, ids, reading.rows)
        return logits

    def _finish(self, reading: _Reading, logits: Float[Array, "1 V"]) -> Written:
        """Puts a text that was read into its row; returns its first new token."""
        text, row, read = reading.text, reading.row, reading.rows
        assert read is not None
        state = self._state
        # Without other texts, begin with empty rows of the length that this text needs.
        if state is None or not any(self._texts):
            context = self._reader.empty(len(self._texts), text.slot)
        else:
            context = state.context
        self._texts[row], self._has_changed = text, True
        assert isinstance(context, RowCaches)
        # All rows have caches of equal length, so lengthen them if this text needs more slots.
        context = self._reader.with_space(context, max(x.slot for x in self._texts if x))
        context = enter_rows(context, jnp.int32(row), read)
        history, sampling = self._settings([text])
        new, _ = choose_first(logits, history, sampling=sampling)
        # `_renew` replaces the tokens and the history of all rows before the next call.
        nothing = jnp.zeros((len(self._texts),), jnp.int32)
        past = history if state is None else state.past
        self._state = RowStates(context, nothing, past)
        self.usage.contexts += 1
        return self._append(row, text, jax.device_get(new), 0, length=1)

    def _append(self, row: int, text: Text, new: NewTokens, index: int, *, length: int) -> Written:
        written = super()._append(row, text, new, index, length=length)
        assert isinstance(text, OpenText)
        text.chosen.extend(written.tokens)
        if self._texts[row] is None:
            self._has_changed = True
        # They are computed if any text requests them.
        number = text.sampling.num_alternatives
        written.alternatives = [best[:number] for best in written.alternatives] if number else []
        return written

    def _renew(self) -> None:
        """Sets the newest tokens, the history and the settings of all rows after a change."""
        if self._has_changed:
            assert self._state is not None
            texts = [text if isinstance(text, OpenText) else None for text in self._texts]
            past, self._sampling = self._settings(texts)
            tokens = np.asarray([text.context[-1] if text else 0 for text in texts], np.int32)
            self._state = dataclasses.replace(self._state, tokens=tokens, past=past)
            self._has_changed = False

    def _leave_full(self) -> None:
        """Moves texts whose context must be read again from their rows to the waiting texts."""
        for row, text in enumerate(self._texts):
            if text is not None and text.room == 0:
                self._texts[row], self._has_changed = None, True
                self._waiting[text.number] = text
                # A text that has begun is read before new texts.
                self._waiting.move_to_end(text.number, last=False)

    def _settings(self, texts: Sequence[OpenText | None]) -> tuple[History, SamplingParams]:
        """Returns the history and the settings of rows; None for rows without a text."""
        history = row_history(texts, self._config.vocab_size, self._banned.prefix_length)
        return history, row_sampling(texts, self._config.vocab_size, self._banned)
