"""One step of beam search, for all beams of all rows: which continuations live on, which end.

`beam` makes these the body of a compiled loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from ..nn.cache import Cache
from ..nn.typing import Array, Bool, Float, Int
from .banned_sequences import BadWords, hide_bad_words, push

# Width of the blocks whose maxima tell where the best tokens of a large vocabulary are.
BLOCK = 128


@struct.dataclass
class Rules:
    """`BeamSearch` and the special tokens, as the compiled search takes them."""

    length_penalty: Float[Array, ""]
    eos_ids: Int[Array, " E"]
    """Tokens that end a hypothesis; -1 where there is none."""
    num_return: Int[Array, ""]
    bad_words: BadWords
    penalty_form: str = struct.field(pytree_node=False)
    early_stopping: bool | str = struct.field(pytree_node=False)
    force_eos: bool = struct.field(pytree_node=False)
    """Whether the last token that there is room for is the first of `eos_ids`."""
    renormalize: bool = struct.field(pytree_node=False, default=False)

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
    recent: Int[Array, "B K P"]
    """The newest tokens of each beam, what it begins with included."""
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


def empty_state(
    cache: Cache,
    sees: Bool[Array, "B S"],
    recent: Int[Array, "B P"],
    limits: Int[Array, " B"],
    num_beams: int,
    num_tokens: int,
) -> BeamState:
    """Before the first token: every beam sees what its row begins with."""
    shape = limits.shape[0], num_beams
    tokens = jnp.zeros((*shape, num_tokens), jnp.int32)
    nothing = jnp.full(shape, -jnp.inf)
    return BeamState(
        cache=cache,
        sees=jnp.broadcast_to(sees[:, None], (*shape, sees.shape[-1])),
        tokens=tokens,
        recent=jnp.broadcast_to(recent[:, None], (*shape, recent.shape[-1])),
        log_probs=nothing,
        finished=Finished(tokens, nothing, nothing, jnp.zeros(shape, jnp.int32)),
        done=limits == 0,
        count=jnp.int32(0),
    )


def best_candidates(
    logits: Float[Array, "B K V"],
    log_probs: Float[Array, "B K"],
    recent: Int[Array, "B K P"],
    last: Bool[Array, " B"],
    rules: Rules,
    num_beams: int,
) -> Candidates:
    """The best C of all continuations, K · V of them in each row.

    C is `num_beams` for going on, and as many for each of the tokens that end: however many of
    the best end, there are enough to go on with.

    Args:
      logits: of the next token of each beam.
      log_probs: of the beams so far.
      recent: the newest tokens of each.
      last: rows in which there is no room for another token behind this one.
      rules: what may be chosen.
      num_beams: how many beams there are to be; where there are less than C continuations, the
        others have -inf.
    """
    number = (1 + rules.eos_ids.shape[0]) * num_beams
    rows, beams_before, vocabulary = logits.shape
    allowed = hide_bad_words(logits, recent, rules.bad_words)
    normaliser = jax.nn.logsumexp(allowed if rules.renormalize else logits, axis=-1)
    scores, tokens = top_tokens(allowed, min(number, vocabulary))
    scores = scores - normaliser[..., None] + log_probs[..., None]
    if rules.force_eos:
        only_end = jnp.where(jnp.arange(scores.shape[-1]) == 0, log_probs[..., None], -jnp.inf)
        scores = jnp.where(last[:, None, None], only_end, scores)
        tokens = jnp.where(last[:, None, None], rules.eos_ids[0], tokens)
    short = max(0, number - scores.shape[-1] * beams_before)
    flat = jnp.pad(scores.reshape(rows, -1), ((0, 0), (0, short)), constant_values=-jnp.inf)
    best, places = jax.lax.top_k(flat, number)
    beams = jnp.minimum(places // scores.shape[-1], beams_before - 1)
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
    ends = jnp.any(candidates.tokens[..., None] == rules.eos_ids, axis=-1)
    ends |= (count >= limits)[:, None]
    finished = _finish(state, candidates, tokens, ends, rules)

    live = jnp.where(ends, -jnp.inf, candidates.log_probs)
    log_probs, kept = jax.lax.top_k(live, state.tokens.shape[1])
    parents = jnp.take_along_axis(candidates.beams, kept, axis=1)
    bound = best_possible(log_probs[:, 0], count, limits, rules)
    return dataclasses.replace(
        state,
        sees=_rows_of(state.sees, parents),
        tokens=_rows_of(tokens, kept),
        recent=push(_rows_of(state.recent, parents), _rows_of(candidates.tokens, kept)),
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
