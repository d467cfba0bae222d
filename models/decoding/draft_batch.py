"""A continuous batch whose tokens are proposed by a draft model (`speculative`)."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..model import Model
from ..nn.typing import Array, Key, Params
from .continuous_batch import ContextReader, ContinuousBatch, Text, Written
from .rows import Context, NewTokens, RowCaches, enter_rows
from .sample import History, SamplingParams
from .speculative import Acceptance, Draft, DraftedStates, speculate


class DraftBatch(ContinuousBatch):
    """A continuous batch with a draft model.

    Args:
      model: a causal language model, in the layout of `unstack_layers`.
      params: its parameters.
      sampling: how tokens are chosen.
      num_rows: the number of rows.
      draft: a model that proposes tokens, in the same layout.
      acceptance: counts the accepted draft tokens.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        sampling: SamplingParams,
        *,
        num_rows: int,
        draft: Draft,
        acceptance: Acceptance,
    ) -> None:
        # All draft tokens may be rejected, so ensure that this many tokens can be removed.
        step, spare = draft.num_tokens + 1, draft.num_tokens
        super().__init__(
            model, params, sampling, num_rows=num_rows, tokens_per_call=step, spare=spare
        )
        self._draft, self._acceptance = draft, acceptance
        self._draft_reader = ContextReader(draft.model, draft.params, step, spare, self.usage)

    def add(self, number: int, prompt: Sequence[int], *, key: Key[Array, "1"], limit: int) -> None:
        """Adds a text, which waits for a free row; see `ContinuousBatch`."""
        super().add(number, prompt, key=key, limit=limit)
        self._draft_reader.expect(len(prompt), limit)

    def _states(
        self, texts: Sequence[Text], context: Context, tokens: Array, past: History
    ) -> DraftedStates:
        before = jnp.asarray([text.context[-1] for text in texts], jnp.int32)
        return DraftedStates(context, tokens, past, self._read_draft(texts), before)

    def _read_draft(self, texts: Sequence[Text]) -> RowCaches:
        """Reads the contexts, except for their newest tokens, with the draft model."""
        # Drop the oldest quarter of a context that leaves no room for a round of proposals.
        longest, num_tokens = self._draft.model.config.max_length, self._draft.num_tokens
        most = min(longest - num_tokens, longest - longest // 4)
        contexts = [
            text.context if len(text.context) + num_tokens <= longest else text.context[-most:]
            for text in texts
        ]
        _, rows = self._draft_reader.read(contexts, RowCaches)
        for text, context in zip(texts, contexts, strict=True):
            # `propose` reads the last token again, so go back by one slot.
            text.draft_slot = self._draft_reader.read_length(contexts) - 1
            text.draft_length = len(context) + 1
        return rows.moved_to(rows.cache.index - 1)

    def _advance(self) -> list[Written]:
        self._renew_drafts()
        return super()._advance()

    def _run(self, live: np.ndarray, ahead: int) -> tuple[DraftedStates, NewTokens]:
        return speculate(
            self._reader.model,
            self._reader.params,
            self._with_space(ahead),
            live,
            draft_model=self._draft.model,
            draft_params=self._draft.params,
            sampling=self._sampling,
            num_tokens=self._draft.num_tokens,
        )

    def _grow(self, row: int, text: Text, new: NewTokens) -> Written:
        length, most = int(new.lengths[row]), text.most_new
        # Tokens beyond the end of the text or the context are not counted as proposed.
        proposed = min(self._draft.num_tokens, most - 1)
        self._acceptance.add(proposed, min(length, most) - 1)
        text.draft_slot += length
        text.draft_length += length
        return super()._grow(row, text, new)

    def _with_space(self, ahead: int = 0) -> DraftedStates:
        state = super()._with_space(ahead)
        assert isinstance(state, DraftedStates)
        slot = max(text.draft_slot for _, text in self._present)
        return dataclasses.replace(state, draft=self._draft_reader.with_space(state.draft, slot))

    def _renew_drafts(self) -> None:
        """Reads contexts again if the draft model has too few positions left for another round."""
        longest = self._draft.model.config.max_length
        for row, text in self._present:
            if text.draft_length + self._draft.num_tokens > longest + 1:
                # The draft model's cache excludes the newest token, which `propose` reads.
                newest = text.context.pop()
                read = self._read_draft([text])
                text.context.append(newest)
                state = self._with_space()
                draft = enter_rows(state.draft, jnp.int32(row), read)
                self._state = dataclasses.replace(state, draft=draft)
