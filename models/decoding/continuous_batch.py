"""Generates many texts in a few rows, in lockstep or by continuous batching.

With continuous batching (Orca, Yu et al. 2022, section 4.1), the next text takes the row of a text
that has ended. Rows that advance in lockstep are faster, but new texts begin only when all current
texts have ended. The tokens of a text do not depend on the other texts or on the time when the text
begins.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import TransformerConfig
from ..model import Model
from ..nn.typing import Array, Float, Key, Params
from .padding import cache_stage, pad_rows, power_of_two, round_up, shortened
from .rows import (
    Context,
    NewTokens,
    RowCaches,
    RowStates,
    SharedCache,
    SomeContext,
    advance_rows,
    choose_first,
    enter_rows,
    lengthen,
    read_contexts,
)
from .sample import History, SamplingParams, history_of, require_tokens

READ_BUCKET = 32
"""Contexts are padded to a multiple of this number. Long contexts are padded to a multiple of a
quarter of the next power of two."""
SLOT_BUCKET = 64
"""The final length of a growing cache is a multiple of this number."""


@dataclasses.dataclass
class Written:
    """New tokens of a text."""

    text: int
    """The number that identifies the text, as passed to `ContinuousBatch.add`."""
    tokens: list[int]
    log_probs: list[float]
    """The log-probability of each token under the unmodified logits, in nats, if `scored`."""
    alternatives: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    """The most probable tokens at each position and their log-probabilities, if computed."""


@dataclasses.dataclass
class Usage:
    """The numbers of tokens that a batch has computed."""

    contexts: int = 0
    """Number of contexts that were read. Reading a context also yields one new token."""
    tokens_read: int = 0
    """Number of context tokens that were read."""
    positions_read: int = 0
    """Number of context positions that were read, including padding."""
    positions_advanced: int = 0
    """Number of computed new tokens, except for the first new token of each context. Includes the
    tokens of idle rows."""

    @property
    def positions_written(self) -> int:
        """Number of all computed new tokens."""
        return self.contexts + self.positions_advanced


@dataclasses.dataclass
class Text:
    """A text that is being generated in a row."""

    number: int
    context: list[int]
    """The tokens of the prompt and the new tokens. The oldest tokens may have been dropped."""
    used: set[int]
    """All tokens that have occurred, including dropped tokens, for the repetition penalty."""
    key: Any
    """The random key, `Key[Array, "1"]`; None in an open batch."""
    limit: int
    """The maximum number of new tokens."""
    count: int = 0
    """The number of new tokens."""
    slot: int = 0
    """The next slot in the cache."""
    room: int = 0
    """The number of tokens that can be added before the context must be read again."""
    draft_slot: int = 0
    """The next slot in the draft model's cache."""
    draft_length: int = 0
    """The number of tokens in the draft model's context, including the newest token."""

    @property
    def most_new(self) -> int:
        """The maximum number of tokens that the next call may add."""
        return min(self.room, self.limit - self.count)


@dataclasses.dataclass
class Call:
    """A call of the compiled step, whose result may not be computed yet."""

    texts: list[tuple[int, Text]]
    """The indices of the rows that have a text, and their texts."""
    new: NewTokens


@dataclasses.dataclass
class ContextReader:
    """Reads contexts with the model of a batch or with a draft model, and sizes the caches."""

    model: Model
    params: Params
    step: int
    """The number of slots that one call of the compiled step writes in each row."""
    spare: int
    """The number of newest tokens that can be removed from a cache."""
    usage: Usage
    most: int = 0
    """The maximum number of slots that a text needs."""

    def expect(self, length: int, limit: int) -> None:
        """Makes `most` large enough for a text of `length` tokens and `limit` new tokens."""
        longest = self.model.config.max_length
        self.most = max(self.most, _most_slots(longest, length, limit, self.step))

    def read(
        self,
        contexts: Sequence[Sequence[int]],
        kind: type[SomeContext],
        *,
        with_space: bool = False,
    ) -> tuple[Float[Array, "n V"], SomeContext]:
        """Reads contexts; returns the logits after their last tokens.

        Args:
          contexts: the tokens of each context.
          kind: the class of the cache.
          with_space: whether to add space in the cache for the new tokens of one call.
        """
        length = self.read_length(contexts)
        ids, _ = pad_rows(contexts, length=length, left=True)
        self.usage.tokens_read += sum(map(len, contexts))
        self.usage.positions_read += ids.size
        return read_contexts(
            self.model,
            self.params,
            ids,
            np.asarray([length - len(context) for context in contexts], np.int32),
            kind=kind,
            length=num_slots(length + self.step, self.most) if with_space else length,
            spare=self.spare,
        )

    def read_length(self, contexts: Sequence[Sequence[int]]) -> int:
        """Returns the number of slots that `read` writes, including padding."""
        return read_length(max(map(len, contexts)), self.model.config.max_length)

    def empty(self, num_rows: int, slot: int) -> RowCaches:
        """Returns caches of rows without a text, with space for a call that begins at `slot`."""
        length = num_slots(slot + self.step, self.most)
        padding = jnp.zeros((num_rows,), jnp.int32)
        return RowCaches.empty(self.model, padding, length, self.spare)

    def with_space(self, rows: SomeContext, slot: int) -> SomeContext:
        """Lengthens the caches, if needed, so that another call can begin at slot `slot`."""
        needed = slot + self.step
        if needed <= rows.cache.length:
            return rows
        return lengthen(self.model, rows, length=num_slots(needed, self.most))


class ContinuousBatch:
    """A batch of R rows that generates any number of texts.

    Args:
      model: a causal language model, in the layout of `unstack_layers`.
      params: its parameters.
      sampling: how tokens are chosen.
      num_rows: the number of rows, R.
      lockstep: whether all rows start together and advance together.
      tokens_per_call: the number of tokens per call of the compiled loop.
      spare: the number of newest tokens that can be removed from the caches.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        sampling: SamplingParams,
        *,
        num_rows: int,
        lockstep: bool = False,
        tokens_per_call: int = 1,
        spare: int = 0,
    ) -> None:
        self._sampling, self._lockstep = sampling, lockstep
        self.usage = Usage()
        """Counts of the tokens computed so far."""
        self._reader = ContextReader(model, params, tokens_per_call, spare, self.usage)
        self._texts: list[Text | None] = [None] * num_rows
        self._waiting: OrderedDict[int, Text] = OrderedDict()
        self._state: RowStates | None = None

    @property
    def _config(self) -> TransformerConfig:
        return self._reader.model.config

    @property
    def _present(self) -> list[tuple[int, Text]]:
        """The indices of the rows that have a text, and their texts."""
        return [(row, text) for row, text in enumerate(self._texts) if text is not None]

    def add(self, number: int, prompt: Sequence[int], *, key: Key[Array, "1"], limit: int) -> None:
        """Adds a text, which waits for a free row.

        Args:
          number: a unique number that identifies the text.
          prompt: the tokens of the prompt, at least one.
          key: the random key. The new tokens depend only on the key and the prompt.
          limit: the maximum number of new tokens.
        """
        self._waiting[number] = Text(number, list(prompt), set(prompt), key, limit)
        self._reader.expect(len(prompt), limit)

    def __iter__(self) -> Iterator[Written]:
        """Yields new tokens of all texts, a few at a time, until each text reaches its limit.

        The caller may end texts earlier (`stop`) and add other texts.

        Raises:
          UserError: the logits are NaN or infinite.
        """
        while self._waiting or any(self._texts):
            # Fill free rows, read full contexts again, then advance all rows together.
            while rows := self._rows_to_fill():
                yield from self._begin([(row, self._next()) for row in rows])
            while full := self._full_rows():
                yield from self._begin(full)
            if any(self._texts):
                yield from self._advance()

    def _rows_to_fill(self) -> list[int]:
        """Returns the free rows to fill together with the next texts."""
        free = [row for row, text in enumerate(self._texts) if text is None]
        # The first texts are read together. Each later text is read alone when a row is free.
        most = len(free) if len(free) == len(self._texts) else 0 if self._lockstep else 1
        return free[: min(most, len(self._waiting))]

    def _full_rows(self) -> list[tuple[int, Text]]:
        """Returns the rows, and their texts, that must be read again before they can grow."""
        texts = self._present
        full = [(row, text) for row, text in texts if text.room == 0]
        # Rows in lockstep share one cache, so all of them are read again.
        return texts if full and self._lockstep else full[:1]

    def stop(self, number: int) -> None:
        """Ends a text, or removes a waiting text. The next text takes the row of an ended text."""
        self._waiting.pop(number, None)
        for row, text in self._present:
            if text.number == number:
                self._texts[row] = None

    def _next(self) -> Text:
        return self._waiting.popitem(last=False)[1]

    def _begin(self, pairs: Sequence[tuple[int, Text]]) -> list[Written]:
        """Reads the contexts of texts into rows; returns the first new token of each text.

        Args:
          pairs: rows and their texts. There must be a single pair unless all rows are free or in
            lockstep.
        """
        num_rows, (first, last) = len(self._texts), pairs[-1]
        texts = [last]
        if self._lockstep or not any(self._texts):
            # Copy another text to each row without a text, so that the same program is used for any
            # number of texts.
            first, by_row = 0, dict(pairs)
            texts = [by_row.get(row, last) for row in range(num_rows)]
        # Read the contexts, and choose the first token of each row.
        past = history_of(
            [text.context for text in texts],
            [text.used for text in texts],
            jnp.concatenate([text.key for text in texts]),
            [text.count for text in texts],
            sampling=self._sampling,
            vocab_size=self._config.vocab_size,
        )
        logits, context = self._read(texts)
        self.usage.contexts += len(texts)
        new, past = choose_first(logits, past, sampling=self._sampling)
        state = self._states(texts, context, new.tokens[:, 0], past)
        for row, text in pairs:
            self._texts[row] = text
        # A single text was read alone: copy its caches into its row.
        if len(texts) < num_rows:
            state = enter_rows(self._with_space(), jnp.int32(first), state)
        self._state = state
        new = jax.device_get(new)
        return [self._append(row, text, new, row - first, length=1) for row, text in pairs]

    def _read(self, texts: Sequence[Text]) -> tuple[Float[Array, "n V"], Context]:
        """Reads the contexts of texts; returns the logits after their last tokens."""
        for text in texts:
            text.context = shortened(text.context, self._config.max_length)
            text.room = tokens_left(self._config, len(text.context))
        # Record the next slot of each text, and the number of tokens that can be added to it.
        contexts = [text.context for text in texts]
        # If rows are in lockstep, all of them must be read again as soon as one of them is full.
        least = min(text.room for text in texts)
        for text in texts:
            text.slot = self._reader.read_length(contexts)
            text.room = least if self._lockstep else text.room
        kind = SharedCache if self._lockstep else RowCaches
        return self._reader.read(contexts, kind, with_space=len(texts) == len(self._texts))

    def _states(
        self, texts: Sequence[Text], context: Context, tokens: Array, past: History
    ) -> RowStates:
        """Returns the state of rows whose contexts have been read, given their newest tokens.

        A batch with a draft model overrides this method and reads `texts` with the draft model.
        """
        del texts
        return RowStates(context, tokens, past)

    def _advance(self) -> list[Written]:
        """Generates at least one more token of every text."""
        return self._collect(self._start())

    def _start(self, ahead: int = 0) -> Call:
        """Starts the computation of the next tokens without waiting for the result.

        Args:
          ahead: the number of tokens that an earlier call is still computing for each row.
        """
        # Call the program with all rows, including idle rows, so that the same program is used for
        # any number of texts.
        live = np.asarray([text is not None for text in self._texts])
        self._state, new = self._run(live, ahead)
        return Call(self._present, new)

    def _run(self, live: np.ndarray, ahead: int) -> tuple[RowStates, NewTokens]:
        """Runs the compiled step; returns the new state, and the tokens of all rows."""
        return advance_rows(
            self._reader.model,
            self._reader.params,
            self._with_space(ahead),
            live,
            sampling=self._sampling,
            num_tokens=self._reader.step,
        )

    def _collect(self, call: Call) -> list[Written]:
        """Waits for the tokens of a call, and adds them to the texts that were not stopped."""
        new = jax.device_get(call.new)
        self.usage.positions_advanced += new.tokens.size
        return [self._grow(row, text, new) for row, text in call.texts if self._texts[row] is text]

    def _grow(self, row: int, text: Text, new: NewTokens) -> Written:
        """Adds the new tokens of a row to its text."""
        length = int(new.lengths[row])
        text.slot += length
        return self._append(row, text, new, row, length=min(length, text.most_new))

    def _append(self, row: int, text: Text, new: NewTokens, index: int, *, length: int) -> Written:
        """Adds the first `length` new tokens to the text of a row; ends the text at its limit."""
        tokens = require_tokens(new.tokens[index, :length]).tolist()
        text.context.extend(tokens)
        text.used.update(tokens)
        text.count += length
        text.room -= length
        if text.count == text.limit:
            self._texts[row] = None
        log_probs = [] if new.log_probs is None else new.log_probs[index, :length].tolist()
        best = []
        if new.alternatives is not None:
            # Convert two arrays [N, K] to a list of K pairs (token, log-probability) per position.
            ids, scores = (x[index, :length].tolist() for x in new.alternatives)
            best = [list(zip(*pair, strict=True)) for pair in zip(ids, scores, strict=True)]
        return Written(text.number, tokens, log_probs, best)

    def _with_space(self, ahead: int = 0) -> RowStates:
        """Returns the state, with caches that have space for the next tokens of all texts."""
        assert self._state is not None
        slot = max(text.slot for _, text in self._present) + ahead
        context = self._reader.with_space(self._state.context, slot)
        return dataclasses.replace(self._state, context=context)


def read_length(length: int, longest: int) -> int:
    """Returns the padded length of a context.

    There are few padded lengths, so that few programs are compiled, and at most a third of a long
    context is padding.
    """
    return min(round_up(length, max(READ_BUCKET, power_of_two(length) // 4)), longest)


def tokens_left(config: TransformerConfig, length: int) -> int:
    """Returns the number of tokens that can be added to a row before it must be read again."""
    limit = config.reread_length
    # A row that has crossed `reread_length` is only limited by the positions of the model.
    if limit is None or length > limit:
        limit = config.max_length
    # The newest token needs no position until the next token is generated.
    return min(limit, config.max_length) - length + 1


def num_slots(needed: int, most: int) -> int:
    """Returns the length of a cache with `needed` slots now and at most `most` later."""
    least, most = round_up(needed, SLOT_BUCKET), round_up(most, SLOT_BUCKET)
    return max(least, cache_stage(needed, most))


def _most_slots(longest: int, length: int, limit: int, step: int) -> int:
    """Returns the maximum number of slots that a text needs.

    Args:
      longest: the number of positions of the model.
      length: the number of tokens of the prompt.
      limit: the maximum number of new tokens.
      step: the number of tokens per call.
    """

    def slots(length: int) -> int:
        return read_length(length, longest) + min(longest - length + 1, limit) + step

    prompt = longest - longest // 4 if length > longest else length
    # If the text exceeds the model's positions, the oldest quarter of the context is dropped.
    return max(slots(prompt), slots(longest - longest // 4) if length + limit > longest else 0)
