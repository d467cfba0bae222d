"""One context that grows, as a conversation does: what it has in the cache is not read again."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ..config import TransformerConfig
from ..model import Model
from ..nn.cache import Cache, grow_cache, init_cache
from ..nn.dropout import RowKeys, fold_in
from ..nn.typing import Array, Bool, Float, Int, Params
from .banned_sequences import append_recent, last_tokens
from .beam_adapters import last_logits
from .padding import cache_stage
from .request import GenerationRequest, Sampling
from .sample import NO_TOKEN, SamplingParams, require_tokens, sample_token, sampling_params

CHUNKS = (64, 16, 4, 1)
"""Tokens are read in pieces of these sizes, so that few programs are compiled."""

SPARE = 64
"""The number of tokens that can be taken back where layers keep a window, without reading the
others anew: the end of an answer, which the template of the next turn writes differently."""


class CachedContext:
    """The keys and values of one context, and the tokens that they are of.

    A context that begins like the one before keeps what they have in common: of the next turn of a
    conversation only what is new is read. The cache grows with the context.

    Args:
      model: a causal language model, with the layout of layers that decodes fastest.
      params: its parameters in that layout.
    """

    def __init__(self, model: Model, params: Params) -> None:
        self._model, self._params = model, params
        self._tokens: list[int] = []
        self._cache: Cache | None = None
        self._written = 0  # the most tokens that this cache has had
        self.num_read = 0
        """The number of tokens that the model has read so far."""

    def stream(
        self, context: Sequence[int], request: GenerationRequest, keys: RowKeys
    ) -> Iterator[int]:
        """Continues a context token by token, as `Generator.stream` does.

        Args:
          context: all tokens of the context, at least one, and fewer than the model has positions.
          request: the method, a `Sampling`; the number of tokens; and what is banned.
          keys: a single key, as of `sampling_keys(seed, 1)`.

        Yields:
          New tokens, until there are `request.max_new_tokens` or no position is left.

        Raises:
          UserError: the context is empty or too long, the method is no `Sampling`, or the logits
            are NaN or infinite.
        """
        longest = self._model.config.max_length
        if not 1 <= len(context) <= longest:
            raise UserError(
                f"the context has {len(context)} tokens: the model takes 1 to {longest}"
            )
        if not isinstance(request.method, Sampling):
            raise UserError("a conversation is sampled: give a Sampling, without beams")
        arrays = sampling_params(request.method, request.banned, self._model.config.vocab_size)
        recent = jnp.asarray(last_tokens([list(context)], arrays.banned.prefix_length))
        seen = None
        if arrays.penalized:
            seen = jnp.zeros((1, self._model.config.vocab_size), bool)
            seen = seen.at[0, jnp.asarray(sorted(set(context)))].set(True)
        tokens = list(context)
        for count in range(min(request.max_new_tokens or longest, longest - len(context) + 1)):
            logits = self._read(tokens)
            chosen, seen, recent = _choose(
                logits, seen, recent, keys=fold_in(keys, count), sampling=arrays
            )
            token = int(require_tokens(chosen)[0])
            tokens.append(token)
            yield token

    def _read(self, tokens: list[int]) -> Float[Array, "1 V"]:
        """Reads what is new of a context; returns the logits after its last token."""
        pairs = enumerate(zip(self._tokens, tokens, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(self._tokens), len(tokens)))
        common = min(common, len(tokens) - 1)  # the last token is read for its logits
        config, execution = self._model.config, self._model.execution
        length = cache_stage(len(tokens), config.max_length)
        # The inputs of a convolution are those of the last tokens: it cannot go back.
        convolved = common < len(self._tokens) and config.head_convolution is not None
        cache = self._cache
        limit = config.reread_length
        reread = limit is not None and (len(self._tokens) > limit) != (len(tokens) > limit)
        if cache is None or reread or convolved or not cache.can_go_back(self._written, common):
            cache = init_cache(config, execution, 1, length, spare=SPARE)
            common = self._written = 0
        elif cache.length < length:
            cache = _enlarge(self._model, cache, length)
        cache = dataclasses.replace(cache, index=jnp.int32(common))
        logits = None
        place = common
        while place < len(tokens):
            size = next(size for size in CHUNKS if size <= len(tokens) - place)
            if place == 0 and _rotates_by_length(config, len(tokens)):
                size = len(tokens)  # a piece would be taken for a short text
            piece = np.asarray([tokens[place : place + size]], np.int32)
            logits, cache = _read_piece(self._model, self._params, piece, cache)
            place += size
        self.num_read += len(tokens) - common
        self._cache, self._tokens = cache, list(tokens)
        self._written = max(self._written, len(tokens))
        assert logits is not None
        return logits


def _rotates_by_length(config: TransformerConfig, length: int) -> bool:
    """Returns whether the rotary frequencies of a text of some length are those of no shorter."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("dynamic", "longrope"):
        return False
    return length > (scaling.original_length or config.max_length)


@functools.partial(jax.jit, static_argnames=("model", "length"))
def _enlarge(model: Model, cache: Cache, length: int) -> Cache:
    """Returns the cache with more slots."""
    return grow_cache(cache, model.config, model.execution, length)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _read_piece(
    model: Model, params: Params, ids: Int[Array | np.ndarray, "1 T"], cache: Cache
) -> tuple[Float[Array, "1 V"], Cache]:
    """Reads some tokens after those in the cache; returns the logits after the last one."""
    mask = jnp.ones((1, cache.length), jnp.int32)
    output = model.apply({"params": params}, ids, mask, cache=cache)
    return last_logits(output)[:, 0], output.cache


@jax.jit
def _choose(
    logits: Float[Array, "1 V"],
    seen: Bool[Array, "1 V"] | None,
    recent: Int[Array, "1 P"],
    *,
    keys: RowKeys,
    sampling: SamplingParams,
) -> tuple[Int[Array, "1"], Bool[Array, "1 V"] | None, Int[Array, "1 P"]]:
    """Chooses the next token; returns it, the tokens that were seen, and the last ones."""
    tokens = sample_token(logits, seen, recent, keys, sampling=sampling)
    tokens = jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, NO_TOKEN)
    seen = None if seen is None else seen.at[0, tokens[0]].set(True)
    return tokens, seen, append_recent(recent, tokens)
