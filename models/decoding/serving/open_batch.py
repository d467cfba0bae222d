"""A continuous batch for a server: texts with different settings join and leave at any time.

The context of each new text is read separately, in chunks of a few fixed sizes. A long context
therefore does not stall the other rows, and its tokens do not depend on the other texts. The number
of rows changes by factors of four, so that few programs are compiled. The caller processes the
previous tokens while the device computes the next tokens.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...model import Model
from ...nn.typing import Array, Float, Params
from ..banned_sequences import BannedSequences, banned_sequences
from ..continuous_batch import (
    Call,
    ContinuousBatch,
    Text,
    Written,
    num_slots,
    tokens_left,
)
from ..padding import round_up, shortened
from ..rows import (
    Context,
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
from .reading import CHUNKS, Reading, pieces_of
from .row_sampling import IDLE, OpenText, TextSampling, row_history, row_sampling, text_key

ROW_STEP = 4
"""The number of rows of a batch is a power of this number, or the maximum number of rows."""


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
        self._banned: BannedSequences = banned_sequences(banned, model.config.vocab_size)
        sampling = row_sampling([IDLE], model.config.vocab_size, self._banned)
        super().__init__(model, params, sampling, num_rows=1, tokens_per_call=tokens_per_call)
        longest = model.config.max_length
        # The lengths of later texts are unknown, so allow the caches to grow up to the model's
        # maximum length.
        self._reader.most = round_up(longest, CHUNKS[-1]) + tokens_per_call
        self._max_rows = max_rows
        self._reading: Reading | None = None
        self._running: Call | None = None
        self._has_changed = False
        """Whether any text has entered or left a row since the last call started."""

    @property
    def is_busy(self) -> bool:
        """Whether a text waits for a row or is being generated."""
        return bool(self._waiting or self._reading or any(self._texts))

    @property
    def num_rows(self) -> int:
        """The current number of rows."""
        return len(self._texts)

    @property
    def num_growing(self) -> int:
        """The number of rows that have a text."""
        return len(self._present)

    @property
    def row_numbers(self) -> list[int]:
        """All possible numbers of rows of the batch."""
        sizes = [1]
        while sizes[-1] < self._max_rows:
            sizes.append(min(sizes[-1] * ROW_STEP, self._max_rows))
        return sizes

    @property
    def cache_lengths(self) -> list[int]:
        """All possible cache lengths of the rows, in slots."""
        reader, lengths = self._reader, [0]
        while not lengths[-1] >= reader.most:
            lengths.append(num_slots(lengths[-1] + 1, reader.most))
        return lengths[1:]

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
          key: the text's random key as an array of words, from `text_key`.
          limit: the maximum number of new tokens.
          sampling: how the new tokens are chosen.
        """
        context = list(prompt)
        self._waiting[number] = OpenText(
            number, context, set(context), None, limit, words=key, sampling=sampling
        )

    def stop(self, number: int) -> None:
        """Ends a text, or removes a text that waits or is being read."""
        super().stop(number)
        self._has_changed = True
        if self._reading is not None and self._reading.text.number == number:
            self._reading = None

    def clear(self) -> None:
        """Removes all texts."""
        self._waiting.clear()
        self._reading, self._running, self._state, self._texts = None, None, None, [None]

    def step(self) -> list[Written]:
        """Returns the tokens that the last call generated, and starts the next call.

        Before the next call, contexts of new texts are read, in total at most as many tokens as the
        largest chunk has.

        Raises:
          UserError: the logits are NaN or infinite.
        """
        if self._running is not None and self._is_steady():
            # Start the next call before waiting for the results of the last call, so that the
            # device never waits.
            last, self._running = self._running, self._start(ahead=self._reader.step)
            return self._collect(last)
        written = []
        if (size := self._size()) != self.num_rows:
            written += self._finish_call()
            self._resize(size)
        # The contexts are read while the results of the last call are processed.
        read = self._read_pieces()
        written += self._finish_call()
        self._leave_full()
        written += [self._finish(reading, logits) for reading, logits in read]
        if any(self._texts):
            self._renew()
            self._running = self._start()
        return written

    def compile_reading(self, length: int, samplings: Sequence[TextSampling], longest: int) -> None:
        """Compiles the programs that read contexts into caches with a given length.

        Args:
          length: one of `cache_lengths`.
          samplings: the settings of texts; they determine which programs are compiled.
          longest: the number of tokens of the longest context.
        """
        texts = [_placeholder(sampling) for sampling in samplings]
        # Compile the choice of the first token, after the context was read.
        for logits in self._read_all(length, longest):
            for text in texts:
                past, sampling = self._settings([text])
                choose_first(logits, past, sampling=sampling)

    def compile_rows(self, size: int, length: int, samplings: Sequence[TextSampling]) -> None:
        """Compiles the programs for a given number of rows.

        The batch must not contain any text.

        Args:
          size: one of `row_numbers`.
          length: one of `cache_lengths`.
          samplings: the settings of texts; they determine which programs are compiled.
        """
        reader, slot = self._reader, length - self._reader.step
        rows: Context = reader.empty(size, slot)
        # Compile the programs that copy a new row with a shorter cache into the rows, and the
        # programs that lengthen the caches of all rows.
        for other in self.cache_lengths[: self.cache_lengths.index(length) + 1]:
            rows = enter_rows(rows, jnp.int32(0), reader.empty(1, other - reader.step))
            reader.with_space(reader.empty(size, other - reader.step), slot)
        # Compile the programs that increase or decrease the number of rows.
        for other in self.row_numbers[: self.row_numbers.index(size) + 1]:
            take_rows(rows, np.zeros(other, np.int32))
            take_rows(reader.empty(other, slot), np.zeros(size, np.int32))
        for text in map(_placeholder, samplings):
            self._texts = [text] * size
            past, _ = self._settings([text] * size)
            self._state, self._has_changed = RowStates(rows, past.count, past), True
            self._renew()
            self._start()
            rows = self._state.context
        self.clear()

    def _read_all(self, length: int, longest: int) -> Iterator[Float[Array, "1 V"]]:
        """Reads contexts with every chunk size that occurs at a cache length; yields logits."""
        pieces_of_chunk: dict[tuple[bool, int], tuple[int, ...]] = {}
        for number in range(1, min(longest, self._config.max_length) + 1):
            pieces = tuple(pieces_of(number, self._config))
            if num_slots(sum(pieces) + self._reader.step, self._reader.most) == length:
                pieces_of_chunk |= {(i > 0, size): pieces for i, size in enumerate(pieces)}
        for pieces in dict.fromkeys(pieces_of_chunk.values()):
            text = OpenText(0, [0] * sum(pieces), {0}, None, 1)
            reading = Reading(text, np.zeros((1, sum(pieces)), np.int32), [*pieces])
            while reading.pieces:
                yield self._read_piece(reading)

    def _is_steady(self) -> bool:
        """Returns whether the next call can start before the tokens of this call are known."""
        texts, step = [text for _, text in self._present], self._reader.step
        enters = self._reading is not None or (self._waiting and len(texts) < self._max_rows)
        continues = any(text.limit - text.count > step for text in texts)
        has_room = all(text.room > step for text in texts)
        return continues and has_room and not (enters or self._has_changed)

    def _finish_call(self) -> list[Written]:
        """Returns the tokens of the last call, if there was one."""
        last, self._running = self._running, None
        return [] if last is None else self._collect(last)

    def _size(self) -> int:
        """Returns the number of rows that the texts need."""
        needed = self.num_growing + len(self._waiting) + (self._reading is not None)
        sizes, now = self.row_numbers, self.num_rows
        size = sizes[bisect.bisect_left(sizes, min(needed, self._max_rows))]
        # Shrink only if at most a quarter of the rows are needed, because each change copies the
        # caches.
        keeps_rows = self._reading is not None or needed * ROW_STEP > now
        return max(size, now) if keeps_rows else size

    def _resize(self, size: int) -> None:
        """Changes the number of rows."""
        taken, state = [row for row, _ in self._present], self._state
        if state is not None and taken:
            # Move the texts to the first rows. Free rows repeat the first text as a placeholder.
            rows = [*taken, *taken[:1] * (size - len(taken))][:size]
            context = take_rows(state.context, np.asarray(rows, np.int32))
            self._state = dataclasses.replace(state, context=context)
        else:
            self._state = None
        texts = [self._texts[row] for row in taken]
        self._texts = [*texts, *[None] * (size - len(texts))]
        self._has_changed = True

    def _read_pieces(self) -> list[tuple[Reading, Float[Array, "1 V"]]]:
        """Reads contexts, in total about as many tokens as the largest chunk has.

        Returns:
          The contexts that have now been read completely, and the logits after their last tokens.
        """
        left, num_free, read = CHUNKS[0], self._texts.count(None), []
        while left > 0 and len(read) < num_free and (self._reading or self._waiting):
            self._reading = reading = self._reading or self._begin_reading()
            left -= reading.pieces[0]
            logits = self._read_piece(reading)
            if not reading.pieces:
                self._reading = None
                read.append((reading, logits))
        return read

    def _begin_reading(self) -> Reading:
        """Begins to read the next waiting text."""
        text, longest = self._next(), self._config.max_length
        assert isinstance(text, OpenText)
        text.context = shortened(text.context, longest)
        text.room = tokens_left(self._config, len(text.context))
        return Reading.of(text, self._config)

    def _read_piece(self, reading: Reading) -> Float[Array, "1 V"]:
        """Reads the next chunk of a context; returns the logits after its last token."""
        reader, total = self._reader, reading.ids.shape[1]
        first, size = total - sum(reading.pieces), reading.pieces.pop(0)
        ids = reading.ids[:, first : first + size]
        self.usage.tokens_read += size
        self.usage.positions_read += size
        # The first chunk creates a cache for the whole context, and later chunks are added to it.
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

    def _finish(self, reading: Reading, logits: Float[Array, "1 V"]) -> Written:
        """Moves a text into a free row after its context was read; returns its first new token."""
        text, read, row = reading.text, reading.rows, self._texts.index(None)
        assert read is not None
        history, sampling = self._settings([text])
        new, _ = choose_first(logits, history, sampling=sampling)
        # If this is the only text, begin with empty rows that are long enough for it. `_renew` sets
        # the tokens and the history of all rows before the next call.
        if self._state is None or not any(self._texts):
            empty = self._reader.empty(len(self._texts), text.slot)
            self._state = RowStates(empty, history.count, history)
        self._texts[row], self._has_changed = text, True
        # All rows have caches of equal length, so lengthen them if this text needs more slots.
        state = self._with_space()
        context = enter_rows(state.context, jnp.int32(row), read)
        self._state = dataclasses.replace(state, context=context)
        self.usage.contexts += 1
        return self._append(row, text, jax.device_get(new), 0, length=1)

    def _append(self, row: int, text: Text, new: NewTokens, index: int, *, length: int) -> Written:
        written = super()._append(row, text, new, index, length=length)
        assert isinstance(text, OpenText)
        text.chosen.extend(written.tokens)
        if self._texts[row] is None:
            self._has_changed = True
        # If any text requests alternatives, they are computed for all texts.
        number = text.sampling.num_alternatives
        written.alternatives = [best[:number] for best in written.alternatives] if number else []
        return written

    def _renew(self) -> None:
        """Sets the newest tokens, the history and the settings of all rows after a change."""
        if self._has_changed:
            assert self._state is not None
            texts = [text if isinstance(text, OpenText) else IDLE for text in self._texts]
            past, self._sampling = self._settings(texts)
            tokens = np.asarray([text.context[-1] for text in texts], np.int32)
            self._state = dataclasses.replace(self._state, tokens=tokens, past=past)
            self._has_changed = False

    def _leave_full(self) -> None:
        """Moves texts whose contexts must be read again from their rows to the waiting texts."""
        for row, text in self._present:
            if text.room == 0:
                self._texts[row], self._has_changed = None, True
                self._waiting[text.number] = text
                # Put the text before waiting texts that have not begun.
                self._waiting.move_to_end(text.number, last=False)

    def _settings(self, texts: Sequence[OpenText]) -> tuple[History, SamplingParams]:
        """Returns the history and the settings of rows. The text of an idle row is `IDLE`."""
        history = row_history(texts, self._config.vocab_size, self._banned.prefix_length)
        return history, row_sampling(texts, self._config.vocab_size, self._banned)


def _placeholder(sampling: TextSampling) -> OpenText:
    """Returns a text of one token, for the compilation of programs."""
    return OpenText(0, [0], {0}, None, 1, words=text_key(0), sampling=sampling)
