"""Translates texts by beam search."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.common.errors import UserError, counted
from ...data.common.progress import AdvanceFn, LogFn, ignore
from ...data.tasks.translation import encode_source
from ...data.tokenizers.base import Tokenizer
from ..decoding.generator import MANY_TOKENS, Generator
from ..decoding.request import GenerationRequest, Hypothesis, published_request
from ..model import Model
from ..nn.typing import Params
from .bucketing import batches_by_length
from .folder import beam_search_defaults
from .text_model import TextModel, require_texts

BATCH_SIZE = 32
"""Number of sentences per batch."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """A translation of one text."""

    text: str
    score: float
    """The score that ranks translations: the log-probability divided by the length penalty."""
    log_probability: float
    """The log-probability of all tokens, including the end token, in nats."""
    num_tokens: int
    """The number of tokens, including the end token."""


class TextTranslator(TextModel):
    """Translates texts with an encoder-decoder and its tokenizer.

    The model is compiled once for each padded shape.

    Args:
        model: an encoder-decoder.
        params: its parameters.
        tokenizer: its tokenizer.
        request: the search settings, including the ids of special tokens. Defaults to
          `published_request`.
    """

    heads = ("seq2seq_lm",)
    refusal = "cannot translate"
    remedy = "give the run of an encoder-decoder, for example of the recipe numbers-en-fr"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        request: GenerationRequest | None = None,
    ) -> None:
        super().__init__(model, params, tokenizer)
        self._generator = Generator(model, params)
        self._target, self._max_length = tokenizer.target, model.config.max_length
        self.request = request or published_request(tokenizer, model.config.vocab_size)
        """The default settings of the search. The options of a call override its fields."""

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextTranslator":
        return cls(model, params, tokenizer, beam_search_defaults(folder, tokenizer))

    def __call__(
        self,
        texts: Sequence[str],
        *,
        locations: Sequence[str] | None = None,
        truncate: bool = False,
        on_batch: AdvanceFn = ignore,
        log: LogFn = print,
        **options: Any,
    ) -> list[list[Translation]]:
        """Translates each text. The translation of a blank text is empty.

        Args:
            texts: sentences, which are translated separately.
            locations: the location of each text, for error messages.
            truncate: whether to truncate texts that are too long.
            on_batch: called after each batch with the number of its texts and the number of their
                tokens.
            log: called with the number of truncated texts.
            **options: fields of `self.request` to replace, such as `num_beams`, `length_penalty`
              and `num_return_sequences`.

        Returns:
            The `num_return_sequences` best translations of each text, best first.

        Raises:
            UserError: `texts` is a single string, a text is longer than the model's maximum length
                and `truncate` is False, or an option is out of range.
        """
        request = self.request_with(options)
        ids = self.encode(texts, locations=locations, truncate=truncate, log=log)
        translated: list[list[Translation]] = [[_NOTHING] for _ in texts]
        # Blank texts have no tokens and are not translated.
        on_batch(ids.count([]), 0)
        for batch in batches_by_length(ids, BATCH_SIZE):
            batch_translations = self.search([ids[i] for i in batch], request)
            for i, translations in zip(batch, batch_translations, strict=True):
                translated[i] = translations
            on_batch(len(batch), sum(translated[i][0].num_tokens for i in batch))
        return translated

    def request_with(self, options: Mapping[str, object]) -> GenerationRequest:
        """Returns the default request with the given fields replaced; see `__call__`.

        Raises:
            UserError: an option is out of range.
        """
        return dataclasses.replace(self.request, **options)

    def encode(
        self,
        texts: Sequence[str],
        *,
        locations: Sequence[str] | None = None,
        truncate: bool = False,
        log: LogFn = print,
    ) -> list[list[int]]:
        """Returns the tokens of each text, and no tokens for a blank text; see `__call__`."""
        require_texts(texts, "texts")
        ids = [encode_source(self._tokenizer, text) if text.strip() else [] for text in texts]
        return self._fitting(ids, locations, truncate, log)

    def search(
        self, sources: Sequence[list[int]], request: GenerationRequest
    ) -> list[list[Translation]]:
        """Translates a batch of encoded texts.

        Args:
            sources: the tokens of each text, at least one.
            request: the settings of the search.

        Returns:
            The `num_return_sequences` best translations of each text, best first.
        """
        result: Any
        *_, result = self.search_in_parts(sources, request, MANY_TOKENS)
        return result

    def search_in_parts(
        self, sources: Sequence[list[int]], request: GenerationRequest, num_steps: int
    ) -> Iterator[list[list[Translation]] | None]:
        """Yields None after every `num_steps` tokens of a search, then the result of `search`."""
        for hypotheses in self._generator.search_in_parts(sources, request, num_steps):
            yield None if hypotheses is None else self._translations(sources, hypotheses)

    def _translations(
        self, sources: Sequence[list[int]], all_hypotheses: Sequence[Sequence[Hypothesis]]
    ) -> list[list[Translation]]:
        """Converts the hypotheses of each source to translations."""
        return [
            # If a source contains gaps (T5 sentinels), its target contains sentinels as well, so
            # keep them in the text.
            [
                self._translation(h, not set(ids).isdisjoint(self._tokenizer.sentinels))
                for h in hypotheses
            ]
            for ids, hypotheses in zip(sources, all_hypotheses, strict=True)
        ]

    def _fitting(
        self, ids: list[list[int]], locations: Sequence[str] | None, truncate: bool, log: LogFn
    ) -> list[list[int]]:
        """Truncates or rejects sources that are longer than the model's maximum length."""
        longest = self._max_length
        too_long = [i for i, row in enumerate(ids) if len(row) > longest]
        if not too_long:
            return ids
        if truncate:
            log(f"{len(too_long):,} of {len(ids):,} texts truncated: longer than {longest} tokens")
            # Keep the end token.
            return [row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in ids]
        first = too_long[0]
        name = f"text {first + 1}" if locations is None else locations[first]
        raise UserError(
            f"{name} has {len(ids[first])} tokens, more than the {longest} that the model reads "
            f"({counted(len(too_long), 'text')} too long): split it into sentences, or translate "
            "with --truncate"
        )

    def _translation(self, hypothesis: Hypothesis, has_gaps: bool) -> Translation:
        # A model may generate a space before the first word.
        options = {"skip_special_tokens": False} if has_gaps else {}
        text = self._target.decode(hypothesis.tokens, **options).strip()
        number = len(hypothesis.tokens) + hypothesis.ended
        return Translation(text, hypothesis.score, hypothesis.log_probability, number)


def to_lines(translated: Sequence[Sequence[Translation]], num_best: int) -> list[str]:
    """Formats one translation per line.

    If `num_best` is 1, line n contains the best translation of the n-th text. Otherwise, each line
    contains the number of a text, a score and a translation. Line feeds in a translation become
    spaces.
    """
    if num_best == 1:
        return [translations[0].text.replace("\n", " ") for translations in translated]
    return [
        f"{number}\t{translation.score:.4f}\t{translation.text.replace(chr(10), ' ')}"
        for number, translations in enumerate(translated, start=1)
        for translation in translations
    ]


def note_of_empty(texts: Sequence[str], translated: Sequence[Sequence[Translation]]) -> str | None:
    """Returns a note if more than a tenth of the translations are empty, otherwise None."""
    best = [
        candidates[0].text
        for text, candidates in zip(texts, translated, strict=True)
        if text.strip()
    ]
    empty = best.count("")
    if 10 * empty <= len(best):
        return None
    return (
        f"{empty:,} of {len(best):,} translations are empty: train longer, or give another --step"
    )


_NOTHING = Translation("", 0.0, 0.0, 0)
