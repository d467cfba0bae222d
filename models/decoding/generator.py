"""Generates tokens: `stream` samples continuations, and `search` finds the best by beam search.

A batch may contain rows of different lengths. Rows are padded to few different lengths, so that few
programs are compiled.
"""

from collections.abc import Container, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.fields import PositiveInt, Seed, check_value, require
from ..config import TransformerConfig
from ..heads.specs import CAUSAL_HEADS, require_head
from ..model import Model
from ..nn.dropout import RowKeys, row_keys
from ..nn.typing import Params
from .banned_sequences import last_tokens
from .beam_adapters import CausalBeams, EncoderDecoderBeams, SearchRows, beams_of
from .beam_search import begin, proceed
from .beam_step import Finished, beam_params
from .cached_context import CachedContext
from .continuous_batch import ContinuousBatch, read_length, tokens_left
from .draft_batch import DraftBatch
from .padding import pad_rows, power_of_two, round_up
from .request import GenerationRequest, Hypothesis, check_token_ids
from .sample import sampling_params
from .serving.open_batch import OpenBatch
from .serving.score_tokens import TokenAlternatives, score_tokens
from .speculative import Acceptance, Draft
from .unstack_layers import unstack_layers

ROW_BUCKET, TOKEN_BUCKET = 16, 32
"""Beam search is compiled for row lengths and target lengths that are multiples of these
numbers.
"""

# The number of tokens per call of the compiled program. On a CPU, one token per call is as fast as
# a compiled loop, and each token is available immediately. On an accelerator, every call waits for
# the host.
TOKENS_PER_CALL = {"cpu": 1}
DEFAULT_TOKENS_PER_CALL = 16
MANY_TOKENS = 1 << 30
"""An upper bound on the number of new tokens of a text."""
SEEDS = 1 << 32
"""The number of different seeds."""


class Generator:
    """Generates tokens with one model, by compiled programs.

    A generator keeps an unstacked copy of the parameters (`models.unstack_layers`). All generators
    of a model share the same compiled programs.

    Args:
      model: a causal language model or an encoder-decoder.
      params: its parameters.
      draft: a smaller model with the same vocabulary, which proposes tokens to `stream`
        (`models.Draft`). A draft model changes neither greedy tokens nor the distribution of
        sampled tokens.

    Raises:
      UserError: the model does not generate text, or the draft model cannot propose tokens to it.
    """

    def __init__(self, model: Model, params: Params, *, draft: Draft | None = None) -> None:
        # Check the model before its parameters are copied.
        beams_of(model)
        self.config = model.config
        if draft is not None:
            draft.check(model)
        self._draft = None if draft is None else draft.unstacked()
        self._model, self._params = unstack_layers(model, params)
        self.acceptance = Acceptance()
        """The counts of proposed and accepted draft tokens."""

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        seed: int = 0,
        tokens_per_call: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Continues prompts, a few tokens at a time.

        The result of row r depends only on its prompt, `seed` and r. Generation does not stop at
        an end token: to stop there, the caller must look for `request.eos_token_id`. When a row
        reaches the model's `max_length`, the oldest quarter of its tokens is dropped, and the
        remaining tokens are read again at new positions. A row that crosses the model's
        `reread_length` is also read again. The length of the cache doubles when it is full, so that
        n tokens require only O(log n) compiled programs.

        Args:
          prompts: the token ids of each row, at least one each.
          request: a request with one beam.
          seed: the random seed.
          tokens_per_call: the number of tokens per call of the compiled loop. Defaults to the
            fastest number on this backend. With a draft model, this number has no effect.

        Yields:
          New tokens int[B, n], n ≥ 1, until there are `request.max_new_tokens`.

        Raises:
          UserError: prompts are missing or empty; an id is not in the vocabulary; the request
            has several beams; the model is an encoder-decoder; or the logits are NaN or infinite.
        """
        limit = request.max_new_tokens
        require(
            limit is not None, "max_new_tokens is missing: give the number of tokens to generate"
        )
        batch = self.continuous_batch(
            prompts,
            request,
            keys=sampling_keys(seed, len(prompts)),
            limits=[limit or 1] * len(prompts),
            num_rows=len(prompts),
            tokens_per_call=tokens_per_call,
            scored=False,
        )
        # With a draft model, rows advance by different numbers of tokens.
        tokens: list[list[int]] = [[] for _ in prompts]
        done = 0
        for written in batch:
            tokens[written.text].extend(written.tokens)
            # Yield the tokens up to the length of the shortest row.
            ready = min(map(len, tokens))
            if ready > done:
                yield np.asarray([row[done:ready] for row in tokens], np.int32)
                done = ready

    def continuous_batch(
        self,
        prompts: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        keys: RowKeys,
        limits: Sequence[int],
        num_rows: int,
        tokens_per_call: int | None = None,
        scored: bool = True,
    ) -> ContinuousBatch:
        """Returns a batch that continues many prompts in a few rows.

        Rows advance in lockstep if there are as many rows as prompts, or if the model is a mixture
        of experts. Otherwise, when a text has ended, the next prompt takes its row.

        The new tokens of a prompt depend only on the prompt and its key. Iterate over the batch to
        get the tokens. To end a text early, call `stop` with the index of its prompt.

        Args:
          prompts: as for `stream`.
          request: as for `stream`; `limits` replaces `max_new_tokens`.
          keys: a key for each prompt, from `sampling_keys`.
          limits: the maximum number of new tokens of each prompt.
          num_rows: the number of texts generated at once.
          tokens_per_call: as for `stream`.
          scored: whether to compute the log-probabilities of tokens.

        Raises:
          UserError: as for `stream`, or a number is out of range.
        """
        self._check_prompts(prompts, request)
        require(
            len(prompts) == len(keys) == len(limits),
            f"{len(prompts)} prompts have {len(keys)} keys and {len(limits)} limits: give one "
            "key and one limit for every prompt",
        )
        for name, number in (("num_rows", num_rows), ("the least of limits", min(limits))):
            check_value(name, number, PositiveInt)
        sampling = sampling_params(
            request,
            self.config.vocab_size,
            banned=request.bad_words_ids,
            greedy=not request.samples,
            scored=scored,
        )
        if self._draft is None:
            batch = ContinuousBatch(
                self._model,
                self._params,
                sampling,
                num_rows=num_rows,
                lockstep=len(prompts) <= num_rows or self.config.num_experts > 0,
                tokens_per_call=tokens_per_call or _tokens_per_call(),
            )
        else:
            batch = DraftBatch(
                self._model,
                self._params,
                sampling,
                num_rows=num_rows,
                draft=self._draft,
                acceptance=self.acceptance,
            )
        # Start with the shortest prompts, so that caches grow late.
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            batch.add(i, prompts[i], key=keys[i : i + 1], limit=limits[i])
        return batch

    def open_batch(self, max_rows: int, *, banned: Sequence[Sequence[int]] = ()) -> OpenBatch:
        """Returns a batch without a draft model that texts may enter at any time.

        Args:
          max_rows: the maximum number of texts that are generated at the same time.
          banned: sequences of tokens that are never generated.

        Raises:
          UserError: the model is an encoder-decoder.
        """
        require_head(self.config, CAUSAL_HEADS, "is not sampled", "use beam search (num_beams)")
        return OpenBatch(
            self._model,
            self._params,
            max_rows=max_rows,
            tokens_per_call=_tokens_per_call(),
            banned=banned,
        )

    def token_scores(self, ids: Sequence[int], number: int) -> list[TokenAlternatives]:
        """Returns the log-probability of each token after the first, and the most probable tokens.

        Args:
          ids: a text, at most as long as the model's maximum length.
          number: the number of most probable tokens at each position.
        """
        longest = self.config.max_length
        # Padding follows the text, so that it does not change the scores of a causal model.
        row, _ = pad_rows([ids], length=read_length(len(ids), longest))
        scored = jax.device_get(score_tokens(self._model, self._params, row, number=number))
        chosen, best, scores = (x[0, : len(ids) - 1].tolist() for x in scored)
        return [
            TokenAlternatives(score, list(zip(*pair, strict=True)))
            for score, *pair in zip(chosen, best, scores, strict=True)
        ]

    def cached_context(self) -> CachedContext:
        """Returns an empty context for a conversation, so that each turn reads only new tokens.

        The context does not use a draft model.

        Raises:
          UserError: the model is an encoder-decoder.
        """
        require_head(self.config, ("causal_lm",), "supports no conversations", "give another model")
        return CachedContext(self._model, self._params, _tokens_per_call())

    def _check_prompts(self, prompts: Sequence[Sequence[int]], request: GenerationRequest) -> None:
        """Raises UserError if the prompts cannot be continued."""
        require(request.num_beams == 1, f"num_beams {request.num_beams} requires Generator.search")
        require_head(self.config, CAUSAL_HEADS, "is not sampled", "use beam search (num_beams)")
        problem = "every prompt needs at least one token: begin with the bos token"
        require(prompts and all(map(len, prompts)), problem)
        for number, prompt in enumerate(prompts):
            check_token_ids(prompt, self.config.vocab_size, f"prompt {number}")

    def search(
        self,
        rows: Sequence[Sequence[int]],
        request: GenerationRequest,
        *,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Hypothesis]]:
        """Finds the best targets of sources, or the best continuations of prompts.

        A program is compiled for each combination of these values:

        - the number of rows and the number of banned sequences, each rounded up to a power of 2,
        - the length of the rows, rounded up to a multiple of 16,
        - the length of the targets, rounded up to a multiple of 32,
        - the number of beams,
        - the settings that are strings or bools.

        Args:
          rows: the tokens of each source (including its end token) or of each prompt.
          request: a request that does not sample.
          positions: the position of each token of a source. By default, positions count from 0.

        Returns:
          Up to `request.num_return_sequences` hypotheses for each row, best first.

        Raises:
          UserError: the request samples; a draft model is given; an encoder-decoder has no start
            token; a row is empty or longer than `max_length`; the search could cross the model's
            `reread_length`; an id is not in the vocabulary; or the model's scores are NaN.
        """
        hypotheses: Any
        *_, hypotheses = self.search_in_parts(rows, request, MANY_TOKENS, positions=positions)
        return hypotheses

    def search_in_parts(
        self,
        rows: Sequence[Sequence[int]],
        request: GenerationRequest,
        num_steps: int,
        *,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[list[list[Hypothesis]] | None]:
        """Yields None after every `num_steps` tokens of a search, then the result of `search`."""
        config, model = self.config, beams_of(self._model)
        if self._draft is not None:
            self._draft.check_request(request, searched=True)
        self._check_search(model, rows, request)
        params = beam_params(request, config.vocab_size)
        if not rows:
            yield []
            return
        # Pad to few shapes, so that few programs are compiled.
        length = min(round_up(max(map(len, rows)), ROW_BUCKET), config.max_length)
        number = power_of_two(len(rows))
        ids, mask = pad_rows(rows, num_rows=number, length=length, left=model.pads_left)
        padded = None
        if positions is not None:
            padded, _ = pad_rows(positions, num_rows=number, length=length)
        # Padding rows have the maximum target length 0, so they are done immediately.
        max_lengths = np.zeros(number, np.int32)
        max_lengths[: len(rows)] = [_max_length(model, request, len(row)) for row in rows]
        for number_of_row, row in enumerate(rows):
            _check_is_not_reread(config, number_of_row, len(row), int(max_lengths[number_of_row]))
        # Banned sequences may begin in the tokens before a target: the start token or the prompt.
        first = request.decoder_start_token_id
        start = [] if first is None else [first]
        written = [start or row for row in rows] + [()] * (number - len(rows))
        # Search for the targets of all rows together.
        given = SearchRows(ids, mask, padded, jnp.int32(first or 0))
        settings = {"max_lengths": max_lengths, "beam_params": params}
        state = begin(
            model,
            self._params,
            given,
            recent=last_tokens(written, params.banned.prefix_length),
            num_beams=request.num_beams,
            num_tokens=round_up(int(max_lengths.max()), TOKEN_BUCKET),
            **settings,
        )
        steps, has_ended = np.int32(num_steps), False
        while not has_ended:
            state, ended = proceed(model, self._params, given, state, num_steps=steps, **settings)
            # `bool` waits until the tokens are computed.
            if not (has_ended := bool(ended)):
                yield None
        ends = set(np.asarray(params.eos_ids).tolist())
        best = jax.tree.map(
            lambda x: np.asarray(x)[: len(rows), : request.num_return_sequences], state.finished
        )
        yield _hypotheses(best, ends)

    def _check_search(
        self,
        model: CausalBeams | EncoderDecoderBeams,
        rows: Sequence[Sequence[int]],
        request: GenerationRequest,
    ) -> None:
        """Raises UserError if the rows cannot be searched."""
        config, causal = self.config, isinstance(model, CausalBeams)
        require(
            not request.samples and request.repetition_penalty == 1,
            f"do_sample {request.do_sample} and repetition_penalty {request.repetition_penalty} "
            "have no effect on a search: use Generator.stream",
        )
        require(
            causal or request.decoder_start_token_id is not None,
            "decoder_start_token_id is missing: give the token that the targets of the "
            "encoder-decoder begin with",
        )
        require(
            not causal or request.min_new_tokens == request.no_repeat_ngram_size == 0,
            f"min_new_tokens {request.min_new_tokens} and no_repeat_ngram_size "
            f"{request.no_repeat_ngram_size} require an encoder-decoder: leave them out",
        )
        for number, row in enumerate(rows):
            name = f"{model.row} {number}"
            problem = f"{name} has {len(row)} tokens: the model takes 1 to {config.max_length}"
            require(1 <= len(row) <= config.max_length, problem)
            check_token_ids(row, model.vocab_size, name)
        names = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
        request.check_tokens(config.vocab_size, *names)


def _tokens_per_call() -> int:
    return TOKENS_PER_CALL.get(jax.default_backend(), DEFAULT_TOKENS_PER_CALL)


def _check_is_not_reread(config: TransformerConfig, number: int, length: int, new: int) -> None:
    """Raises UserError if a search could cross the model's `reread_length`."""
    left = tokens_left(config, length)
    require(
        config.reread_length is None or new <= left,
        f"prompt {number} has {length} tokens and at most {new} new tokens, and beyond "
        f"{config.reread_length} tokens the model's cache is recomputed, which beam search does "
        f"not support: request at most {left} new tokens, or sample the tokens",
    )


def check_seed(seed: Any) -> None:
    """Checks that a seed is within the 32 bits that a random key contains.

    Raises:
      UserError: the seed is out of range.
    """
    check_value("seed", seed, Seed)


def sampling_keys(seed: int, num_rows: int) -> RowKeys:
    """Returns a key for each row of a batch, from the seed and the index of the row.

    Raises:
      UserError: the seed is out of range.
    """
    check_seed(seed)
    return row_keys(jax.random.key(seed, impl="threefry2x32"), num_rows)


def _hypotheses(finished: Finished, ends: Container[int]) -> list[list[Hypothesis]]:
    """Returns the hypotheses of each row, best first. `finished` contains NumPy arrays.

    Raises:
      UserError: a row has no hypothesis.
    """
    require(
        (finished.scores[:, 0] > -np.inf).all(),  # this comparison is also false for NaN
        "beam search found no hypothesis, because the model's scores are NaN: check its parameters",
    )
    hypotheses: list[list[Hypothesis]] = [[] for _ in finished.scores]
    for row, beam in np.argwhere(finished.scores > -np.inf):
        tokens = finished.tokens[row, beam, : finished.lengths[row, beam]].tolist()
        score, log_prob = float(finished.scores[row, beam]), float(finished.log_probs[row, beam])
        # A hypothesis that reached its maximum length has no end token.
        end = tokens.pop() if tokens[-1] in ends else None
        hypotheses[row].append(Hypothesis(tokens, score, log_prob, end))
    return hypotheses


def _max_length(
    model: CausalBeams | EncoderDecoderBeams, request: GenerationRequest, length: int
) -> int:
    """Returns the maximum target length for a row of `length` tokens."""
    longest = model.remaining_positions(length)
    if request.max_extra_tokens is not None:
        longest = min(longest, length + request.max_extra_tokens)
    return min(longest, request.max_new_tokens or longest)
