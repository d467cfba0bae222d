"""One step of beam search: decides which beams of each row continue and which end.

`beam_search` calls these functions in a compiled loop. Each of the B rows has K beams. With a
vocabulary of V tokens, these beams have K · V continuations by one token, and the best C of these
are the candidates. T is the maximum target length.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from ..nn.cache import Cache, choose_beams, with_beams
from ..nn.typing import Array, Bool, Float, Int
from .banned_sequences import (
    BannedSequences,
    append_recent,
    banned_sequences,
    completes_repetition,
    hide_banned,
)
from .beam_adapters import Prefill
from .request import GenerationRequest

# `top_tokens` divides a large vocabulary into blocks of this many tokens.
BLOCK = 128


@struct.dataclass
class BeamParams:
    """The settings of a search as traced arrays, so that changing a value does not recompile it."""

    length_penalty: Float[Array, ""]
    eos_ids: Int[Array, " E"]
    """The tokens that end a hypothesis, or -1 if there are none."""
    num_return: Int[Array, ""]
    banned: BannedSequences
    penalty_form: str = struct.field(pytree_node=False)
    early_stopping: bool | str = struct.field(pytree_node=False)
    force_eos: bool = struct.field(pytree_node=False)
    """Whether the token at the maximum length must be the first of `eos_ids`."""
    renormalize: bool = struct.field(pytree_node=False, default=False)
    forced_bos: Int[Array, ""] | None = None
    """The forced first token of every hypothesis."""
    min_tokens: Int[Array, ""] | None = None
    """The minimum number of tokens before an end token."""
    no_repeat: int = struct.field(pytree_node=False, default=0)
    """If above 0, sequences of this many tokens must not repeat within a target."""

    def penalty(self, length: Array) -> Array:
        """Returns the divisor for the log-probability of a hypothesis of `length` tokens."""
        base = length.astype(jnp.float32)
        if self.penalty_form == "gnmt":
            base = (5 + base) / 6
        return base**self.length_penalty


def beam_params(request: GenerationRequest, vocab_size: int) -> BeamParams:
    """Converts a request to beam parameters.

    Raises:
      UserError: an id is not in the vocabulary.
    """
    # Greedy search ignores the length penalty, and stops at the first finished hypothesis.
    greedy, forced_bos = request.num_beams == 1, request.forced_bos_token_id
    # Omit end tokens beyond the vocabulary, which cannot occur. The forced end token must come
    # first in `eos_ids`.
    forced = () if request.forced_eos_token_id is None else (request.forced_eos_token_id,)
    ends = [token for token in request.eos_token_id if token < vocab_size and token not in forced]
    return BeamParams(
        length_penalty=jnp.float32(0.0 if greedy else request.length_penalty),
        eos_ids=jnp.asarray([*forced, *ends] or [-1], jnp.int32),
        num_return=jnp.int32(request.num_return_sequences),
        banned=banned_sequences(request.bad_words_ids, vocab_size),
        penalty_form=request.penalty_form,
        early_stopping=True if greedy else request.early_stopping,
        force_eos=bool(forced),
        forced_bos=None if forced_bos is None else jnp.int32(forced_bos),
        renormalize=request.renormalize_logits,
        min_tokens=jnp.int32(request.min_new_tokens) if request.min_new_tokens else None,
        no_repeat=request.no_repeat_ngram_size,
    )


@struct.dataclass
class Finished:
    """The K best finished hypotheses of each row, best first. Empty entries have the score -inf."""

    tokens: Int[Array, "B K T"]
    scores: Float[Array, "B K"]
    log_probs: Float[Array, "B K"]
    lengths: Int[Array, "B K"]
    """The number of tokens, including the end token."""


@struct.dataclass
class BeamState:
    """The state that the compiled loop carries from token to token."""

    cache: Cache
    visible_slots: Bool[Array, "B K S"]
    """Whether each beam attends to each slot of its row's cache."""
    tokens: Int[Array, "B K T"]
    recent: Int[Array, "B K P"]
    """The last P tokens of each beam, including tokens of the prompt if the beam is short."""
    log_probs: Float[Array, "B K"]
    """The log-probability of each beam. If a row has fewer than K beams, the rest have -inf."""
    finished: Finished
    done: Bool[Array, " B"]
    count: Int[Array, ""]
    """The number of new tokens, which is the same for all beams."""


@struct.dataclass
class Candidates:
    """The candidates of each row: continuations of its beams by one token, best first."""

    log_probs: Float[Array, "B C"]
    beams: Int[Array, "B C"]
    tokens: Int[Array, "B C"]


def empty_state(
    prefill: Prefill,
    recent: Int[Array, "B P"],
    max_lengths: Int[Array, " B"],
    *,
    num_beams: int,
    num_tokens: int,
) -> BeamState:
    """Returns the state before the first token, where all beams of a row see the same slots."""
    shape = max_lengths.shape[0], num_beams
    slots = prefill.visible_slots
    tokens = jnp.zeros((*shape, num_tokens), jnp.int32)
    nothing = jnp.full(shape, -jnp.inf)
    return BeamState(
        cache=with_beams(prefill.cache, num_beams),
        visible_slots=jnp.broadcast_to(slots[:, None], (*shape, slots.shape[-1])),
        tokens=tokens,
        recent=jnp.broadcast_to(recent[:, None], (*shape, recent.shape[-1])),
        log_probs=nothing,
        finished=Finished(tokens, nothing, nothing, jnp.zeros(shape, jnp.int32)),
        done=max_lengths == 0,
        count=jnp.int32(0),
    )


def hidden_by_target(
    tokens: Int[Array, "B K T"],
    count: Int[Array, ""],
    start_id: Int[Array, ""],
    *,
    params: BeamParams,
    vocab_size: int,
) -> Bool[Array, "B K V"] | None:
    """Returns which next tokens are excluded by the minimum length or the ban on repetition.

    Args:
      tokens: the tokens of each beam.
      count: the number of tokens of each beam.
      start_id: the token before the tokens of each beam.
      params: the settings.
      vocab_size: the size of the vocabulary, V.
    """
    hidden = None
    if params.no_repeat:
        # The start token is part of the target.
        written = jnp.pad(tokens, ((0, 0), (0, 0), (1, 0))).at[..., 0].set(start_id)
        hidden = completes_repetition(written, count + 1, params.no_repeat, vocab_size=vocab_size)
    if params.min_tokens is not None:
        # End tokens are hidden until the minimum length.
        ends = jnp.any(jnp.arange(vocab_size) == params.eos_ids[:, None], axis=0)
        early = jnp.broadcast_to(
            ends & (count < params.min_tokens), (*tokens.shape[:2], vocab_size)
        )
        hidden = early if hidden is None else hidden | early
    return hidden


def best_candidates(
    logits: Float[Array, "B K V"],
    log_probs: Float[Array, "B K"],
    recent: Int[Array, "B K P"],
    last: Bool[Array, " B"],
    *,
    params: BeamParams,
    num_beams: int,
    first: bool = False,
    hidden: Bool[Array, "B K V"] | None = None,
) -> Candidates:
    """Returns the best C of each row's K · V continuations.

    C is (1 + E) · `num_beams` for E end tokens. At most E · `num_beams` candidates end, so at least
    `num_beams` candidates are left to continue.

    Args:
      logits: logits of the next token of each beam.
      log_probs: log-probabilities of the beams so far.
      recent: the last tokens of each beam.
      last: whether each row reaches its maximum length with this token.
      params: the settings.
      num_beams: the number of beams after this step. If there are fewer than C continuations, the
        remaining candidates have -inf.
      first: whether this step chooses the first token of each target.
      hidden: additional tokens that must not be chosen.
    """
    number = (1 + params.eos_ids.shape[0]) * num_beams  # C
    rows, beams_before, vocabulary = logits.shape  # each row has one beam in the first step
    allowed = hide_banned(logits, recent, params.banned)
    allowed = allowed if hidden is None else jnp.where(hidden, -jnp.inf, allowed)
    normalizer = jax.nn.logsumexp(allowed if params.renormalize else logits, axis=-1)  # [B, K]
    # The best C of a row are among the best C of each beam: [B, K, min(C, V)].
    scores, tokens = top_tokens(allowed, min(number, vocabulary))
    scores = scores - normalizer[..., None] + log_probs[..., None]
    # A forced token is the only continuation of a beam and does not change its log-probability.
    only_one = jnp.where(jnp.arange(scores.shape[-1]) == 0, log_probs[..., None], -jnp.inf)
    if params.forced_bos is not None and first:
        scores, tokens = only_one, jnp.full_like(tokens, params.forced_bos)
    if params.force_eos:
        scores = jnp.where(last[:, None, None], only_one, scores)
        tokens = jnp.where(last[:, None, None], params.eos_ids[0], tokens)
    per_beam = scores.shape[-1]
    # With a tiny vocabulary, there are fewer than C continuations, so pad them.
    short = ((0, 0), (0, max(0, number - per_beam * beams_before)))
    flat = jnp.pad(scores.reshape(rows, -1), short, constant_values=-jnp.inf)  # [B, ≥ C]
    best, indices = jax.lax.top_k(flat, number)  # [B, C]; index = beam · per_beam + rank
    beams = jnp.minimum(indices // per_beam, beams_before - 1)
    tokens = jnp.take_along_axis(jnp.pad(tokens.reshape(rows, -1), short), indices, axis=1)
    return Candidates(best, beams, tokens)


def top_tokens(
    logits: Float[Array, "B K V"], number: int
) -> tuple[Float[Array, "B K C"], Int[Array, "B K C"]]:
    """Returns the best C logits and their tokens, like `lax.top_k`.

    The vocabulary is divided into blocks. The best C tokens are in the C blocks with the highest
    maxima, so only these blocks are sorted.
    """
    vocabulary = logits.shape[-1]
    # If the chosen blocks are at least half of the vocabulary, sort the vocabulary directly.
    if vocabulary < 2 * BLOCK * number:
        scores, tokens = jax.lax.top_k(logits, number)
        return scores, tokens
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, -vocabulary % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(*logits.shape[:2], -1, BLOCK)  # [B, K, V / 128, 128]
    _, best = jax.lax.top_k(jnp.max(blocks, axis=-1), number)  # blocks, [B, K, C]
    chosen = jnp.take_along_axis(blocks, best[..., None], axis=2)  # [B, K, C, 128]
    # Sort only the chosen blocks: [B, K, C · 128] to [B, K, C].
    scores, indices = jax.lax.top_k(chosen.reshape(*logits.shape[:2], -1), number)
    # Convert indices in the chosen blocks to tokens of the vocabulary.
    block = jnp.take_along_axis(best, indices // BLOCK, axis=-1)
    return scores, block * BLOCK + indices % BLOCK


def advance_beams(
    state: BeamState,
    candidates: Candidates,
    max_lengths: Int[Array, " B"],
    params: BeamParams,
) -> BeamState:
    """Decides which beams continue, which hypotheses end, and which rows are done."""
    num_beams, count = state.tokens.shape[1], state.count + 1
    # Append the token of each candidate to the tokens of its beam: [B, C, T].
    tokens = _gather(state.tokens, candidates.beams)
    tokens = jax.lax.dynamic_update_slice_in_dim(
        tokens, candidates.tokens[..., None], state.count, axis=2
    )
    ends = jnp.any(candidates.tokens[..., None] == params.eos_ids, axis=-1)  # [B, C]
    ends |= (count >= max_lengths)[:, None]
    finished = _finish(state, candidates, tokens, ends, params=params)

    # If a candidate ends, the next best candidate becomes a beam in its place.
    live = jnp.where(ends, -jnp.inf, candidates.log_probs)
    log_probs, kept = jax.lax.top_k(live, num_beams)  # [B, K], indices of candidates
    parents = jnp.take_along_axis(candidates.beams, kept, axis=1)  # indices of previous beams
    bound = score_upper_bound(log_probs[:, 0], count, max_lengths, params)
    recent = append_recent(_gather(state.recent, parents), _gather(candidates.tokens, kept))
    return dataclasses.replace(
        state,
        cache=choose_beams(state.cache, parents),
        visible_slots=_gather(state.visible_slots, parents),
        tokens=_gather(tokens, kept),
        recent=recent,
        log_probs=log_probs,
        finished=finished,
        done=state.done | is_done(finished, bound, params),
        count=count,
    )


def _finish(
    state: BeamState,
    candidates: Candidates,
    tokens: Int[Array, "B C T"],
    ends: Bool[Array, "B C"],
    *,
    params: BeamParams,
) -> Finished:
    """Adds the hypotheses that end with this token; returns the K best finished hypotheses."""
    num_beams, count = state.tokens.shape[1], state.count + 1
    # Only the best K candidates may become hypotheses. The other candidates can only become beams,
    # as in transformers.
    among_best = jnp.arange(ends.shape[1]) < num_beams
    counts = ends & among_best & ~state.done[:, None]
    scores = jnp.where(counts, candidates.log_probs / params.penalty(count), -jnp.inf)
    new = Finished(tokens, scores, candidates.log_probs, jnp.full(scores.shape, count))
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), state.finished, new)  # [B, K + C]
    _, best = jax.lax.top_k(both.scores, num_beams)
    return jax.tree.map(lambda x: _gather(x, best), both)


def score_upper_bound(
    log_probs: Float[Array, " B"],
    count: Int[Array, ""],
    max_lengths: Int[Array, " B"],
    params: BeamParams,
) -> Float[Array, " B"]:
    """Returns an upper bound on the final score of a live beam of `count` tokens.

    The bound assumes that the log-probability does not decrease further. If `early_stopping` is
    "never", the bound uses the length with the best penalty. Otherwise, it uses the current length.
    """
    # A log-probability is negative, so the largest divisor gives the best score.
    now = params.penalty(count)
    if params.early_stopping != "never":
        return log_probs / now
    return log_probs / jnp.maximum(now, params.penalty(max_lengths))


def is_done(finished: Finished, bound: Float[Array, " B"], params: BeamParams) -> Bool[Array, " B"]:
    """Returns whether each row can stop, according to `early_stopping`."""
    if params.early_stopping == "never":
        worst = jnp.take(finished.scores, params.num_return - 1, axis=1)
        return bound <= worst
    worst = finished.scores[:, -1]
    full = worst > -jnp.inf
    if params.early_stopping is not True:
        full &= bound <= worst
    # The bound is -inf if every beam has ended.
    return full | (bound == -jnp.inf)


def _gather(x: Array, indices: Int[Array, "B C"]) -> Array:
    """Returns x[b, indices[b, c]] for an array x `[B, N, …]`."""
    return jnp.take_along_axis(x, indices.reshape(*indices.shape, *(1,) * (x.ndim - 2)), axis=1)
