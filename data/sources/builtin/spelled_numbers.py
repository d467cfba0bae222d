"""Spells out numbers in two languages: endless sentence pairs that need no download.

``builtin:numbers-en-fr`` translates "ninety-seven" into "quatre-vingt-dix-sept". Any two languages
of the package ``num2words`` can be used. All numbers are below a million. The numbers of one range
are never drawn for training, so that validation uses numbers that training has not seen.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ...common.errors import DataError
from ...common.fields import require_one_of, require_value
from ..sentence_pairs import PairSource, SentencePair

LIMIT = 1_000_000
"""The exclusive upper bound of all numbers."""
HELD_OUT = range(680_000, 700_000)
"""The numbers that are never drawn for training."""
VALIDATION_SIZE = 1000
"""The number of validation examples, which are taken from ``HELD_OUT``."""
VOCABULARY_SIZE = 5000
"""The number of training numbers in the sample that trains a vocabulary."""

_BUILTIN = "builtin:"
_EXAMPLE = "builtin:numbers-en-fr"
# The stride between validation numbers. It is coprime to the size of HELD_OUT, so that the numbers
# are distinct and have all kinds of endings.
_STRIDE = 7919
_SEED_OF_VOCABULARY = 0x5EED
_DRAWN_AT_ONCE = 64


@dataclass(frozen=True)
class SpelledNumbers(PairSource):
    """Some numbers spelled out in two languages, as a source of a ``ParallelText``.

    Attributes:
      numbers: The numbers, in order.
      languages: The source language and the target language, as num2words names them.
    """

    numbers: tuple[int, ...]
    languages: tuple[str, str]

    def __iter__(self) -> Iterator[SentencePair]:
        source, target = self.languages
        for number in self.numbers:
            yield SentencePair(
                spell(number, source), spell(number, target), f"the number {number:,}"
            )

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class NumberWords:
    """The endless source of numbers spelled out in two languages.

    Attributes:
      name: The name as the user wrote it.
      languages: The source language and the target language, as num2words names them.
    """

    name: str
    languages: tuple[str, str]

    @classmethod
    def parse(cls, name: str) -> "NumberWords | None":
        """Parses a source name; returns None if it names a different kind of source.

        Args:
          name: A name such as ``builtin:numbers-en-fr``.

        Raises:
          DataError: No built-in source has this name, or a language is unknown.
        """
        if not name.startswith(_BUILTIN):
            return None
        match = require_value(
            re.fullmatch(r"builtin:numbers-(\w+)-(\w+)", name),
            f"the built-in pairs must be {_EXAMPLE} or two other languages, not joined with "
            f"another source, got {name!r}",
            DataError,
        )
        languages = match[1], match[2]
        # Import the package only here, because other sources do not need it.
        from num2words import CONVERTER_CLASSES

        for language in languages:
            label = f"the language in {name!r}"
            require_one_of(label, language, sorted(CONVERTER_CLASSES), error=DataError)
        return cls(name, languages)

    @cached_property
    def validation(self) -> SpelledNumbers:
        """The validation numbers, which are always the same and never occur in training."""
        # Spread the numbers over the held-out range.
        indices = sorted(i * _STRIDE % len(HELD_OUT) for i in range(VALIDATION_SIZE))
        numbers = tuple(HELD_OUT[index] for index in indices)
        return SpelledNumbers(self.name, numbers, self.languages)

    @cached_property
    def vocabulary(self) -> SpelledNumbers:
        """A sample of training numbers that trains a vocabulary; it is always the same."""
        drawn = draw_numbers(np.random.default_rng(_SEED_OF_VOCABULARY))
        numbers = tuple(next(drawn) for _ in range(VOCABULARY_SIZE))
        return SpelledNumbers(self.name, numbers, self.languages)


def draw_numbers(rng: np.random.Generator) -> Iterator[int]:
    """Yields random training numbers without end; none of them is in ``HELD_OUT``.

    Half of the numbers are drawn uniformly below a million, and half below a random power of ten.
    If all numbers were uniform, only one in a thousand would be below a thousand.

    Args:
      rng: The random number generator. Nothing else affects the numbers.
    """
    while True:
        # Draw in blocks, because single draws are slow.
        any_size = 10.0 ** rng.integers(1, 7, _DRAWN_AT_ONCE)
        below = np.where(rng.random(_DRAWN_AT_ONCE) < 0.5, LIMIT, any_size)
        drawn = (rng.random(_DRAWN_AT_ONCE) * below).astype(np.int64).tolist()
        yield from (number for number in drawn if number not in HELD_OUT)


# The cache is useful because a third of the drawn numbers are small and therefore repeat often.
@lru_cache(maxsize=1 << 15)
def spell(number: int, language: str) -> str:
    """Spells out a number.

    Args:
      number: In ``[0, LIMIT)``.
      language: The language, as num2words names it.

    Raises:
      DataError: num2words cannot spell this number in this language.
    """
    # Import the package only here, because other sources do not need it.
    from num2words import CONVERTER_CLASSES

    try:
        return CONVERTER_CLASSES[language].to_cardinal(number)
    # Some languages of num2words are incomplete and raise arbitrary exceptions.
    except Exception as error:
        raise DataError(
            f"num2words cannot spell {number} in {language!r} ({type(error).__name__}): "
            "choose another language"
        ) from None
