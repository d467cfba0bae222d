"""Beam search for any model that writes; greedy search is that with one beam.

- Scores divided by a length penalty, an end when nothing can win any more: Wu et al. 2016,
  "Google's neural machine translation system", equation 14; Vaswani et al. 2017, section 6.1.
- Of all continuations of a row's K beams the best 2 K are looked at: those of the best K that end
  are finished hypotheses, the best K that do not are the next beams (as transformers does).

The whole search is one compiled loop; every row runs by itself, and what it finds does not depend
on the others. The K beams of a row are K queries to one cache of the row: what a beam decoded
stays where it was written, and choosing beams reorders only who sees which slot. So neither the
keys and values of a source or prompt nor those of what is decoded are ever copied. `beam_models`
says how models differ.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...data.errors import UserError
from ..nn.typing import Array, Int
from .banned_sequences import bad_words, check_bad_words, newest
from .beam_adapters import CausalBeams, EncoderDecoderBeams, beams_of
from .beam_step import (
    BeamState,
    Finished,
    Rules,
    best_candidates,
    choose,
    empty_state,
)
from .unstack_layers import separate_layers

ROW_BUCKET = 16
TOKEN_BUCKET = 32

MAX_PENALTY = 10
"""Powers of a length beyond it leave float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """How tokens are searched for.

    Raises:
      UserError: a value is outside its range.
    """

    num_beams: int = 4
    """How many beginnings of each row are kept, K; 1: greedy search."""
    length_penalty: float = 0.6
    """α: log-probabilities are divided by a power α of the length n, the end token counted.
    Greedy search has none."""
    penalty_form: Literal["gnmt", "power"] = "gnmt"
    """gnmt: ((5 + n) / 6)^α, as published. power: n^α, as transformers has it."""
    early_stopping: bool | Literal["never"] = "never"
    """never: a row goes on until no live beam can win. True, False: as transformers means them:
    until K hypotheses are found, or until a beam that ended now would not be among them."""
    num_return: int = 1
    """How many hypotheses of each row are answered, at most K."""
    max_extra_tokens: int | None = 50
    """Longest target, in tokens beyond its source's; None: what the model has room for."""
    max_new_tokens: int | None = None
    """Longest target, in tokens."""
    suppressed_tokens: tuple[int, ...] = ()
    """Tokens never to be chosen, for example padding."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Words of several tokens never to be written."""
    renormalize: bool = False
    """Whether probabilities are among the tokens that may be chosen, not among all."""
    force_eos: bool = False
    """Whether the last token that there is room for is the end token. It is no choice, and its
    probability is not counted (as transformers does)."""

    @property
    def unwanted(self) -> list[tuple[int, ...]]:
        """All words never to be written, those of one token included."""
        return [*((token,) for token in self.suppressed_tokens), *self.bad_words]

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise UserError(f"num_beams {self.num_beams} must be at least 1 (1: greedy)")
        if not abs(self.length_penalty) <= MAX_PENALTY:  # nor is NaN
            raise UserError(
                f"length_penalty {self.length_penalty} must be between -{MAX_PENALTY} and "
                f"{MAX_PENALTY}, for example 0.6"
            )
        if not 1 <= self.num_return <= self.num_beams:
            raise UserError(
                f"num_return {self.num_return} must be between 1 and num_beams {self.num_beams}"
            )
        if self.max_extra_tokens is not None and self.max_extra_tokens < 0:
            raise UserError(f"max_extra_tokens {self.max_extra_tokens} must be at least 0")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A sequence of tokens that was found."""

    tokens: list[int]
    """Without start and end token, and without the prompt."""
    score: float
    """What hypotheses are ranked by: `log_probability`, divided by the length penalty."""
    log_probability: float
    """Of the tokens, the end token included, in nats."""
    end_id: int | None
    """The token that ended it; None: it was cut at its longest."""

    @property
    def ended(self) -> bool:
        """Whether it ended by itself."""
        return self.end_id is not None


class Searcher:
    """Compiled search for one model.

    Holds the parameters as `models.separate_layers` lays them out, beside the
    caller's stacked ones.

    Raises:
      UserError: the model writes no text.
    """

    def __init__(self, model: Any, params: Any) -> None:
        self.config = model.config
        beams_of(model)  # before any parameter is laid out
        model, self._params = separate_layers(model, params)
        self._model = beams_of(model)

    def search(
        self,
        rows: Sequence[Sequence[int]],
        eos_ids: Sequence[int],
        settings: BeamSearch,
        start_id: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The best targets of some sources, or continuations of some prompts, searched together.

        Compiled once for each number of rows and of unwanted words up to a
        power of 2, length of the longest row up to a multiple of 16, and of
        the longest target up to one of 32; and for each number of beams, and
        each setting that is a word or a truth value.

        Args:
          rows: tokens of each source, with its end token; or of each prompt.
          eos_ids: tokens that end a target, or none. The first is the one that
            `settings.force_eos` forces.
          settings: how to search.
          start_id: what targets of an encoder-decoder begin with.

        Returns:
          Of each row up to `num_return` hypotheses, the best first.

        Raises:
          UserError: a row is empty or longer than `max_length`, or an id is
            not in the vocabulary.
        """
        start = () if start_id is None else (start_id,)
        self._check(rows, start, eos_ids, settings)
        if not rows:
            return []
        ids, mask, limits = self._pad(rows, settings)
        rules = _rules(settings, eos_ids)
        written = [list(start) or row for row in rows] + [()] * (len(ids) - len(rows))
        finished = run(
            self._model,
            self._params,
            ids,
            mask,
            limits,
            newest(written, rules.bad_words.num_recent),
            jnp.int32(start_id or 0),
            rules,
            num_beams=settings.num_beams,
            num_tokens=_round_up(int(limits.max()), TOKEN_BUCKET),
        )
        found = jax.tree.map(np.asarray, finished)
        if not (found.scores[: len(rows), 0] > -np.inf).all():  # nor is NaN
            raise UserError(
                "the search found nothing: the model's scores are not numbers; look at its "
                "parameters"
            )
        return [list(_hypotheses(found, row, eos_ids, settings)) for row in range(len(rows))]

    def _check(
        self,
        rows: Sequence[Sequence[int]],
        start: Sequence[int],
        eos_ids: Sequence[int],
        settings: BeamSearch,
    ) -> None:
        c, row, known = self.config, self._model.row, self._model.vocab_size
        for number, ids in enumerate(rows):
            if not 1 <= len(ids) <= c.max_length:
                raise UserError(
                    f"{row} {number} has {len(ids)} tokens: the model takes 1 to {c.max_length}"
                )
            if not 0 <= min(ids) <= max(ids) < known:
                raise UserError(
                    f"token ids {min(ids)} … {max(ids)} of {row} {number} are not within the "
                    f"vocabulary of {known}: use the model's own tokenizer"
                )
        for name, token in (
            *(("start_id", token) for token in start),
            *(("eos_id", token) for token in eos_ids),
        ):
            if not 0 <= token < c.vocab_size:
                raise UserError(f"{name} {token} is not within the vocabulary of {c.vocab_size}")
        check_bad_words(settings.unwanted, c.vocab_size)

    def _pad(
        self, rows: Sequence[Sequence[int]], settings: BeamSearch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and mask, padded to their bucket, and the longest target of each row."""
        number = 2 ** (len(rows) - 1).bit_length()
        length = min(_round_up(max(map(len, rows)), ROW_BUCKET), self.config.max_length)
        ids, mask = np.zeros((2, number, length), np.int32)
        limits = np.zeros((number,), np.int32)  # of rows that only pad: done before they begin
        for i, row in enumerate(rows):
            first = length - len(row) if self._model.pads_left else 0
            ids[i, first : first + len(row)] = row
            mask[i, first : first + len(row)] = 1
            extra, new = settings.max_extra_tokens, settings.max_new_tokens
            room = self._model.room(len(row))
            limits[i] = min(
                room,
                room if extra is None else len(row) + extra,
                room if new is None else new,
            )
        return ids, mask, limits


class Translator:
    """Compiled search for one encoder-decoder."""

    def __init__(self, model: Any, params: Any) -> None:
        self.config = model.config
        self._searcher = Searcher(model, params)

    def search(
        self,
        source_ids: Sequence[Sequence[int]],
        start_id: int,
        eos_id: int,
        settings: BeamSearch = BeamSearch(),
    ) -> list[list[Hypothesis]]:
        """The best translations of some sources, searched for together.

        Args:
          source_ids: tokens of each source, with its end token.
          start_id: what targets begin with.
          eos_id: what targets end with.
          settings: how to search.

        Returns:
          Of each source up to `num_return` hypotheses, the best first.

        Raises:
          UserError: as `Searcher.search`.
        """
        return self._searcher.search(source_ids, (eos_id,), settings, start_id)


def _rules(settings: BeamSearch, eos_ids: Sequence[int]) -> Rules:
    greedy = settings.num_beams == 1
    return Rules(
        length_penalty=jnp.float32(0.0 if greedy else settings.length_penalty),
        eos_ids=jnp.asarray(eos_ids or [-1], jnp.int32),
        num_return=jnp.int32(settings.num_return),
        bad_words=bad_words(settings.unwanted),
        penalty_form=settings.penalty_form,
        early_stopping=True if greedy else settings.early_stopping,
        force_eos=settings.force_eos,
        renormalize=settings.renormalize,
    )


# Of all searchers: a model that was searched before is not compiled anew.
@functools.partial(jax.jit, static_argnames=("model", "num_beams", "num_tokens"))
def run(
    model: EncoderDecoderBeams | CausalBeams,
    params: dict[str, Any],
    ids: Int[Array, "B P"],
    mask: Int[Array, "B P"],
    limits: Int[Array, " B"],
    recent: Int[Array, "B R"],
    start_id: Int[Array, ""],
    rules: Rules,
    num_beams: int,
    num_tokens: int,
) -> Finished:
    """The whole search."""
    # The K tokens of each step have a slot, but for the last.
    begun = model.begin(params, ids, mask, start_id, num_beams * (num_tokens - 1))
    state = empty_state(begun.cache, begun.sees, recent, limits, num_beams, num_tokens)
    candidates = best_candidates(
        begun.logits,
        jnp.zeros((ids.shape[0], 1), jnp.float32),
        state.recent[:, :1],
        limits == 1,
        rules,
        num_beams,
    )
    state = jax.lax.while_loop(
        # The second ends it whatever the scores are: NaN is never done.
        lambda state: jnp.any(~state.done) & (state.count < jnp.max(limits)),
        lambda state: _step(model, params, mask, limits, rules, state),
        choose(state, candidates, limits, rules),
    )
    return state.finished


def _step(
    model: EncoderDecoderBeams | CausalBeams,
    params: dict[str, Any],
    mask: Int[Array, "B P"],
    limits: Int[Array, " B"],
    rules: Rules,
    state: BeamState,
) -> BeamState:
    """Another token of every beam."""
    num_beams = state.tokens.shape[1]
    tokens = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, axis=2, keepdims=False)
    own = state.cache.index + jnp.arange(num_beams)
    sees = state.sees | (jnp.arange(state.sees.shape[-1]) == own[:, None])
    output = model.step(params, mask, tokens, sees, state.count, state.cache)
    candidates = best_candidates(
        output.logits,
        state.log_probs,
        state.recent,
        limits == state.count + 1,
        rules,
        num_beams,
    )
    state = dataclasses.replace(state, cache=output.cache, sees=sees)
    return choose(state, candidates, limits, rules)


def _hypotheses(found: Finished, row: int, eos_ids: Sequence[int], settings: BeamSearch):
    for beam in range(settings.num_return):
        if found.scores[row, beam] == -np.inf:
            return
        tokens = found.tokens[row, beam, : found.lengths[row, beam]].tolist()
        ended = tokens[-1] in eos_ids
        yield Hypothesis(
            tokens[:-1] if ended else tokens,
            float(found.scores[row, beam]),
            float(found.log_probs[row, beam]),
            tokens[-1] if ended else None,
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
