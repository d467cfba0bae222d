"""Text in, translated text out: beam search with a tokenizer around it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...data.errors import UserError
from ...data.tasks.translation import encode_source, start_and_end
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.beam_search import BeamSearch, Hypothesis, Translator
from ...models.nn.typing import Params
from ..runs.load_run import search_of
from .bucketing import batches_by_length
from .text_model import TextModel

BATCH_SIZE = 32
"""Sentences that are searched together."""


@dataclasses.dataclass(frozen=True)
class Translation:
    """One way to say a text in the other language."""

    text: str
    score: float
    """What the search ranks by: the log-probability over a penalty for length."""
    log_probability: float
    """Of all its tokens, the closing one included, in nats."""
    num_tokens: int
    """How many these are."""


class TextTranslator(TextModel):
    """An encoder-decoder and its tokenizer; compiled once for each shape bucket.

    Args:
      model: an encoder-decoder.
      params: its parameters.
      tokenizer: its tokenizer.
      search: the search settings stored with the model, banned tokens included; by default as
        published, for text alone.
    """

    heads = ("seq2seq_lm",)
    refusal = "translates nothing"
    remedy = "give the run of an encoder-decoder, for example of the recipe numbers-en-fr"

    def __init__(
        self, model: Any, params: Params, tokenizer: Tokenizer, search: BeamSearch | None = None
    ) -> None:
        super().__init__(model, params, tokenizer)
        self._translator = Translator(model, params)
        self._target = tokenizer.target
        self._max_length = model.config.max_length
        self._start, self._end = start_and_end(tokenizer)
        self.search = BeamSearch() if search is None else search
        """How it searches unless a call says otherwise."""
        self._never = () if search else never_chosen(self._target, model.config.vocab_size)

    @classmethod
    def _open(
        cls, model: Any, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextTranslator":
        return cls(model, params, tokenizer, search_of(folder, tokenizer))

    def __call__(
        self,
        texts: Sequence[str],
        *,
        search: BeamSearch | None = None,
        places: Sequence[str] | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> list[list[Translation]]:
        """Translates each text; texts of nothing but white space stay empty.

        Args:
          texts: sentences, each translated by itself.
          search: how wide, and how many translations of each; by default `self.search`.
          places: where each text stands, for messages.
          on_batch: told after each batch how many texts and tokens it had.

        Returns:
          For each text, in order, its `search.num_return` best translations, the best first.

        Raises:
          UserError: a text is longer than the model reads.
        """
        ids = [encode_source(self._tokenizer, text) if text.strip() else [] for text in texts]
        self._check_lengths(ids, places)
        search = search or self.search
        search = dataclasses.replace(
            search, suppressed_tokens=(*search.suppressed_tokens, *self._never)
        )
        translated: list[list[Translation]] = [[_NOTHING] for _ in texts]
        if on_batch is not None:
            on_batch(ids.count([]), 0)
        for batch in batches_by_length(ids, BATCH_SIZE):
            sources = [ids[i] for i in batch]
            found = self._translator.search(sources, self._start, self._end, search)
            for i, hypotheses in zip(batch, found, strict=True):
                translated[i] = [self._translation(h) for h in hypotheses]
            if on_batch is not None:
                on_batch(len(batch), sum(translated[i][0].num_tokens for i in batch))
        return translated

    def _check_lengths(self, ids: list[list[int]], places: Sequence[str] | None) -> None:
        too_long = [i for i, row in enumerate(ids) if len(row) > self._max_length]
        if too_long:
            first = too_long[0]
            place = f"text {first + 1}" if places is None else places[first]
            also = f" ({len(too_long):,} texts are too long)" if len(too_long) > 1 else ""
            raise UserError(
                f"{place} has {len(ids[first])} tokens, more than the {self._max_length} that "
                f"the model reads{also}: split it into sentences"
            )

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        # A model can write the space before a word twice, and so also before the first.
        text = self._target.decode(hypothesis.tokens).strip()
        number = len(hypothesis.tokens) + hypothesis.ended
        return Translation(text, hypothesis.score, hypothesis.log_probability, number)


def never_chosen(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Tokens that are no text: special ones but the end, and rows without a token."""
    special = set(dataclasses.astuple(tokenizer.special_ids)) - {None, tokenizer.special_ids.eos}
    return (*sorted(special), *range(tokenizer.vocab_size, vocab_size))


def to_lines(translated: Sequence[Sequence[Translation]], num_best: int) -> list[str]:
    """The best translation of each text; or, of several, each behind its text's number and score.

    A translation that holds a line feed has a space there: line n stays the n-th text's.
    """
    if num_best == 1:
        return [_on_one_line(translations[0].text) for translations in translated]
    return [
        f"{number}\t{translation.score:.4f}\t{_on_one_line(translation.text)}"
        for number, translations in enumerate(translated, start=1)
        for translation in translations
    ]


def note_of_empty(texts: Sequence[str], translated: Sequence[Sequence[Translation]]) -> str | None:
    """What to tell a person if more than a tenth of the texts have an empty translation."""
    best = [found[0].text for text, found in zip(texts, translated, strict=True) if text.strip()]
    empty = best.count("")
    if 10 * empty <= len(best):
        return None
    return (
        f"{empty:,} of {len(best):,} translations are empty: train longer, or give another --step"
    )


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ")


_NOTHING = Translation("", 0.0, 0.0, 0)
