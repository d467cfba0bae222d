"""Probabilities of given texts: of each token, of the next token, of words that may come next."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ...data.errors import UserError
from ...data.tasks.translation import encode_source, start_and_end
from ...data.tokenizers.base import Tokenizer
from ...models.model import Model
from ...models.nn.typing import Array, Params
from ..objectives.losses import token_log_probs
from ..progress import LogFn
from ..runs.finite import check_outputs
from .bucketing import batches_by_length, pad_batch
from .text_model import TextModel

TOKENS_AT_ONCE = 1 << 13
"""The most tokens of a batch, padding included."""
MOST_ROWS = 8
"""The most rows of a batch."""


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """A token of a text and its probability given all tokens before it."""

    token: str
    id: int
    probability: float | None
    """None for a first token that nothing precedes, where the vocabulary has no token that begins
    a text."""
    log_probability: float | None
    """The natural logarithm of `probability`."""
    sum: float
    """The sum of the log-probabilities of all tokens up to this one."""


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The probability of a text: the product of the probabilities of its tokens."""

    tokens: list[TokenScore]
    log_probability: float
    """The sum over all tokens that have one, in nats."""
    num_tokens: int
    """The number of these tokens, the end token of a translation included."""
    num_words: int
    """The number of words between white space."""
    num_characters: int

    @property
    def perplexity(self) -> float | None:
        """exp(-log-probability / tokens); None without tokens, or beyond the largest float."""
        return self._perplexity(self.num_tokens)

    @property
    def word_perplexity(self) -> float | None:
        """exp(-log-probability / words), which does not depend on the vocabulary."""
        return self._perplexity(self.num_words)

    @property
    def character_perplexity(self) -> float | None:
        """exp(-log-probability / characters), which does not depend on the vocabulary."""
        return self._perplexity(self.num_characters)

    def _perplexity(self, number: int) -> float | None:
        try:
            return math.exp(-self.log_probability / number) if number else None
        except OverflowError:
            return None

    def totals(self) -> dict[str, float | int | None]:
        """Returns all figures of the text as a whole, by name."""
        names = ("log_probability", "num_tokens", "num_words", "num_characters")
        names = (*names, "perplexity", "word_perplexity", "character_perplexity")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class NextToken:
    """A token that may come next."""

    token: str
    id: int
    probability: float


@dataclasses.dataclass(frozen=True)
class WordScore:
    """A word that is given for a place in a text."""

    word: str
    tokens: list[str]
    """The pieces of the word."""
    probability: float
    """The product of the probabilities of the pieces, each given the pieces before it."""
    log_probability: float
    """The sum of their logarithms, in nats."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A window of a text: what the model reads, and which of its predictions count."""

    text: int
    """The number of the text."""
    inputs: list[int]
    labels: list[int]
    """The next token at each position."""
    num_read: int
    """The number of first positions that an earlier window has scored."""
    source: list[int] | None


class TextScorer(TextModel):
    """A causal language model or an encoder-decoder, asked for probabilities.

    Every text begins after the token that begins a document, where the vocabulary has one: the
    first token of a text then has a probability too, and its product with the others is
    Pr(t₁ … t_N) = Π Pr(t_n | t₁ … t_{n-1}).

    Example::

        scorer = train.TextScorer.of_run("runs/quickstart")
        [score] = scorer.score(["It takes great courage"])
        for token in score.tokens:
            print(token.token, token.probability, token.sum)
        scorer.next_tokens("The train pulled into the", top_k=10)
        scorer.compare("The train pulled into the", ["station", "peanut"])

    Args:
      model: a causal language model, or an encoder-decoder.
      params: its parameters.
      tokenizer: its tokenizer.
    """

    heads = ("causal_lm", "seq2seq_lm")
    refusal = "gives no probability of a next token"
    remedy = "give a run of a causal language model or of an encoder-decoder"

    def __init__(self, model: Model, params: Params, tokenizer: Tokenizer) -> None:
        super().__init__(model, params, tokenizer)
        self.has_source = model.config.head == "seq2seq_lm"
        """Whether each text has a source, which an encoder reads."""
        self._target, self._context = tokenizer.target, model.config.max_length
        self._end: list[int] = []
        if self.has_source:
            self._start, end = start_and_end(tokenizer)
            self._end = [end]
        else:
            self._start = tokenizer.special_ids.bos

    def score(
        self,
        texts: Sequence[str],
        sources: Sequence[str] | None = None,
        *,
        stride: int | None = None,
        begin: bool = True,
        log: LogFn | None = None,
    ) -> list[TextScore]:
        """Returns the probability of each text, token by token.

        A text that is longer than the model reads is scored in windows of the model's length,
        each `stride` tokens after the one before. Every token is scored once, in the first window
        that holds it: from the second window on with at least length - `stride` tokens before it.
        The logits are computed for a chunk of the tokens at a time.

        Args:
          texts: texts, each one document; for an encoder-decoder the targets, whose end token is
            scored too.
          sources: the source of each target; only for an encoder-decoder.
          stride: how many tokens a further window scores, by default half of the model's length.
            1 gives every token the longest context, at the price of one forward pass for each.
          begin: whether a text begins with the token that begins a document, if the vocabulary
            has one. Without it the first token has no probability.
          log: called with a line for each text that is longer than the model reads.

        Raises:
          UserError: the number of sources is not that of the texts, `stride` is out of range, the
            target of an encoder-decoder or a source is longer than the model reads, or a
            probability is NaN.
        """
        stride = max(1, self._context // 2) if stride is None else stride
        if not 1 <= stride <= self._context:
            raise UserError(
                f"stride {stride} must be from 1 to {self._context}, the length that the model "
                "reads"
            )
        read = self._sources(len(texts), sources)
        whole = [
            [*self._before(begin), *self._encode(text, self._target), *self._end] for text in texts
        ]
        rows: list[_Row] = []
        for i, (ids, source) in enumerate(zip(whole, read, strict=True)):
            windows = list(rolling_windows(len(ids) - 1, self._context, stride))
            if len(windows) > 1:
                self._check_long(i, len(ids), len(windows), stride, log)
            rows += [
                _Row(i, ids[start:end], ids[start + 1 : end + 1], first - start, source)
                for start, first, end in windows
            ]
        found = self._log_probs(rows)
        parts: list[list[np.ndarray]] = [[np.zeros(0)] for _ in texts]
        for row, log_probs in zip(rows, found, strict=True):
            parts[row.text].append(log_probs)
        num_before = len(self._before(begin))
        scores = []
        for text, ids, of_text in zip(texts, whole, parts, strict=True):
            log_probs = np.concatenate(of_text)
            check_outputs({"log-probabilities": log_probs})
            scores.append(self._text_score(text, ids[num_before:], log_probs))
        return scores

    def next_tokens(
        self,
        prompt: str,
        *,
        top_k: int = 10,
        source: str | None = None,
        begin: bool = True,
        log: LogFn | None = None,
    ) -> list[NextToken]:
        """Returns the `top_k` most probable tokens after a text, the best first.

        Args:
          prompt: the text; of one that is longer than the model reads, the last tokens are read.
          top_k: the number of tokens; the probabilities of all sum to 1 unless the model has
            more rows than the vocabulary has tokens.
          source: the source, for an encoder-decoder.
          begin: as in `score`.
          log: called with a line if the text is longer than the model reads.

        Raises:
          UserError: `top_k` is out of range, there is nothing before the token, a source is
            missing or not wanted, or a probability is NaN.
        """
        number = self._target.vocab_size
        if not 1 <= top_k <= number:
            raise UserError(f"top_k {top_k} must be from 1 to {number}")
        [source_ids] = self._sources(1, None if source is None else [source])
        ids = self._prompt(prompt, begin, log)
        row = _Row(0, ids, ids, 0, source_ids)
        probabilities = np.asarray(
            self._next(self._params, self._inputs([row], 1), np.int32(len(ids) - 1))
        )
        check_outputs({"probabilities": probabilities})
        # The vocabulary of a model may have rows that are no token.
        best = np.argsort(-probabilities[:number], kind="stable")[:top_k]
        return [
            NextToken(self._target.token(id), id, float(probabilities[id])) for id in best.tolist()
        ]

    def compare(
        self,
        prompt: str,
        words: Sequence[str],
        *,
        source: str | None = None,
        space: bool = True,
        begin: bool = True,
        log: LogFn | None = None,
    ) -> list[WordScore]:
        """Returns the probability that a text goes on with each of some words, in their order.

        A word of several tokens has the product of the probabilities of its pieces, each given
        the text and the pieces before it. A longer word may begin with the same pieces: the
        probability of "station" includes that of "stations" where its pieces begin alike.

        Args:
          prompt: the text. Its last spaces count as part of each word, as the vocabulary has
            them.
          words: the words to compare.
          source: the source, for an encoder-decoder.
          space: whether a space stands between the text and a word where neither has one.
          begin: as in `score`.
          log: called with a line if the text is longer than the model reads.

        Raises:
          UserError: there are no words, one is empty, has a character that the vocabulary lacks or
            as many pieces as the model reads, there is nothing before it, a source is missing or
            not wanted, or a probability is NaN.
        """
        if not words:
            raise UserError("there are no words to compare: give at least one")
        [source_ids] = self._sources(1, None if source is None else [source])
        stem = prompt.rstrip(" ")
        ids = self._prompt(stem, begin, log)
        rows = []
        for word in words:
            if not word.strip():
                raise UserError(f"the word {word!r} is empty: leave it out")
            own = prompt[len(stem) :] + word
            if space and prompt and not prompt[-1].isspace() and not word[0].isspace():
                own = f" {word}"
            whole = [*self._before(begin), *self._encode(stem + own, self._target)]
            whole = [*self._before(begin), *self._encode(stem + own, self._target)]
            # Where the text ends in another token than it would alone, the word begins there.
            bare = [*self._before(begin), *self._encode(stem, self._target)]
            longest = min(len(bare), len(whole))
            same = next((i for i in range(longest) if bare[i] != whole[i]), longest)
            before, pieces = whole[:same], whole[same:]
            if not before or not pieces:
                before, pieces = ids, self._encode(own, self._target)
            check_pieces(word, pieces, self._target)
            if len(pieces) >= self._context:
                raise UserError(
                    f"the word {word!r} has {len(pieces)} tokens, the model reads "
                    f"{self._context}: give it as a text to score"
                )
            whole = [*before, *pieces]
            inputs, labels = whole[:-1][-self._context :], whole[1:][-self._context :]
            rows.append(_Row(0, inputs, labels, len(labels) - len(pieces), source_ids))
        found = self._log_probs(rows)
        check_outputs({"log-probabilities": np.concatenate(found)})
        return [
            word_score(word, row.labels[row.num_read :], log_probs, self._target)
            for word, row, log_probs in zip(words, rows, found, strict=True)
        ]

    def _before(self, begin: bool) -> list[int]:
        """Returns the token that begins a text, if any; every target of a translation has one."""
        wanted = self._start is not None and (begin or self.has_source)
        return [self._start] if wanted and self._start is not None else []

    @staticmethod
    def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def _prompt(self, prompt: str, begin: bool, log: LogFn | None) -> list[int]:
        """Returns the last tokens of a text, as many as the model reads."""
        ids = [*self._before(begin), *self._encode(prompt, self._target)]
        if not ids:
            raise UserError(
                "nothing stands before the next token, for the text is empty and begins with no "
                "token of its own: give a text"
            )
        if len(ids) > self._context and log is not None:
            log(
                f"the text has {len(ids):,} tokens, more than the {self._context:,} that the model "
                "reads: only the last of them are read"
            )
        return ids[-self._context :]

    def _sources(self, number: int, sources: Sequence[str] | None) -> list[list[int] | None]:
        """Returns the tokens of each text's source; None of a model without an encoder."""
        if not self.has_source:
            if sources is not None:
                raise UserError("a model without an encoder reads no source: leave the source out")
            return [None] * number
        if sources is None or len(sources) != number:
            given = 0 if sources is None else len(sources)
            raise UserError(
                f"an encoder-decoder needs the source of each text: {number} texts have {given} "
                "sources"
            )
        read: list[list[int] | None] = []
        for text in sources:
            ids = encode_source(self._tokenizer, text)
            if len(ids) > self._context:
                raise UserError(
                    f"a source has {len(ids):,} tokens, the model reads {self._context:,}: "
                    "shorten it"
                )
            read.append(ids)
        return read

    def _check_long(
        self, number: int, length: int, num_windows: int, stride: int, log: LogFn | None
    ) -> None:
        what = f"text {number + 1} has {length:,} tokens, more than the {self._context:,} that the"
        if self.has_source:
            raise UserError(f"{what} decoder reads: split it")
        if log is not None:
            log(
                f"{what} model reads: it is scored in {num_windows:,} windows of up to "
                f"{self._context:,} tokens, {stride:,} apart"
            )

    def _inputs(self, rows: Sequence[_Row], batch_size: int) -> dict[str, np.ndarray]:
        """Pads rows to the model's keyword arguments, `[batch_size, T]`."""
        ids, mask = pad_batch([row.inputs for row in rows], batch_size, self._context)
        if not self.has_source:
            return {"input_ids": ids, "attention_mask": mask}
        read = [row.source or [] for row in rows]
        source, source_mask = pad_batch(read, batch_size, self._context)
        return {
            "input_ids": source,
            "attention_mask": source_mask,
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
        }

    def _log_probs(self, rows: Sequence[_Row]) -> list[np.ndarray]:
        """Returns the log-probabilities of each row's labels after the first `num_read`."""
        found = [np.zeros(0)] * len(rows)
        size = max(1, min(MOST_ROWS, TOKENS_AT_ONCE // self._context, len(rows)))
        for batch in batches_by_length([row.inputs for row in rows], size):
            chosen = [rows[i] for i in batch]
            inputs = self._inputs(chosen, size)
            labels, _ = pad_batch([row.labels for row in chosen], size, self._context)
            log_probs = np.asarray(self._labels(self._params, inputs, labels), np.float64)
            for i, row, values in zip(batch, chosen, log_probs, strict=False):
                found[i] = values[row.num_read : len(row.labels)]
        return found

    @functools.cached_property
    def _labels(self):
        """The compiled log-probabilities of labels, `[B, T]`; logits are never whole."""

        def labels(params: Params, inputs: dict[str, Array], labels: Array) -> Array:
            outputs = self._model.apply({"params": params}, **inputs)
            return token_log_probs(outputs.projection, labels).log_prob

        return jax.jit(labels)

    @functools.cached_property
    def _next(self):
        """The compiled probabilities of all tokens after one position of a row, `[V]`."""

        def following(params: Params, inputs: dict[str, Array], position: Array) -> Array:
            projection = self._model.apply({"params": params}, **inputs).projection
            hidden = jax.lax.dynamic_slice_in_dim(projection.hidden, position, 1, axis=1)
            logits = dataclasses.replace(projection, hidden=hidden).logits()  # [1, 1, V]
            return jax.nn.softmax(logits[0, 0])

        return jax.jit(following)

    def _text_score(self, text: str, ids: list[int], log_probs: np.ndarray) -> TextScore:
        """Makes the record of a text; a first token without a context has no probability."""
        unscored = len(ids) - len(log_probs)
        sums = np.cumsum(log_probs)
        tokens = []
        for position, id in enumerate(ids):
            i = position - unscored
            value = float(log_probs[i]) if i >= 0 else None
            tokens.append(
                TokenScore(
                    self._target.token(id),
                    id,
                    None if value is None else math.exp(value),
                    value,
                    float(sums[i]) if i >= 0 else 0.0,
                )
            )
        total = float(sums[-1]) if len(sums) else 0.0
        return TextScore(tokens, total, len(log_probs), len(text.split()), len(text))


def rolling_windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields windows that together predict each position of a text once.

    Args:
      length: the number of positions.
      context: the longest window.
      stride: how many positions a window after the first predicts, at most `context`.

    Yields:
      `(start, first, end)`: the window reads positions from `start` to before `end`, and its
      predictions count from `first` on. Each window after the first is as long as the context.
    """
    first, end = 0, min(context, length)
    while first < length:
        yield max(0, end - context), first, end
        first, end = end, min(end + stride, length)


def check_pieces(word: str, pieces: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raises UserError if the vocabulary has no tokens for a word."""
    if not pieces or tokenizer.special_ids.unk in pieces:
        raise UserError(
            f"the word {word!r} has a character that the vocabulary lacks: give another word"
        )


def word_score(
    word: str, pieces: Sequence[int], log_probs: np.ndarray, tokenizer: Tokenizer
) -> WordScore:
    """Makes the record of a word from the log-probabilities of its pieces."""
    total = float(np.sum(log_probs))
    return WordScore(word, [tokenizer.token(id) for id in pieces], math.exp(total), total)
