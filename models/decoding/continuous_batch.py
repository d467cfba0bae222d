"""Continuous batching: where a row of a batch has ended, the next text takes its place.

Orca (Yu et al. 2022), section 4.1. The others go on meanwhile. What a text gets does not depend on
the texts beside it, nor on when it began.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..model import Model
from ..nn.typing import Array, Float, Key, Params
from .banned_sequences import last_tokens
from .padding import cache_stage, pad_rows, power_of_two, round_up, shortened
from .request import GenerationRequest, Sampling
from .rows import (
    NewTokens,
    RowCaches,
    RowStates,
    advance_rows,
    choose_first,
    empty_caches,
    enter_row,
    lengthen,
    move_to,
    read_context,
)
from .sample import require_tokens, sampling_params
from .speculative import Acceptance, Draft, speculate

READ_BUCKET = 32
"""Contexts are read in lengths that are multiples of it, or of a quarter of a power of two."""
SLOT_BUCKET = 64
"""The last length of a cache that grows is a multiple of it."""


@dataclasses.dataclass
class Written:
    """New tokens of one text."""

    text: int
    """The number of the text, as it was started."""
    tokens: list[int]
    log_probs: list[float]
    """The logarithm of each token's probability by the model alone, in nats."""


@dataclasses.dataclass
class Usage:
    """Counts of what a batch computed."""

    tokens_read: int = 0
    """Tokens of contexts."""
    positions_read: int = 0
    """All positions that were read for them, with padding."""
    positions_written: int = 0
    """Tokens that were computed in all rows, those included that nobody waited for."""


@dataclasses.dataclass
class _Text:
    """A text that is being written in a row."""

    number: int
    context: list[int]
    """The tokens that the model has before it, the newest included; the oldest may have fallen."""
    used: set[int]
    """All tokens that it ever had."""
    key: Key[Array, "1"]
    limit: int
    """The greatest number of new tokens."""
    count: int = 0
    """The number of new tokens."""
    slot: int = 0
    """The next slot in the cache."""
    room: int = 0
    """The number of tokens until the model has no more positions."""
    draft_slot: int = 0
    """The next slot in the draft model's cache."""
    draft_length: int = 0
    """The number of tokens that the draft model has before it, the newest included."""


class ContinuousBatch:
    """R rows in which texts are written, each from its own beginning to its own end.

    Args:
      model: a causal language model, in the layout of `unstack_layers`.
      params: its parameters.
      request: the method, a `Sampling`, and what is banned.
      num_rows: the number of rows, R.
      tokens_per_call: the tokens that a call of the compiled loop writes, without a draft.
      draft: a model that proposes tokens, in the same layout.
      acceptance: counts what becomes of these tokens.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        request: GenerationRequest,
        *,
        num_rows: int,
        tokens_per_call: int = 1,
        draft: Draft | None = None,
        acceptance: Acceptance | None = None,
    ) -> None:
        assert isinstance(request.method, Sampling)
        self._model, self._params, self._draft = model, params, draft
        self._sampling = sampling_params(request.method, request.banned, model.config.vocab_size)
        self._step = tokens_per_call if draft is None else draft.num_tokens + 1
        self._spare = 0 if draft is None else draft.num_tokens  # as many are taken back
        self._texts: list[_Text | None] = [None] * num_rows
        self._waiting: OrderedDict[int, _Text] = OrderedDict()
        self._most = self._most_of_draft = 0  # slots
        self._slots = self._slots_of_draft = 0
        self._state: RowStates | None = None
        self._acceptance = Acceptance() if acceptance is None else acceptance
        self.usage = Usage()
        """The counts of positions that have been computed so far."""

    def add(self, number: int, prompt: Sequence[int], *, key: Key[Array, "1"], limit: int) -> None:
        """Adds a text; it waits until a row is free.

        Args:
          number: any number that no other has, by which the text is known from now on.
          prompt: its tokens, at least one.
          key: its key. The new tokens depend on it and on the prompt alone.
          limit: the greatest number of new tokens.
        """
        text = _Text(number, list(prompt), set(prompt), key, limit)
        self._waiting[number] = text
        length = len(prompt)
        longest = self._model.config.max_length
        self._most = max(self._most, _most_slots(longest, length, limit, self._step))
        if self._draft is not None:
            longest = self._draft.model.config.max_length
            needed = _most_slots(longest, length, limit, self._step)
            self._most_of_draft = max(self._most_of_draft, needed)

    def __iter__(self) -> Iterator[Written]:
        """Yields new tokens of all texts, a few at a time, until each has its greatest number.

        Whoever reads them may end a text before (`stop`), and add others.

        Raises:
          UserError: the logits are NaN or infinite.
        """
        while self._waiting or any(self._texts):
            while self._waiting and None in self._texts:
                row, (_, text) = self._texts.index(None), self._waiting.popitem(last=False)
                self._texts[row] = text
                yield self._read(row, text)
            if any(self._texts):
                yield from self._advance()

    def stop(self, number: int) -> None:
        """Ends a text, or takes it out before it begins; the next takes its row."""
        self._waiting.pop(number, None)
        for row, text in enumerate(self._texts):
            if text is not None and text.number == number:
                self._texts[row] = None

    def _advance(self) -> list[Written]:
        """Writes further tokens of all texts: one at least of each."""
        self._renew_drafts()
        self._make_space()
        assert self._state is not None
        live = jnp.asarray([text is not None for text in self._texts])
        draft = self._draft
        if draft is None:
            self._state, new = advance_rows(
                self._model,
                self._params,
                self._state,
                live,
                sampling=self._sampling,
                num_tokens=self._step,
            )
        else:
            self._state, new = speculate(
                self._model,
                self._params,
                self._state,
                live,
                draft_model=draft.model,
                draft_params=draft.params,
                sampling=self._sampling,
                num_tokens=draft.num_tokens,
            )
        new = jax.device_get(new)
        self.usage.positions_written += new.tokens.size
        written = []
        for row, text in enumerate(self._texts):
            if text is not None:
                written.append(self._grow(row, text, new))
        return written

    def _grow(self, row: int, text: _Text, new: NewTokens) -> Written:
        """Adds the new tokens of a row to its text; begins anew where it has no more positions."""
        length, most = int(new.lengths[row]), min(text.room, text.limit - text.count)
        if self._draft is not None:
            # Tokens beyond the end of text or context are neither accepted nor refused.
            proposed = min(self._draft.num_tokens, most - 1)
            self._acceptance.add(proposed, min(length, most) - 1)
            text.draft_slot += length
            text.draft_length += length
        text.slot += length
        length = min(length, most)
        tokens, log_probs = new.tokens[row, :length].tolist(), new.log_probs[row, :length].tolist()
        self._append(row, text, tokens)
        if text.room == 0 and text.count < text.limit:
            more = self._read(row, text)
            tokens, log_probs = tokens + more.tokens, log_probs + more.log_probs
        return Written(text.number, tokens, log_probs)

    def _append(self, row: int, text: _Text, tokens: list[int]) -> None:
        require_tokens(tokens)
        text.context.extend(tokens)
        text.used.update(tokens)
        text.count += len(tokens)
        text.room -= len(tokens)
        if text.count == text.limit:
            self._texts[row] = None

    def _read(self, row: int, text: _Text) -> Written:
        """Reads the context of a text into a row; returns the token that follows."""
        model, vocab_size = self._model, self._model.config.vocab_size
        recent = last_tokens([text.context], self._sampling.banned.prefix_length)
        seen = None
        if self._sampling.penalized:
            seen = np.zeros((1, vocab_size), bool)
            seen[0, list(text.used)] = True
            seen = jnp.asarray(seen)
        longest = model.config.max_length
        text.context = shortened(text.context, longest)
        logits, context = self._read_context(model, self._params, text.context)
        count = jnp.full((1,), text.count, jnp.int32)
        new, seen, last = choose_first(
            logits,
            seen,
            jnp.asarray(recent),
            keys=text.key,
            count=count,
            sampling=self._sampling,
        )
        text.slot = read_length(len(text.context), longest)
        text.room = longest - len(text.context) + 1
        one = RowStates(context, new.tokens[:, 0], seen, last, text.key, count + 1)
        if self._draft is not None:
            before = jnp.asarray(text.context[-1:], jnp.int32)
            one = dataclasses.replace(one, draft=self._read_draft(text), before=before)
        self._make_space()
        if self._state is None:
            self._state = self._empty(one)
        self._state = enter_row(self._state, jnp.int32(row), one)
        self.usage.positions_written += 1
        tokens = new.tokens[0].tolist()
        self._append(row, text, tokens)
        return Written(text.number, tokens, new.log_probs[0].tolist())

    def _read_draft(self, text: _Text) -> RowCaches:
        """Reads all of a context but its newest token by the draft model."""
        draft = self._draft
        assert draft is not None
        longest = draft.model.config.max_length
        context = text.context
        if len(context) + draft.num_tokens > longest:
            context = context[-min(longest - draft.num_tokens, longest - longest // 4) :]
        _, read = self._read_context(draft.model, draft.params, context)
        text.draft_slot = read_length(len(context), longest) - 1  # the last one is read again
        text.draft_length = len(context) + 1
        return move_to(read, read.cache.index - 1)

    def _read_context(
        self, model: Model, params: Params, context: list[int]
    ) -> tuple[Float[Array, "1 V"], RowCaches]:
        length = read_length(len(context), model.config.max_length)
        ids, _ = pad_rows([context], length=length, left=True)
        self.usage.tokens_read += len(context)
        self.usage.positions_read += length
        padding = jnp.full((1,), length - len(context), jnp.int32)
        return read_context(model, params, jnp.asarray(ids), padding, spare=self._spare)

    def _empty(self, one: RowStates) -> RowStates:
        """Returns R rows without a text, with the arrays of one."""
        number, draft = len(self._texts), self._draft
        rows = jnp.zeros((number,), jnp.int32)
        return RowStates(
            empty_caches(self._model, number, self._slots, self._spare),
            one.tokens[rows],
            None if one.seen is None else one.seen[rows],
            one.recent[rows],
            one.keys[rows],
            one.count[rows],
            draft=None
            if draft is None
            else empty_caches(draft.model, number, self._slots_of_draft, self._spare),
            before=None if draft is None else rows,
        )

    def _make_space(self) -> None:
        """Makes the caches long enough for the next tokens of all texts."""
        texts = [text for text in self._texts if text is not None]
        needed = max(text.slot for text in texts) + self._step
        if needed > self._slots:
            self._slots = _num_slots(needed, self._most)
            if self._state is not None:
                context = lengthen(self._model, self._state.context, length=self._slots)
                self._state = dataclasses.replace(self._state, context=context)
        if self._draft is None:
            return
        needed = max(text.draft_slot for text in texts) + self._step
        if needed > self._slots_of_draft:
            self._slots_of_draft = _num_slots(needed, self._most_of_draft)
            if self._state is not None:
                assert self._state.draft is not None
                draft = lengthen(self._draft.model, self._state.draft, length=self._slots_of_draft)
                self._state = dataclasses.replace(self._state, draft=draft)

    def _renew_drafts(self) -> None:
        """Reads contexts again where the draft model has no positions for another round."""
        if self._draft is None:
            return
        longest = self._draft.model.config.max_length
        for row, text in enumerate(self._texts):
            if text is not None and text.draft_length + self._draft.num_tokens > longest + 1:
                newest = text.context.pop()
                read = self._read_draft(text)
                text.context.append(newest)
                self._make_space()
                assert self._state is not None
                assert self._state.draft is not None
                draft = enter_row(self._state.draft, jnp.int32(row), read)
                self._state = dataclasses.replace(self._state, draft=draft)


def read_length(length: int, longest: int) -> int:
    """Returns the length in which a context of some tokens is read.

    Few lengths are compiled, and at most a third of one is padding (of a long one).
    """
    return min(round_up(length, max(READ_BUCKET, power_of_two(length) // 4)), longest)


def _num_slots(needed: int, most: int) -> int:
    """Returns the length of caches that have some slots now, and most of all later."""
    least, most = round_up(needed, SLOT_BUCKET), round_up(most, SLOT_BUCKET)
    return max(least, cache_stage(needed, most))


def _most_slots(longest: int, length: int, limit: int, step: int) -> int:
    """Returns the slots that a text needs at most.

    Args:
      longest: the number of positions of the model.
      length: the number of tokens of the prompt.
      limit: the greatest number of new tokens.
      step: the tokens that are written at a time.
    """

    def slots(length: int) -> int:
        return read_length(length, longest) + min(longest - length + 1, limit) + step

    begun = longest - longest // 4 if length > longest else length
    # Where the positions do not suffice, the oldest quarter falls out.
    return max(slots(begun), slots(longest - longest // 4) if length + limit > longest else 0)
