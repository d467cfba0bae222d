import itertools

import numpy as np
import pytest
from flaxzoo.data import DataError, NumberWords, spell
from flaxzoo.data.sources.builtin import spelled_numbers as number_words

NUMBERS = NumberWords.parse("builtin:numbers-en-fr")


def test_numbers_are_spelled():
    assert spell(97, "en") == "ninety-seven"
    assert spell(97, "fr") == "quatre-vingt-dix-sept"
    pairs = list(NUMBERS.validation)
    assert len(pairs) == len(set(pairs)) == number_words.VALIDATION_SIZE
    assert pairs[0].source == spell(NUMBERS.validation.numbers[0], "en")
    assert pairs[0].target == spell(NUMBERS.validation.numbers[0], "fr")
    assert pairs[0].location == f"the number {NUMBERS.validation.numbers[0]:,}"


def test_validation_pairs_are_never_drawn_in_training():
    held = number_words.HELD_OUT
    assert held == range(680_000, 700_000)
    assert all(number in held for number in NUMBERS.validation.numbers)
    assert len({number % 1000 for number in NUMBERS.validation.numbers}) > 500
    assert not any(number in held for number in NUMBERS.vocabulary.numbers)
    drawn = list(itertools.islice(number_words.draw_numbers(np.random.default_rng(1)), 50_000))
    assert not any(number in held for number in drawn)
    assert all(0 <= number < 1_000_000 for number in drawn)
    sizes = np.bincount([len(str(number)) for number in drawn], minlength=7) / len(drawn)
    assert sizes[6] > 0.4
    assert (sizes[1:6] > 0.05).all(), "small numbers are not rare"


def test_draws_are_a_function_of_their_generator():
    def first(seed):
        return list(itertools.islice(number_words.draw_numbers(np.random.default_rng(seed)), 200))

    assert first(3) == first(3) != first(4)


def test_other_names():
    assert NumberWords.parse("pairs:a,b") is None
    other = NumberWords.parse("builtin:numbers-fr-pt_BR")
    assert other.languages == ("fr", "pt_BR")
    assert other.validation.fingerprint != NUMBERS.validation.fingerprint


def test_language_that_is_unfinished(monkeypatch):
    import num2words

    class Broken:
        def to_cardinal(self, number):
            raise TypeError("no such thing")

    monkeypatch.setitem(num2words.CONVERTER_CLASSES, "zz", Broken())
    with pytest.raises(DataError, match=r"num2words .*7 .*'zz' \(TypeError\)"):
        spell(7, "zz")
