"""Sampling from a causal language model: greedy, temperature, top-k, top-p, repetition penalty.

Prompts of different lengths share a batch, padded on the left, so that all
rows write the same cache slot.  Everything is compiled once per shape bucket
(rows, prompt length up to a multiple of 32, cache length up to one of 64).

When a row has filled the model's `max_length`, its oldest quarter falls out and
the rest is read again at new positions; generation goes on.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...data.errors import UserError
from ..nn.attention import HIDDEN
from ..nn.cache import Cache, init_cache
from ..nn.dropout import fold_in, row_keys
from ..nn.typing import Array, Bool, Float, Int, Key
from .banned_sequences import (
    BadWords,
    bad_words,
    check_bad_words,
    hide_bad_words,
    newest,
    push,
)
from .unstack_layers import separate_layers

SMALLEST_TEMPERATURE = 1e-6
"""Below it the best token is taken: float32 has no room for smaller divisors."""

PROMPT_BUCKET = 32
CACHE_BUCKET = 64

# Tokens per call of the compiled program. On CPU a call per token is as fast as a
# loop inside (tests/benchmarks/decode_loop.py), and each token is seen at once; on
# an accelerator every call waits for the host.
TOKENS_PER_CALL = {"cpu": 1}
DEFAULT_TOKENS_PER_CALL = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is picked from its scores.

    Raises:
      UserError: a value is outside its range.
    """

    temperature: float = 1.0
    """Scores are divided by it; 0 always takes the best token."""
    top_k: int | None = None
    """Only the k best tokens."""
    top_p: float | None = None
    """Only the best tokens that together have probability p (Holtzman et al. 2020)."""
    repetition_penalty: float = 1.0
    """Scores of tokens already seen are divided by it, or multiplied if negative
    (Keskar et al. 2019, section 4.1)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Words of one or more tokens that are never written."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # nor is NaN
            raise UserError(f"temperature {self.temperature} must be at least 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must be in (0, 1]")
        if not self.repetition_penalty > 0:
            raise UserError(f"repetition_penalty {self.repetition_penalty} must be above 0")


@struct.dataclass
class SamplingArrays:
    """`Sampling` as the compiled step takes it: another value compiles nothing anew."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    repetition_penalty: Float[Array, ""]
    bad_words: BadWords
    greedy: bool = struct.field(pytree_node=False)
    filtered: bool = struct.field(pytree_node=False)
    penalised: bool = struct.field(pytree_node=False)


def sampling_arrays(sampling: Sampling, vocab_size: int) -> SamplingArrays:
    """Makes the arrays of a `Sampling`."""
    top_k = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    greedy = sampling.temperature < SMALLEST_TEMPERATURE
    return SamplingArrays(
        temperature=jnp.float32(1.0 if greedy else sampling.temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        repetition_penalty=jnp.float32(sampling.repetition_penalty),
        bad_words=bad_words(sampling.bad_words),
        greedy=greedy,
        filtered=not greedy and (top_k < vocab_size or top_p < 1),
        penalised=sampling.repetition_penalty != 1,
    )


def penalise_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Makes tokens that were seen less likely (Keskar et al. 2019, section 4.1)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_best(
    logits: Float[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Hides all but the `top_k` best tokens, and of these all but the `top_p` nucleus."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    ordered = jnp.where(jnp.arange(ordered.shape[-1]) < top_k, ordered, HIDDEN)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    ordered = jnp.where(before < top_p, ordered, HIDDEN)
    return jnp.put_along_axis(logits, order, ordered, axis=-1, inplace=False)


def pick(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    recent: Int[Array, "B P"],
    keys: Key[Array, " B"],
    sampling: SamplingArrays,
) -> Int[Array, " B"]:
    """The next token of each row."""
    logits = hide_bad_words(logits, recent, sampling.bad_words)
    if seen is not None:
        logits = penalise_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.filtered:
        logits = keep_best(logits, sampling.top_k, sampling.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits)


@struct.dataclass
class DecodeState:
    """What the compiled step carries from token to token."""

    cache: Cache
    attention_mask: Int[Array, "B S"]
    tokens: Int[Array, " B"]
    """The newest token of each row, not yet in the cache."""
    seen: Bool[Array, "B V"] | None
    recent: Int[Array, "B P"]
    """The newest tokens of each row, `tokens` included."""
    keys: Key[Array, " B"]
    count: Int[Array, ""]
    """How many tokens of each row were picked."""


class Generator:
    """Compiled decoding for one model.

    Holds the parameters as `models.separate_layers` lays them out, beside the
    caller's stacked ones.
    """

    def __init__(self, model: Any, params: Any) -> None:
        self.config = model.config
        self._model, self._params = separate_layers(model, params)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        seed: int = 0,
        tokens_per_call: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Continues prompts, a few tokens at a time.

        Row r depends on its prompt, `seed` and r alone: not on the other rows.

        Args:
          prompts: token ids of each row, at least one each.
          max_new_tokens: how many tokens each row is continued by.
          sampling: how they are picked.
          seed: of the random choices.
          tokens_per_call: tokens per call of the compiled loop; by default what
            is fastest on this backend.

        Yields:
          New tokens int[B, n], n ≥ 1, until there are `max_new_tokens`.

        Raises:
          UserError: there is no prompt, one is empty, or an id is not in the
            vocabulary.
        """
        self._check(prompts, sampling)
        per_call = tokens_per_call or TOKENS_PER_CALL.get(
            jax.default_backend(), DEFAULT_TOKENS_PER_CALL
        )
        arrays = sampling_arrays(sampling, self.config.vocab_size)
        keys = row_keys(jax.random.key(seed, impl="threefry2x32"), len(prompts))
        contexts = [list(prompt) for prompt in prompts]
        used = [set(prompt) for prompt in prompts]  # nothing falls out of these
        done = 0
        while done < max_new_tokens:
            seen = self._seen(used) if arrays.penalised else None
            recent = newest(contexts, arrays.bad_words.num_recent)
            contexts = [self._crop(context) for context in contexts]
            room = self.config.max_length - max(map(len, contexts)) + 1
            steps = min(room, max_new_tokens - done)
            ids, mask, cache_length = self._pad(contexts, steps + per_call)
            state = prefill(
                self._model,
                self._params,
                ids,
                mask,
                seen,
                recent,
                keys,
                done,
                arrays,
                cache_length=cache_length,
            )
            new = np.asarray(state.tokens)[:, None]
            while True:
                new = new[:, :steps]
                yield new
                for row, tokens in enumerate(new.tolist()):
                    contexts[row].extend(tokens)
                    used[row].update(tokens)
                done, steps = done + new.shape[1], steps - new.shape[1]
                if steps == 0:
                    break
                state, tokens = advance(
                    self._model, self._params, state, arrays, num_tokens=per_call
                )
                new = np.asarray(tokens)

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise UserError("every prompt needs at least one token: begin with the bos token")
        for prompt in prompts:
            if not 0 <= min(prompt) <= max(prompt) < self.config.vocab_size:
                raise UserError(
                    f"token ids {min(prompt)} … {max(prompt)} are not within the vocabulary of "
                    f"{self.config.vocab_size}: use the model's own tokenizer"
                )
        check_bad_words(sampling.bad_words, self.config.vocab_size)

    def _crop(self, context: list[int]) -> list[int]:
        longest = self.config.max_length
        return context if len(context) <= longest else context[-max(1, longest - longest // 4) :]

    def _pad(self, contexts: list[list[int]], steps: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids and mask, padded on the left to the bucket, and the cache's length."""
        longest = _round_up(max(map(len, contexts)), PROMPT_BUCKET)
        longest = min(longest, self.config.max_length)
        ids = np.zeros((len(contexts), longest), np.int32)
        mask = np.zeros((len(contexts), longest), np.int32)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :] = context
            mask[row, longest - len(context) :] = 1
        return ids, mask, _round_up(longest + steps, CACHE_BUCKET)

    def _seen(self, used: list[set[int]]) -> Bool[Array, "B V"]:
        seen = np.zeros((len(used), self.config.vocab_size), bool)
        for row, tokens in enumerate(used):
            seen[row, list(tokens)] = True
        return jnp.asarray(seen)


# Both of all generators: a model that was decoded before is not compiled anew.
@functools.partial(jax.jit, static_argnames=("model", "cache_length"))
def prefill(
    model: Any,
    params: dict[str, Any],
    ids: Int[Array, "B T"],
    mask: Int[Array, "B T"],
    seen: Bool[Array, "B V"] | None,
    recent: Int[Array, "B P"],
    keys: Key[Array, " B"],
    count: Int[Array, ""],
    sampling: SamplingArrays,
    cache_length: int,
) -> DecodeState:
    """Reads the contexts, and picks the token behind each."""
    rows, length = ids.shape
    mask = jnp.pad(mask, ((0, 0), (0, cache_length - length)), constant_values=1)
    cache = init_cache(model.config, model.execution, rows, cache_length)
    output = model.apply({"params": params}, ids, mask, cache=cache)
    empty = jnp.zeros((rows,), jnp.int32)
    state = DecodeState(output.cache, mask, empty, seen, recent, keys, jnp.int32(count))
    return _with_next(state, output, sampling)


@functools.partial(jax.jit, static_argnames=("model", "num_tokens"), donate_argnames="state")
def advance(
    model: Any,
    params: dict[str, Any],
    state: DecodeState,
    sampling: SamplingArrays,
    num_tokens: int,
) -> tuple[DecodeState, Int[Array, "B {num_tokens}"]]:
    """Picks the next tokens of each row."""

    def step(state: DecodeState, _: Any = None) -> tuple[DecodeState, Array]:
        output = model.apply(
            {"params": params}, state.tokens[:, None], state.attention_mask, cache=state.cache
        )
        state = _with_next(dataclasses.replace(state, cache=output.cache), output, sampling)
        return state, state.tokens

    if num_tokens == 1:
        state, tokens = step(state)
        return state, tokens[:, None]
    state, tokens = jax.lax.scan(step, state, length=num_tokens)
    return state, tokens.T


def _with_next(state: DecodeState, output: Any, sampling: SamplingArrays) -> DecodeState:
    """Picks each row's next token from the scores of its last position."""
    last = dataclasses.replace(output.projection, hidden=output.projection.hidden[:, -1:])
    keys = fold_in(state.keys, state.count)
    tokens = pick(last.logits()[:, 0], state.seen, state.recent, keys, sampling)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
    return dataclasses.replace(
        state, tokens=tokens, seen=seen, recent=push(state.recent, tokens), count=state.count + 1
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
