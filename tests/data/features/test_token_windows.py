import numpy as np
import pytest
from flaxzoo.data import DataError
from flaxzoo.data.features.token_windows import Windows
from hypothesis import given
from hypothesis import strategies as st

from ...support import frames
from .test_segment_pairs import CLS, SEP, FakeCorpus, halves


def windows_of(num_tokens, length, **options):
    """Windows of a text in which every token is its own position."""
    return Windows(
        FakeCorpus(None, 0, "", 0, ((num_tokens,),)), length, frames.bert(CLS, SEP), **options
    )


def examples(windows, number):
    return [windows.example(0, i, np.random.default_rng(i)) for i in range(number)]


@given(length=st.integers(6, 40), spare=st.integers(0, 30), seed=st.integers(0, 999))
def test_halves(length, spare, seed):
    half = length // 2
    windows = windows_of(half - 2 + 2 * (length - half - 1) + spare, length)
    example = windows.example(0, 0, np.random.default_rng(seed))
    a, b = halves(example)
    assert len(example.input_ids) == length
    assert example.input_ids[half - 1] == SEP  # the halfway point
    assert (len(a), len(b)) == windows.sizes
    assert (np.diff(a) == 1).all()
    assert (np.diff(b) == 1).all()
    assert not set(a) & set(b)
    assert example.label == int(b[0] != a[-1] + 1)


def test_halves_of_512_tokens():
    windows = windows_of(20_000, 512)
    drawn = examples(windows, 2000)
    for example in drawn:
        a, b = halves(example)
        assert (1 + len(a) + 1, len(b) + 1) == (256, 256)  # [CLS] A [SEP] and B [SEP]
        assert example.token_type_ids.sum() == 256
    starts = {label: [] for label in (0, 1)}
    for example in drawn:
        starts[example.label].append(example.input_ids[[1, 256]])
    assert abs(len(starts[1]) / 2000 - 0.5) < 5 * 0.5 / 2000**0.5
    assert windows.num_examples == 20_000 // 509
    # Both halves come from all over the text, before and behind one another.
    first, second = np.array(starts[1]).T
    for position in (first, second):
        assert (np.histogram(position, 4, (0, 20_000 - 255))[0] > len(first) / 6).all()
    assert 0.4 < np.mean(second > first) < 0.6


def test_every_place_of_the_other_half_is_equally_likely():
    windows = windows_of(20, 8)  # A has 2 tokens, B 3
    pairs = {tuple(e.input_ids[[1, 4]].tolist()) for e in examples(windows, 6000) if e.label}
    expected = {(a, b) for a in range(19) for b in range(18) if b + 3 <= a or b > a + 2}
    assert pairs == expected


def test_windows_without_next_sentence():
    windows = windows_of(3000, 512, next_sentence=False)
    drawn = examples(windows, 200)
    for example in drawn:
        (window,) = halves(example)
        assert len(window) == 510
        assert (np.diff(window) == 1).all()
        assert example.label is None
    starts = {int(example.input_ids[1]) for example in drawn}
    assert len(starts) > 150
    assert (windows.num_examples, min(starts) < 100, max(starts) > 2390) == (5, True, True)


def test_short_texts_are_refused():
    assert windows_of(2 + 2 * 3, 8).sizes == (2, 3)
    with pytest.raises(DataError, match=r"8 tokens .*text of 8 .* have 7"):
        windows_of(7, 8)
    with pytest.raises(DataError, match=r"text of 6 .* have 5"):
        windows_of(5, 8, next_sentence=False)
    with pytest.raises(DataError, match="length 5 "):
        windows_of(50, 5)
