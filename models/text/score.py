"""Computes the probabilities of texts, and of possible next tokens or words.

By the chain rule, Pr(t₁ … t_n) = Π Pr(t_i | t₁ … t_{i−1}).
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.tasks.translation import encode_source, start_and_end
from ...data.tokenizers.base import Tokenizer
from ..finite import check_outputs
from ..heads.specs import CAUSAL_HEADS, require_head
from ..model import Model
from ..nn.typing import Array, Params
from .bucketing import pad_batch
from .prompting.continuations import ContinuationScorer
from .text_model import TextModel, require_texts


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """A token and its probability, given all tokens before it."""

    token: str
    id: int
    log_probability: float | None
    """In nats; None for the first token if the vocabulary has no token that begins a document."""
    total: float
    """The sum of the log-probabilities up to this token, in nats."""

    @property
    def probability(self) -> float | None:
        """The probability of the token."""
        return None if self.log_probability is None else math.exp(self.log_probability)


@dataclasses.dataclass(frozen=True)
class TextScore:
    """A text and the probabilities of its tokens."""

    text: str
    tokens: tuple[TokenScore, ...]

    @property
    def log_probability(self) -> float:
        """The log-probability of the whole text, in nats."""
        return self.tokens[-1].total if self.tokens else 0.0

    @property
    def num_scored(self) -> int:
        """The number of tokens that have a probability."""
        return sum(token.log_probability is not None for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """The perplexity per token: exp(− mean log-probability of a token)."""
        return math.exp(min(-self.log_probability / max(self.num_scored, 1), 700.0))

    @property
    def word_perplexity(self) -> float:
        """The perplexity per word: exp(− log-probability / number of words between spaces)."""
        return math.exp(min(-self.log_probability / max(len(self.text.split()), 1), 700.0))

    @property
    def bits_per_byte(self) -> float:
        """− log₂ of the text's probability, divided by its number of UTF-8 bytes."""
        return -self.log_probability / math.log(2) / max(len(self.text.encode()), 1)


@dataclasses.dataclass(frozen=True)
class NextToken:
    """A possible next token."""

    token: str
    id: int
    probability: float


@dataclasses.dataclass(frozen=True)
class NextWord:
    """A possible next word. Its probability is the product of the probabilities of its tokens."""

    word: str
    tokens: tuple[TokenScore, ...]
    log_probability: float

    @property
    def probability(self) -> float:
        """The probability that the text continues with these tokens."""
        return math.exp(self.log_probability)


class TextScorer(TextModel):
    """Computes the probabilities of texts with a generative model and its tokenizer.

    The model is compiled once for each padded shape. Each text is treated as the beginning of a
    document: if the vocabulary has a token that begins a document, that token comes first, as in
    training.

    Example::

        scorer = models.TextScorer.of_run("runs/quickstart")
        [score] = scorer(["It takes great courage"])
        print(score.log_probability, [token.probability for token in score.tokens])
        print(scorer.next_tokens("The train pulled into the", top_k=5))

    Args:
        model: a causal language model or an encoder-decoder.
        params: its parameters.
        tokenizer: its tokenizer.

    Raises:
        UserError: the model is not generative.
    """

    heads = (*CAUSAL_HEADS, "seq2seq_lm")
    refusal = "cannot score texts"
    remedy = "give a run of a causal language model or of a translation model"

    def __init__(self, model: Model, params: Params, tokenizer: Tokenizer) -> None:
        super().__init__(model, params, tokenizer)
        problem = "the model attends to later tokens (causal is false), so it cannot score texts"
        require(getattr(model.config, "causal", True), problem)

    def __call__(
        self,
        texts: Sequence[str],
        *,
        sources: Sequence[str] = (),
        stride: int | None = None,
        log: LogFn = print,
    ) -> list[TextScore]:
        """Returns the probability of each text, token by token.

        Args:
            texts: the texts. If a text is longer than the maximum length of a causal language
              model, it is scored in windows: each token after the first window has at least
              length - `stride` tokens of context.
            sources: for an encoder-decoder, the source of each text. In this case, the end token is
              also scored.
            stride: the number of tokens between the starts of successive windows. Defaults to half
              of the model's maximum length. With 1, each token has the longest possible context,
              but scoring is slowest.
            log: called with a line if texts are scored in windows.

        Raises:
            UserError: `texts` is not a list, a text is empty, `stride` is out of range, sources are
              missing or not supported, a sequence of an encoder-decoder is too long, or a
              log-probability is NaN.
        """
        require_texts(texts, "texts")
        require_texts(sources, "sources")
        require(texts, "texts must not be empty: give at least one text")
        # By default, each token after the first window sees at least half of the model's context.
        length = self._model.config.max_length
        stride = max(length // 2, 1) if stride is None else stride
        require(
            1 <= stride <= length,
            f"stride {stride} must be from 1 to {length}, the maximum length of the model",
        )
        tokenizer, translates = self._tokenizer, self._model.config.head == "seq2seq_lm"
        require(
            len(sources) == translates * len(texts),
            f"there are {len(sources)} sources for {len(texts)} texts: give an encoder-decoder one "
            "source per text, and give a causal language model no sources",
        )
        # Encode the texts, and reject texts without tokens, which have no score.
        ids = [tokenizer.target.encode(text, add_special_tokens=False) for text in texts]
        for number, (text, tokens) in enumerate(zip(texts, ids, strict=True), start=1):
            require(
                tokens,
                f"text {number} of {len(texts)} is {text!r} and has no tokens to score: leave it "
                "out",
            )
        if not translates:
            # A causal model scores a text in windows; an encoder-decoder reads it as one target.
            requests, owners = self._windows(ids, stride, log)
        else:
            _, end = start_and_end(tokenizer)
            ids = [[*tokens, end] for tokens in ids]
            requests = [
                (encode_source(tokenizer, source), tokens)
                for source, tokens in zip(sources, ids, strict=True)
            ]
            owners = range(len(ids))
            longest = max(map(len, itertools.chain(*requests)))
            problem = f"a text has {longest} tokens, but the model reads {length}: shorten it"
            require(longest <= length, problem)
        # Join the scores of each text, which are computed window by window.
        of_texts: list[list[float]] = [[] for _ in ids]
        for owner, score in zip(owners, self._scorer.score(requests, log=log), strict=True):
            of_texts[owner] += score.log_probabilities
        return [
            TextScore(text, self._token_scores(tokens, scores))
            for text, tokens, scores in zip(texts, ids, of_texts, strict=True)
        ]

    @functools.cached_property
    def _scorer(self) -> ContinuationScorer:
        scorer = ContinuationScorer(self._model, self._params, self._tokenizer)
        scorer._stored_start = self._stored_start
        return scorer

    def _windows(
        self, ids: Sequence[list[int]], stride: int, log: LogFn
    ) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
        """Divides texts into windows that fit the model.

        In each window after the first, `stride` new tokens are scored. The last window may have
        fewer new tokens.

        Returns:
            The context and the scored tokens of each window, and the index of its text.
        """
        length = self._model.config.max_length
        requests, owners = [], []
        for number, tokens in enumerate(ids):
            row = [*self._tokenizer.begins_document, *tokens]
            # Tokens that mark the beginning of a document have no score.
            scored = max(len(row) - len(tokens), 1)
            first = 0
            while scored < len(row):
                # A window has up to `length` + 1 tokens: the model reads `length` tokens, and the
                # last one predicts one more token.
                end = min(first + length + 1, len(row))
                requests.append((row[first:scored], row[scored:end]))
                owners.append(number)
                scored, first = end, first + stride
        if longer := sum(number > 1 for number in Counter(owners).values()):
            log(
                f"{longer:,} of {len(ids):,} texts are longer than the {length} tokens that the "
                f"model reads: they are scored in windows, {stride} tokens apart"
            )
        return requests, owners

    def next_tokens(self, text: str, *, top_k: int = 10) -> list[NextToken]:
        """Returns the most probable tokens after a text, best first.

        Args:
            text: the beginning of a document. If it is longer than the model's maximum length, only
              its end is read.
            top_k: the number of tokens.

        Raises:
            UserError: `top_k` is out of range, the text is empty and the vocabulary has no token
              that begins a document, the model is an encoder-decoder, or a probability is NaN.
        """
        size = self._tokenizer.vocab_size
        require(1 <= top_k <= size, f"top_k {top_k} must be from 1 to {size}")
        require_head(
            self._model.config,
            CAUSAL_HEADS,
            "does not predict next tokens",
            "score targets instead",
        )
        ids = self._prefix(text)[-self._model.config.max_length :]
        rows, _ = pad_batch([ids], 1, self._model.config.max_length)
        # Leave out rows of the embedding table that have no token.
        p = np.asarray(self._next(self._params, rows, len(ids) - 1))[:size]  # [V]
        check_outputs({"a probability": p})
        best = np.argsort(-p, kind="stable")[:top_k].tolist()
        return [NextToken(self._tokenizer.token(id), id, float(p[id])) for id in best]

    def next_words(self, text: str, words: Sequence[str]) -> list[NextWord]:
        """Returns the probability of each word after a text, best first.

        Exactly one space separates the text and the word, however many spaces the text ends with.
        This space belongs to the word. After a line feed, no space is added. The result is the
        probability that the text continues with the word's tokens, which may also begin a longer
        word.

        Raises:
            UserError: a word is empty or has a character that the vocabulary lacks; or as in
              `__call__`.
        """
        require(words, "words is empty: give at least one word to compare")
        # Score each word after the text, separated by exactly one space.
        before = text.rstrip(" ")
        between = " " if before and not before[-1].isspace() else ""
        joined = [f"{before}{between}{word.strip()}" for word in words]
        for word in words:
            require(word.strip(), f"the word {word!r} is empty: leave it out")
        candidates = []
        for word, score in zip(words, self(joined), strict=True):
            ranges = self._tokenizer.encode_with_offsets(score.text, add_special_tokens=False)[1]
            # The word consists of the tokens that end after the end of the text.
            of_word = tuple(
                token
                for token, (_, end) in zip(score.tokens, ranges, strict=True)
                if end > len(before)
            )
            check_known(word, [token.id for token in of_word], self._tokenizer)
            known = [
                token.log_probability for token in of_word if token.log_probability is not None
            ]
            if len(known) < len(of_word):
                # The first token has no probability if no token begins a document. In this case,
                # `_prefix` raises the error.
                self._prefix("")
            candidates.append(NextWord(word, of_word, sum(known)))
        return sorted(candidates, key=lambda candidate: -candidate.log_probability)

    def _prefix(self, text: str) -> list[int]:
        """Returns the tokens of a text at the beginning of a document."""
        ids = [*self._tokenizer.begins_document, *self._tokenizer.encode(text, False)]
        require(
            ids,
            f"the text {text!r} has no tokens, and the tokenizer has no token that begins a "
            f"document: give a text",
        )
        return ids

    def _token_scores(
        self, ids: Sequence[int], log_probabilities: Sequence[float]
    ) -> tuple[TokenScore, ...]:
        """Combines the tokens with their scores; the first token may have no score."""
        unscored = [None] * (len(ids) - len(log_probabilities))
        totals = itertools.accumulate([*(0.0 for _ in unscored), *log_probabilities])
        token = self._tokenizer.target.token
        return tuple(
            TokenScore(token(id), id, score, total)
            for id, score, total in zip(ids, [*unscored, *log_probabilities], totals, strict=True)
        )

    @functools.cached_property
    def _next(self):
        @jax.jit
        def compute(params: Params, ids: Array, last: Array) -> Array:
            projection = self._model.apply({"params": params}, input_ids=ids).projection
            hidden = jax.lax.dynamic_slice_in_dim(projection.hidden, last, 1, axis=1)
            logits = projection.replace(hidden=hidden).logits()[0, 0]  # [V]
            return jax.nn.softmax(logits.astype(jnp.float32))

        return compute


def check_known(word: str, ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raises UserError if the vocabulary has no tokens for a word."""
    problem = f"the word {word!r} has a character that the vocabulary lacks: give another word"
    require(ids and tokenizer.special_ids.unk not in ids, problem)
