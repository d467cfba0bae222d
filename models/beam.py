"""Beam search for an encoder-decoder; greedy search is that with one beam.

- Scores divided by a length penalty, an end when nothing can win any more: Wu et al. 2016,
  "Google's neural machine translation system", equation 14; Vaswani et al. 2017, section 6.1.
- Of all continuations of a row's K beams the best 2 K are looked at: those of the best K that end
  are finished hypotheses, the best K that do not are the next beams (as transformers does).

The whole search is one compiled loop; every row runs by itself, and what it finds does not depend
on the others. The K beams of a row are K queries to one cache of the row: what a beam decoded
stays where it was written, and choosing beams reorders only who sees which slot. So neither the
encoder's keys and values nor the decoder's are ever copied.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .attention import init_cache
from .beam_step import BeamState, Finished, Rules, best_candidates, choose, empty_state
from .decoding_layout import separate_layers

SOURCE_BUCKET = 16
TARGET_BUCKET = 32

MAX_PENALTY = 10
"""Powers of a length beyond it leave float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """How translations are searched for.

    Raises:
      ValueError: a value is outside its range.
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
    """Longest target, in tokens beyond its source's; None: the model's `max_length`."""
    max_new_tokens: int | None = None
    """Longest target, in tokens."""
    suppressed_tokens: tuple[int, ...] = ()
    """Tokens never to be chosen, for example padding."""
    renormalize: bool = False
    """Whether probabilities are among the tokens that may be chosen, not among all."""
    force_eos: bool = False
    """Whether the last token that there is room for is the end token. It is no choice, and its
    probability is not counted (as transformers does)."""

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise ValueError(f"num_beams {self.num_beams} must be at least 1 (1: greedy)")
        if not abs(self.length_penalty) <= MAX_PENALTY:  # nor is NaN
            raise ValueError(
                f"length_penalty {self.length_penalty} must be between -{MAX_PENALTY} and "
                f"{MAX_PENALTY}, for example 0.6"
            )
        if not 1 <= self.num_return <= self.num_beams:
            raise ValueError(
                f"num_return {self.num_return} must be between 1 and num_beams {self.num_beams}"
            )
        if self.max_extra_tokens is not None and self.max_extra_tokens < 0:
            raise ValueError(f"max_extra_tokens {self.max_extra_tokens} must be at least 0")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A translation that was found."""

    tokens: list[int]
    """Without start and end token."""
    score: float
    """What hypotheses are ranked by: `log_probability`, divided by the length penalty."""
    log_probability: float
    """Of the tokens, the end token included, in nats."""
    ended: bool
    """Whether it ended by itself, or else was cut at its longest."""


class Translator:
    """Compiled search for one model.

    Holds the parameters as `models.separate_layers` lays them out, beside the
    caller's stacked ones.
    """

    def __init__(self, model: Any, params: Any) -> None:
        self.config = model.config
        self._model, self._params = separate_layers(model, params)
        self._search = jax.jit(self._run, static_argnames=("num_beams", "num_tokens"))

    def search(
        self,
        source_ids: Sequence[Sequence[int]],
        start_id: int,
        eos_id: int,
        settings: BeamSearch = BeamSearch(),
    ) -> list[list[Hypothesis]]:
        """The best translations of some sources, searched for together.

        Compiled once for each number of rows and of suppressed tokens up to a
        power of 2, length of the longest source up to a multiple of 16, and of
        the longest target up to one of 32; and for each number of beams, and
        each setting that is a word or a truth value.

        Args:
          source_ids: tokens of each source, with its end token.
          start_id: what targets begin with.
          eos_id: what targets end with.
          settings: how to search.

        Returns:
          Of each source up to `num_return` hypotheses, the best first.

        Raises:
          ValueError: a source is empty or longer than `max_length`, or an id is
            not in the vocabulary.
        """
        self._check(source_ids, start_id, eos_id, settings)
        if not source_ids:
            return []
        ids, mask, limits = self._pad(source_ids, settings)
        finished = self._search(
            self._params,
            ids,
            mask,
            limits,
            jnp.int32(start_id),
            self._rules(settings, eos_id),
            num_beams=settings.num_beams,
            num_tokens=_round_up(int(limits.max()), TARGET_BUCKET),
        )
        found = jax.tree.map(np.asarray, finished)
        if not (found.scores[: len(source_ids), 0] > -np.inf).all():  # nor is NaN
            raise ValueError(
                "the search found nothing: the model's scores are not numbers; look at its "
                "parameters"
            )
        return [list(_hypotheses(found, row, eos_id, settings)) for row in range(len(source_ids))]

    def _check(
        self,
        source_ids: Sequence[Sequence[int]],
        start_id: int,
        eos_id: int,
        settings: BeamSearch,
    ) -> None:
        c = self.config
        sources = c.vocab_size if c.share_embeddings else c.source_vocab_size or c.vocab_size
        for row, ids in enumerate(source_ids):
            if not 1 <= len(ids) <= c.max_length:
                raise ValueError(
                    f"source {row} has {len(ids)} tokens: the model takes 1 to {c.max_length}"
                )
            if not 0 <= min(ids) <= max(ids) < sources:
                raise ValueError(
                    f"token ids {min(ids)} … {max(ids)} of source {row} are not within the "
                    f"vocabulary of {sources}: use the model's own tokenizer"
                )
        for name, token in (
            ("start_id", start_id),
            ("eos_id", eos_id),
            *(("suppressed token", token) for token in settings.suppressed_tokens),
        ):
            if not 0 <= token < c.vocab_size:
                raise ValueError(f"{name} {token} is not within the vocabulary of {c.vocab_size}")
        if len(set(settings.suppressed_tokens)) == c.vocab_size:
            raise ValueError(f"all {c.vocab_size} tokens are suppressed: leave some to choose from")

    def _pad(
        self, source_ids: Sequence[Sequence[int]], settings: BeamSearch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids and mask, padded to their bucket, and the longest target of each row."""
        longest = self.config.max_length
        rows = 2 ** (len(source_ids) - 1).bit_length()
        length = min(_round_up(max(map(len, source_ids)), SOURCE_BUCKET), longest)
        ids, mask = np.zeros((2, rows, length), np.int32)
        limits = np.zeros((rows,), np.int32)  # of rows that only pad: done before they begin
        for row, source in enumerate(source_ids):
            ids[row, : len(source)] = source
            mask[row, : len(source)] = 1
            extra, new = settings.max_extra_tokens, settings.max_new_tokens
            limits[row] = min(
                longest,
                longest if extra is None else len(source) + extra,
                longest if new is None else new,
            )
        return ids, mask, limits

    def _rules(self, settings: BeamSearch, eos_id: int) -> Rules:
        greedy = settings.num_beams == 1
        # Some twice, so that few numbers of them are compiled for.
        suppressed = [*settings.suppressed_tokens]
        suppressed += suppressed[:1] * (2 ** (len(suppressed) - 1).bit_length() - len(suppressed))
        return Rules(
            length_penalty=jnp.float32(0.0 if greedy else settings.length_penalty),
            eos_id=jnp.int32(eos_id),
            num_return=jnp.int32(settings.num_return),
            suppressed=jnp.asarray(suppressed, jnp.int32),
            penalty_form=settings.penalty_form,
            early_stopping=True if greedy else settings.early_stopping,
            force_eos=settings.force_eos,
            renormalize=settings.renormalize,
        )

    def _run(
        self,
        params: dict[str, Any],
        ids: jax.Array,
        mask: jax.Array,
        limits: jax.Array,
        start_id: jax.Array,
        rules: Rules,
        num_beams: int,
        num_tokens: int,
    ) -> Finished:
        """The whole search."""
        state = self._begin(params, ids, mask, limits, start_id, rules, num_beams, num_tokens)
        state = jax.lax.while_loop(
            # The second ends it whatever the scores are: NaN is never done.
            lambda state: jnp.any(~state.done) & (state.count < jnp.max(limits)),
            lambda state: self._step(params, mask, limits, rules, state),
            state,
        )
        return state.finished

    def _begin(
        self,
        params: dict[str, Any],
        ids: jax.Array,
        mask: jax.Array,
        limits: jax.Array,
        start_id: jax.Array,
        rules: Rules,
        num_beams: int,
        num_tokens: int,
    ) -> BeamState:
        """Reads the sources; the first token of every beam."""
        rows = ids.shape[0]
        # The start token has a slot, then the K tokens of each step but the last.
        slots = 1 + num_beams * (num_tokens - 1)
        output = self._model.apply(
            {"params": params},
            ids,
            mask,
            decoder_input_ids=jnp.full((rows, 1), start_id),
            cache=init_cache(self.config, self._model.execution, rows, slots),
        )
        state = empty_state(output.cache, limits, num_beams, num_tokens, slots)
        first = jnp.zeros((rows, 1), jnp.float32)
        candidates = best_candidates(output.logits, first, limits == 1, rules, 2 * num_beams)
        return choose(state, candidates, limits, rules)

    def _step(
        self,
        params: dict[str, Any],
        mask: jax.Array,
        limits: jax.Array,
        rules: Rules,
        state: BeamState,
    ) -> BeamState:
        """Another token of every beam."""
        num_beams = state.tokens.shape[1]
        newest = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, axis=2, keepdims=False)
        own = state.cache.index + jnp.arange(num_beams)
        sees = state.sees | (jnp.arange(state.sees.shape[-1]) == own[:, None])
        output = self._model.apply(
            {"params": params},
            None,
            mask,
            decoder_input_ids=newest,
            decoder_attention_mask=sees,
            decoder_position_ids=jnp.full((1, 1), state.count),
            cache=state.cache,
        )
        last = limits == state.count + 1
        candidates = best_candidates(output.logits, state.log_probs, last, rules, 2 * num_beams)
        state = dataclasses.replace(state, cache=output.cache, sees=sees)
        return choose(state, candidates, limits, rules)


def _hypotheses(found: Finished, row: int, eos_id: int, settings: BeamSearch):
    for beam in range(settings.num_return):
        if found.scores[row, beam] == -np.inf:
            return
        tokens = found.tokens[row, beam, : found.lengths[row, beam]].tolist()
        ended = tokens[-1] == eos_id
        yield Hypothesis(
            tokens[:-1] if ended else tokens,
            float(found.scores[row, beam]),
            float(found.log_probs[row, beam]),
            ended,
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
