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
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from .attention import Cache, init_cache
from .decoding_layout import separate_layers

SOURCE_BUCKET = 16
TARGET_BUCKET = 32

MAX_PENALTY = 10
"""Powers of a length beyond it leave float32."""

# Width of the blocks whose maxima tell where the best tokens of a large vocabulary are.
BLOCK = 128


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


@struct.dataclass
class Rules:
    """`BeamSearch` and the special tokens, as the compiled search takes them."""

    length_penalty: Float[Array, ""]
    eos_id: Int[Array, ""]
    num_return: Int[Array, ""]
    hidden: Bool[Array, " V"] | None
    """Which tokens are suppressed."""
    penalty_form: str = struct.field(pytree_node=False)
    early_stopping: bool | str = struct.field(pytree_node=False)
    force_eos: bool = struct.field(pytree_node=False)

    def penalty(self, length: Array) -> Array:
        """What the log-probability of `length` tokens is divided by."""
        base = length.astype(jnp.float32)
        if self.penalty_form == "gnmt":
            base = (5 + base) / 6
        return base**self.length_penalty


@struct.dataclass
class Finished:
    """The K best hypotheses of each row, best first; a score of -inf where there is none."""

    tokens: Int[Array, "B K T"]
    scores: Float[Array, "B K"]
    log_probs: Float[Array, "B K"]
    lengths: Int[Array, "B K"]
    """Tokens, the end token included."""


@struct.dataclass
class BeamState:
    """What the compiled loop carries from token to token."""

    cache: Cache
    sees: Bool[Array, "B K S"]
    """Which slots of its row's cache each beam sees: those that its own tokens lie in."""
    tokens: Int[Array, "B K T"]
    log_probs: Float[Array, "B K"]
    """-inf: not a beam."""
    finished: Finished
    done: Bool[Array, " B"]
    count: Int[Array, ""]
    """How many tokens every beam has."""


@struct.dataclass
class Candidates:
    """Continuations of a row's beams by one token, best first."""

    log_probs: Float[Array, "B C"]
    beams: Int[Array, "B C"]
    tokens: Int[Array, "B C"]


class Translator:
    """Compiled search for one model.

    Holds the parameters as `models.separate_layers` lays them out, beside the
    caller's stacked ones.
    """

    def __init__(self, model: Any, params: Any) -> None:
        self.config = model.config
        self._model, self._params = separate_layers(model, params)
        self._search = jax.jit(self._make_search(), static_argnames=("num_beams", "num_tokens"))

    def search(
        self,
        source_ids: Sequence[Sequence[int]],
        start_id: int,
        eos_id: int,
        settings: BeamSearch = BeamSearch(),
    ) -> list[list[Hypothesis]]:
        """The best translations of some sources, searched for together.

        Compiled once for each number of rows up to a power of 2, length of the
        longest source up to a multiple of 16, and of the longest target up to
        one of 32.

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
        hidden = None
        if settings.suppressed_tokens:
            hidden = np.zeros((self.config.vocab_size,), bool)
            hidden[list(settings.suppressed_tokens)] = True
            hidden = jnp.asarray(hidden)
        greedy = settings.num_beams == 1
        return Rules(
            length_penalty=jnp.float32(0.0 if greedy else settings.length_penalty),
            eos_id=jnp.int32(eos_id),
            num_return=jnp.int32(settings.num_return),
            hidden=hidden,
            penalty_form=settings.penalty_form,
            early_stopping=True if greedy else settings.early_stopping,
            force_eos=settings.force_eos,
        )

    def _make_search(self):
        model, config = self._model, self.config

        def begin(params, ids, mask, limits, start_id, rules, num_beams, num_tokens):
            rows = ids.shape[0]
            # The start token has a slot, then the K tokens of each step but the last.
            slots = 1 + num_beams * (num_tokens - 1)
            output = model.apply(
                {"params": params},
                ids,
                mask,
                decoder_input_ids=jnp.full((rows, 1), start_id),
                cache=init_cache(config, model.execution, rows, slots),
            )
            state = _empty_state(output.cache, limits, num_beams, num_tokens, slots)
            first = jnp.zeros((rows, 1), jnp.float32)
            candidates = best_candidates(output.logits, first, limits == 1, rules, 2 * num_beams)
            return choose(state, candidates, limits, rules)

        def step(params, mask, limits, rules, state):
            num_beams = state.tokens.shape[1]
            newest = jax.lax.dynamic_index_in_dim(
                state.tokens, state.count - 1, axis=2, keepdims=False
            )
            own = state.cache.index + jnp.arange(num_beams)
            sees = state.sees | (jnp.arange(state.sees.shape[-1]) == own[:, None])
            output = model.apply(
                {"params": params},
                None,
                mask,
                decoder_input_ids=newest,
                decoder_attention_mask=sees,
                decoder_position_ids=jnp.full((1, 1), state.count),
                cache=state.cache,
            )
            candidates = best_candidates(
                output.logits,
                state.log_probs,
                limits == state.count + 1,
                rules,
                2 * num_beams,
            )
            state = dataclasses.replace(state, cache=output.cache, sees=sees)
            return choose(state, candidates, limits, rules)

        def search(params, ids, mask, limits, start_id, rules, num_beams, num_tokens):
            state = begin(params, ids, mask, limits, start_id, rules, num_beams, num_tokens)
            state = jax.lax.while_loop(
                # The second ends it whatever the scores are: NaN is never done.
                lambda state: jnp.any(~state.done) & (state.count < jnp.max(limits)),
                lambda state: step(params, mask, limits, rules, state),
                state,
            )
            return state.finished

        return search


def _empty_state(
    cache: Cache, limits: Int[Array, " B"], num_beams: int, num_tokens: int, slots: int
) -> BeamState:
    shape = limits.shape[0], num_beams
    tokens = jnp.zeros((*shape, num_tokens), jnp.int32)
    nothing = jnp.full(shape, -jnp.inf)
    return BeamState(
        cache=cache,
        sees=jnp.broadcast_to(jnp.arange(slots) == 0, (*shape, slots)),
        tokens=tokens,
        log_probs=nothing,
        finished=Finished(tokens, nothing, nothing, jnp.zeros(shape, jnp.int32)),
        done=limits == 0,
        count=jnp.int32(0),
    )


def best_candidates(
    logits: Float[Array, "B K V"],
    log_probs: Float[Array, "B K"],
    last: Bool[Array, " B"],
    rules: Rules,
    number: int,
) -> Candidates:
    """The best `number` of all continuations, K · V of them in each row.

    Args:
      logits: of the next token of each beam.
      log_probs: of the beams so far.
      last: rows in which there is no room for another token behind this one.
      rules: what may be chosen.
      number: how many, C; where there are less, the others have -inf.
    """
    rows, num_beams, vocabulary = logits.shape
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    if rules.hidden is not None:
        logits = jnp.where(rules.hidden, -jnp.inf, logits)
    scores, tokens = top_tokens(logits, min(number, vocabulary))
    scores = scores - normaliser[..., None] + log_probs[..., None]
    if rules.force_eos:
        only_end = jnp.where(jnp.arange(scores.shape[-1]) == 0, log_probs[..., None], -jnp.inf)
        scores = jnp.where(last[:, None, None], only_end, scores)
        tokens = jnp.where(last[:, None, None], rules.eos_id, tokens)
    short = max(0, number - scores.shape[-1] * num_beams)
    flat = jnp.pad(scores.reshape(rows, -1), ((0, 0), (0, short)), constant_values=-jnp.inf)
    best, places = jax.lax.top_k(flat, number)
    beams = jnp.minimum(places // scores.shape[-1], num_beams - 1)
    tokens = jnp.take_along_axis(
        jnp.pad(tokens.reshape(rows, -1), ((0, 0), (0, short))), places, axis=1
    )
    return Candidates(best, beams, tokens)


def top_tokens(
    logits: Float[Array, "B K V"], number: int
) -> tuple[Float[Array, "B K C"], Int[Array, "B K C"]]:
    """`lax.top_k`, in one pass over a large vocabulary: the best C are in the best C blocks."""
    vocabulary = logits.shape[-1]
    if vocabulary < 2 * BLOCK * number:
        scores, tokens = jax.lax.top_k(logits, number)
        return scores, tokens
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, -vocabulary % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(*logits.shape[:2], -1, BLOCK)
    _, best = jax.lax.top_k(jnp.max(blocks, axis=-1), number)
    chosen = jnp.take_along_axis(blocks, best[..., None], axis=2)
    scores, places = jax.lax.top_k(chosen.reshape(*logits.shape[:2], -1), number)
    block = jnp.take_along_axis(best, places // BLOCK, axis=-1)
    return scores, block * BLOCK + places % BLOCK


def choose(
    state: BeamState, candidates: Candidates, limits: Int[Array, " B"], rules: Rules
) -> BeamState:
    """The beams that live on, the hypotheses that end, and the rows that are done."""
    count = state.count + 1
    tokens = _rows_of(state.tokens, candidates.beams)
    tokens = jax.lax.dynamic_update_slice_in_dim(
        tokens, candidates.tokens[..., None], state.count, axis=2
    )
    ends = (candidates.tokens == rules.eos_id) | (count >= limits)[:, None]
    finished = _finish(state, candidates, tokens, ends, rules)

    live = jnp.where(ends, -jnp.inf, candidates.log_probs)
    log_probs, kept = jax.lax.top_k(live, state.tokens.shape[1])
    parents = jnp.take_along_axis(candidates.beams, kept, axis=1)
    bound = best_possible(log_probs[:, 0], count, limits, rules)
    return dataclasses.replace(
        state,
        sees=_rows_of(state.sees, parents),
        tokens=_rows_of(tokens, kept),
        log_probs=log_probs,
        finished=finished,
        done=state.done | is_done(finished, bound, rules),
        count=count,
    )


def _finish(
    state: BeamState,
    candidates: Candidates,
    tokens: Int[Array, "B C T"],
    ends: Bool[Array, "B C"],
    rules: Rules,
) -> Finished:
    """The K best of the hypotheses so far and those that end now."""
    num_beams, count = state.tokens.shape[1], state.count + 1
    # The others are there for beams to live on.
    among_best = jnp.arange(ends.shape[1]) < num_beams
    counts = ends & among_best & ~state.done[:, None]
    scores = jnp.where(counts, candidates.log_probs / rules.penalty(count), -jnp.inf)
    new = Finished(tokens, scores, candidates.log_probs, jnp.full(scores.shape, count))
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), state.finished, new)
    _, best = jax.lax.top_k(both.scores, num_beams)
    return jax.tree.map(lambda x: _rows_of(x, best), both)


def best_possible(
    log_probs: Float[Array, " B"],
    count: Int[Array, ""],
    limits: Int[Array, " B"],
    rules: Rules,
) -> Float[Array, " B"]:
    """What a beam of `count` tokens can score at best: nothing more is lost, α chooses the length.

    Unless `early_stopping` is "never" its length is taken to be what it is now.
    """
    now = rules.penalty(count)
    if rules.early_stopping != "never":
        return log_probs / now
    return log_probs / jnp.maximum(now, rules.penalty(limits))


def is_done(finished: Finished, bound: Float[Array, " B"], rules: Rules) -> Bool[Array, " B"]:
    """Whether nothing that may still be found would be answered."""
    if rules.early_stopping == "never":
        worst = jnp.take(finished.scores, rules.num_return - 1, axis=1)
        return bound <= worst
    worst = finished.scores[:, -1]
    full = worst > -jnp.inf
    if rules.early_stopping is not True:
        full &= bound <= worst
    return full | (bound == -jnp.inf)  # no beam lives


def _rows_of(x: Array, places: Int[Array, "B C"]) -> Array:
    """x[b, places[b, c]] of `[B, N, …]`."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


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
