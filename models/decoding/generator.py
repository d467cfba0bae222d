"""Tokens from a model: `stream` samples continuations, `search` finds the best by beam search.

Rows of different lengths share a batch, padded to few lengths so that few programs are compiled.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError, check_whole
from ..config import TransformerConfig
from ..model import Model
from ..nn.dropout import RowKeys, row_keys
from ..nn.heads import CAUSAL_HEADS, require_head
from ..nn.typing import Params
from .banned_sequences import last_tokens
from .beam_adapters import CausalBeams, EncoderDecoderBeams, beams_of
from .beam_search import run
from .beam_step import Finished, beam_params
from .cached_context import CachedContext
from .continuous_batch import ContinuousBatch
from .padding import cache_stage, pad_rows, power_of_two, round_up, shortened
from .request import BeamSearch, GenerationRequest, Hypothesis, Sampling, check_token_ids
from .rows import refusal_of_rows
from .sample import advance, enlarge, prefill, require_tokens, sampling_params
from .speculative import Acceptance, Draft
from .unstack_layers import unstack_layers

PROMPT_BUCKET, CACHE_BUCKET = 32, 64
ROW_BUCKET, TOKEN_BUCKET = 16, 32
"""Lengths that a search is compiled for are multiples of these."""

# Tokens per call of the compiled program. On CPU a call per token is as fast as a
# loop inside, and each token is seen at once; on an accelerator every call waits for
# the host.
TOKENS_PER_CALL = {"cpu": 1}
DEFAULT_TOKENS_PER_CALL = 16
SEEDS = 1 << 32
"""The number of seeds."""


class Generator:
    """Compiled decoding for one model.

    It holds the parameters as `models.unstack_layers` lays them out, beside the caller's stacked
    ones. Programs are shared by all generators of such a model.

    Args:
      model: a causal language model or an encoder-decoder.
      params: its parameters.
      draft: a smaller model with the same vocabulary, which proposes tokens to `stream`
        (`models.Draft`): tokens have the same distributions, and greedy ones are the same.

    Raises:
      UserError: the model writes no text, or the draft model is not one for it.
    """

    def __init__(self, model: Model, params: Params, *, draft: Draft | None = None) -> None:
        beams_of(model)  # checks the model before any parameter is copied
        self.config = model.config
        if draft is not None:
            draft.check(model)
        self._draft = None if draft is None else draft.unstacked()
        self._model, self._params = unstack_layers(model, params)
        self.acceptance = Acceptance()
        """The counts of tokens that the draft model proposed, and of those that were accepted."""

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        seed: int = 0,
        tokens_per_call: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Continues prompts, a few tokens at a time.

        The result of row r depends on its prompt, `seed` and r alone, not on the other rows. Rows
        do not end: who reads the stream looks for `request.eos_ids` and may stop. When a row has
        filled the model's `max_length`, its oldest quarter falls out and the rest is read again
        at new positions. A row that grows beyond the model's `reread_length` is read again, too.
        The cache grows with the rows: its lengths are powers of two, each with
        a program of its own, so that n tokens take O(log n) programs.

        Args:
          prompts: token ids of each row, at least one each.
          request: the method, a `Sampling`; the number of tokens; and what is banned.
          seed: the seed of the random choices.
          tokens_per_call: tokens per call of the compiled loop; by default the fastest number on
            this backend. With a draft model a call writes what that proposes.

        Yields:
          New tokens int[B, n], n ≥ 1, until there are `request.max_new_tokens`.

        Raises:
          UserError: there is no prompt, one is empty, or an id is not in the vocabulary; the
            method is no `Sampling`; the model is an encoder-decoder; or its logits are NaN or
            infinite.
        """
        keys = sampling_keys(seed, len(prompts))
        if self._draft is not None:
            return (tokens for tokens, _ in self._speculate(prompts, request, keys))
        new = self._continue(prompts, request, keys, tokens_per_call, with_log_probs=False)
        return (tokens for tokens, _ in new)

    def stream_with_log_probs(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        keys: RowKeys,
        tokens_per_call: int | None = None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Continues prompts as `stream` does, with a key for each row.

        Args:
          prompts: as for `stream`.
          request: as for `stream`.
          keys: a key for each row, as of `sampling_keys`. The result of a row depends on its prompt
            and its key alone.
          tokens_per_call: as for `stream`.

        Yields:
          New tokens int[B, n], and the logarithm of each one's probability float32[B, n], in nats.
          It is the model's own: before temperature, penalties and filters.

        Raises:
          UserError: as `stream`.
        """
        if self._draft is not None:
            return self._speculate(prompts, request, keys)
        new = self._continue(prompts, request, keys, tokens_per_call, with_log_probs=True)
        return ((tokens, np.asarray(log_probs)) for tokens, log_probs in new)

    def _continue(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        keys: RowKeys,
        tokens_per_call: int | None,
        *,
        with_log_probs: bool,
    ) -> Iterator[tuple[np.ndarray, jax.Array | None]]:
        config, sampling = self.config, self._checked_sampling(prompts, request)
        assert request.max_new_tokens is not None
        per_call = tokens_per_call or TOKENS_PER_CALL.get(
            jax.default_backend(), DEFAULT_TOKENS_PER_CALL
        )
        arrays = sampling_params(sampling, request.banned, config.vocab_size)
        contexts = [list(prompt) for prompt in prompts]
        used = [set(prompt) for prompt in prompts]  # tokens that fell out stay in these
        done = 0
        while done < request.max_new_tokens:
            recent = last_tokens(contexts, arrays.banned.prefix_length)
            contexts = [shortened(context, config.max_length) for context in contexts]
            longest = max(map(len, contexts))
            # Tokens until a row is full, or is to be read again; the last one is written but never
            # read.
            steps = min(_tokens_left(config, len(context)) for context in contexts)
            steps = min(steps, request.max_new_tokens - done)
            length = self._padded_length(longest)
            # The last call may choose more tokens than are wanted.
            most = round_up(length + steps + per_call, CACHE_BUCKET)
            ids, mask = pad_rows(contexts, length=length, left=True)  # [B, length]
            state = prefill(
                self._model,
                self._params,
                ids,
                mask,
                seen=_one_hot(used, config.vocab_size) if arrays.penalized else None,
                recent=recent,
                keys=keys,
                count=done,
                sampling=arrays,
                cache_length=cache_stage(length + per_call, most),
                with_log_probs=with_log_probs,
            )
            new = require_tokens(state.tokens[:, None])  # [B, 1], later [B, per_call]
            log_probs = None if state.log_probs is None else state.log_probs[:, None]
            while True:
                yield new, log_probs
                for row, tokens in enumerate(new.tolist()):
                    contexts[row].extend(tokens)
                    used[row].update(tokens)
                done, steps = done + new.shape[1], steps - new.shape[1]
                if steps == 0:
                    break
                length += per_call  # slots that are written after the next call
                if length > state.cache.length:
                    state = enlarge(self._model, state, cache_stage(length, most))
                state, tokens, log_probs = advance(
                    self._model, self._params, state, sampling=arrays, num_tokens=per_call
                )
                new = require_tokens(tokens[:, :steps])  # more may be beyond the positions
                log_probs = None if log_probs is None else log_probs[:, :steps]

    @property
    def continues_rows(self) -> bool:
        """Whether `continuous_batch` serves the model.

        It serves all but mixtures of experts, and models with a `reread_length`.
        """
        return refusal_of_rows(self.config) is None

    def continuous_batch(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        keys: RowKeys,
        limits: Sequence[int],
        num_rows: int,
        tokens_per_call: int | None = None,
    ) -> ContinuousBatch:
        """Returns a batch of a few rows that continues many prompts, one after the other.

        Each gets the tokens that `stream_with_log_probs` gives it alone with its key. Iterate over
        the batch, and call its `stop` with the number of a prompt whose text has ended.

        Args:
          prompts: as for `stream`.
          request: as for `stream`, but for the number of tokens.
          keys: a key for each prompt, as of `sampling_keys`.
          limits: the greatest number of new tokens of each prompt.
          num_rows: the number of texts that are written at once.
          tokens_per_call: as for `stream`; a draft model sets it.

        Raises:
          UserError: as `stream`; a number is out of range; or the model does not `continues_rows`.
        """
        self._checked_sampling(prompts, request)
        if not len(prompts) == len(keys) == len(limits):
            raise UserError(
                f"{len(prompts)} prompts have {len(keys)} keys and {len(limits)} limits: give one "
                "of each for every prompt"
            )
        if num_rows < 1 or min(limits) < 1:
            raise UserError(
                f"num_rows {num_rows} and the least of the limits {min(limits)} must be at least 1"
            )
        if (reason := refusal_of_rows(self.config)) is not None:
            raise UserError(
                f"the model is {reason}, which cannot continue rows by different numbers of "
                "tokens: use Generator.stream"
            )
        batch = ContinuousBatch(
            self._model,
            self._params,
            request,
            num_rows=num_rows,
            tokens_per_call=tokens_per_call
            or TOKENS_PER_CALL.get(jax.default_backend(), DEFAULT_TOKENS_PER_CALL),
            draft=self._draft,
            acceptance=self.acceptance,
        )
        # The shortest first: the caches grow with them.
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            batch.add(i, prompts[i], key=keys[i : i + 1], limit=limits[i])
        return batch

    def _speculate(
        self, prompts: Sequence[Sequence[int]], request: GenerationRequest, keys: RowKeys
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Continues all prompts at once with the draft model; yields what all rows have."""
        self._checked_sampling(prompts, request)
        assert request.max_new_tokens is not None
        limits = [request.max_new_tokens] * len(prompts)
        batch = self.continuous_batch(
            prompts, request, keys=keys, limits=limits, num_rows=len(prompts)
        )
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        done = 0
        for written in batch:
            tokens[written.text].extend(written.tokens)
            log_probs[written.text].extend(written.log_probs)
            ready = min(map(len, tokens))
            if ready > done:
                yield (
                    np.asarray([row[done:ready] for row in tokens], np.int32),
                    np.asarray([row[done:ready] for row in log_probs], np.float32),
                )
                done = ready

    def cached_context(self) -> CachedContext:
        """Returns an empty context, of which a conversation reads only what is new.

        It takes no proposals of a draft model.

        Raises:
          UserError: the model is an encoder-decoder.
        """
        require_head(self.config, ("causal_lm",), "holds no conversation", "give another model")
        return CachedContext(self._model, self._params)

    def _padded_length(self, longest: int) -> int:
        return min(round_up(longest, PROMPT_BUCKET), self.config.max_length)

    def positions_read(self, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Returns the positions that hold a token when `stream` reads prompts, and all of them."""
        lengths = [len(shortened(list(prompt), self.config.max_length)) for prompt in prompts]
        return sum(lengths), len(lengths) * self._padded_length(max(lengths))

    def _checked_sampling(
        self, prompts: Sequence[Sequence[int]], request: GenerationRequest
    ) -> Sampling:
        """Returns the method of a request; raises UserError if the prompts cannot be continued."""
        if not isinstance(request.method, Sampling):
            raise UserError(
                f"method {type(request.method).__name__} does not sample: give a Sampling, or use "
                "Generator.search"
            )
        require_head(self.config, CAUSAL_HEADS, "is not sampled", "search it with num_beams")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise UserError("every prompt needs at least one token: begin with the bos token")
        for number, prompt in enumerate(prompts):
            check_token_ids(prompt, self.config.vocab_size, f"prompt {number}")
        return request.method

    def search(
        self,
        rows: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Hypothesis]]:
        """Finds the best targets of some sources, or continuations of some prompts.

        Compiled once for each number of rows and of banned sequences up to a power of 2, length of
        the longest row up to a multiple of 16, and of the longest target up to one of 32; and for
        each number of beams, and each setting that is a word or a truth value.

        Args:
          rows: tokens of each source, with its end token; or of each prompt.
          request: the method, a `BeamSearch`, and everything else.
          positions: the position of each token of a source; by default counted from 0.

        Returns:
          For each row up to `request.num_return_sequences` hypotheses, the best first.

        Raises:
          UserError: the method is no `BeamSearch`, there is a draft model, an encoder-decoder has
            no start token, a row is empty or longer than `max_length`, or would grow beyond the
            model's `reread_length`, an id is not in the vocabulary, or the model's scores are not
            numbers.
        """
        config, model = self.config, beams_of(self._model)
        if self._draft is not None:
            self._draft.check_method(request.method)
        method = self._checked_search(model, rows, request)
        params = beam_params(request, method, config.vocab_size)
        if not rows:
            return []
        length = min(round_up(max(map(len, rows)), ROW_BUCKET), config.max_length)
        number = power_of_two(len(rows))
        ids, mask = pad_rows(rows, num_rows=number, length=length, left=model.pads_left)
        places = None
        if positions is not None:
            places, _ = pad_rows(positions, num_rows=number, length=length)
        # Rows of padding have a longest target of 0: they are done before they begin.
        max_lengths = np.zeros(number, np.int32)
        max_lengths[: len(rows)] = [_max_length(model, request, len(row)) for row in rows]
        for number_of_row, row in enumerate(rows):
            _check_is_not_reread(config, number_of_row, len(row), int(max_lengths[number_of_row]))
        # What a target's first tokens follow: the start token, or the prompt.
        start = [] if request.start_id is None else [request.start_id]
        written = [start or row for row in rows] + [()] * (number - len(rows))
        finished = run(
            model,
            self._params,
            ids,
            mask,
            position_ids=places,
            max_lengths=max_lengths,
            recent=last_tokens(written, params.banned.prefix_length),
            start_id=jnp.int32(request.start_id or 0),
            beam_params=params,
            num_beams=method.num_beams,
            num_tokens=round_up(int(max_lengths.max()), TOKEN_BUCKET),
        )
        ends = set(np.asarray(params.eos_ids).tolist())
        best = jax.tree.map(
            lambda x: np.asarray(x)[: len(rows), : request.num_return_sequences], finished
        )
        return _hypotheses(best, ends)

    def _checked_search(
        self,
        model: CausalBeams | EncoderDecoderBeams,
        rows: Sequence[Sequence[int]],
        request: GenerationRequest,
    ) -> BeamSearch:
        """Returns the method of a request; raises UserError if the rows cannot be searched."""
        config, method = self.config, request.method
        if not isinstance(method, BeamSearch):
            raise UserError(
                f"method {type(method).__name__} does not search: give a BeamSearch, or use "
                "Generator.stream"
            )
        if isinstance(model, EncoderDecoderBeams) and request.start_id is None:
            raise UserError(
                "start_id is missing: give the token that the targets of the encoder-decoder "
                "begin with"
            )
        if isinstance(model, CausalBeams) and (method.min_tokens or method.no_repeat):
            raise UserError(
                f"min_tokens {method.min_tokens} and no_repeat {method.no_repeat} are of targets "
                "of encoder-decoders: leave them out"
            )
        for number, row in enumerate(rows):
            if not 1 <= len(row) <= config.max_length:
                raise UserError(
                    f"{model.row} {number} has {len(row)} tokens: the model takes 1 to "
                    f"{config.max_length}"
                )
            check_token_ids(row, model.vocab_size, f"{model.row} {number}")
        names = "start_id", "forced_bos_id", "forced_eos_id"
        request.check_tokens(config.vocab_size, **{name: name for name in names})
        return method


def _tokens_left(config: TransformerConfig, length: int) -> int:
    """Returns the number of tokens that can be written to a row until it must be read again."""
    limit = config.reread_length
    if limit is None or length > limit:
        limit = config.max_length
    return min(limit, config.max_length) - length + 1


def _check_is_not_reread(config: TransformerConfig, number: int, length: int, new: int) -> None:
    """Raises UserError if a row would have to be read again within a search."""
    left = _tokens_left(config, length)
    if config.reread_length is not None and new > left:
        raise UserError(
            f"prompt {number} of {length} tokens and {new} new ones are more than the "
            f"{config.reread_length} beyond which this model reads its text anew, as no search "
            f"does: ask for at most {left} new tokens, or sample them"
        )


def check_seed(seed: Any) -> None:
    """Checks a seed; a key is made of its last 32 bits alone.

    Raises:
      UserError: the seed is out of range.
    """
    check_whole("seed", seed)
    if not 0 <= seed < SEEDS:
        raise UserError(f"seed {seed} must be a whole number from 0 to {SEEDS - 1}")


def sampling_keys(seed: int, num_rows: int) -> RowKeys:
    """Returns a key for each row of a batch, made of its number and a seed.

    Raises:
      UserError: the seed is out of range.
    """
    check_seed(seed)
    return row_keys(jax.random.key(seed, impl="threefry2x32"), num_rows)


def _hypotheses(found: Finished, ends: Container[int]) -> list[list[Hypothesis]]:
    """Returns the hypotheses of each row, the best first; `found` holds arrays of numpy.

    Raises:
      UserError: a row has none.
    """
    if not (found.scores[:, 0] > -np.inf).all():  # NaN fails too
        raise UserError(
            "the search found nothing: the model's scores are not numbers; look at its parameters"
        )
    hypotheses: list[list[Hypothesis]] = [[] for _ in found.scores]
    for row, beam in np.argwhere(found.scores > -np.inf):
        tokens = found.tokens[row, beam, : found.lengths[row, beam]].tolist()
        score, log_prob = float(found.scores[row, beam]), float(found.log_probs[row, beam])
        end = tokens.pop() if tokens[-1] in ends else None
        hypotheses[row].append(Hypothesis(tokens, score, log_prob, end))
    return hypotheses


def _one_hot(rows: Sequence[Iterable[int]], vocab_size: int) -> jax.Array:
    """Returns the tokens that each row has as truth values, `[B, V]`."""
    seen = np.zeros((len(rows), vocab_size), bool)
    for row, tokens in enumerate(rows):
        seen[row, list(tokens)] = True
    return jnp.asarray(seen)


def _max_length(
    model: CausalBeams | EncoderDecoderBeams, request: GenerationRequest, length: int
) -> int:
    """Returns the longest target of a row of `length` tokens."""
    longest = model.remaining_positions(length)
    if request.max_extra_tokens is not None:
        longest = min(longest, length + request.max_extra_tokens)
    return longest if request.max_new_tokens is None else min(longest, request.max_new_tokens)
