"""Span corruption: the numbers of the authors' code, and texts that can be restored."""

import numpy as np
import pytest
from flaxzoo.data.features.span_corruption import SpanCorruption
from hypothesis import given
from hypothesis import strategies as st

END, FIRST_TOKEN = 1, 200
SENTINELS = tuple(range(199, 99, -1))


def counts_of_the_authors(length, density, mean):
    """`random_spans_noise_mask` of T5's preprocessors, as far as it counts."""
    noise = int(np.round(np.float32(length) * np.float32(density)))
    noise = min(max(noise, 1), length - 1)
    return noise, max(int(np.round(np.float32(noise) / np.float32(mean))), 1)


@given(st.integers(2, 600), st.integers(0, 99))
def test_source_and_target_restore_the_text(size, seed):
    text = np.arange(FIRST_TOKEN, FIRST_TOKEN + size)
    corruption = SpanCorruption()
    source, target = corruption.corrupt(text, SENTINELS, END, np.random.default_rng(seed))
    noise, spans = counts_of_the_authors(size, 0.15, 3.0)
    assert (len(source), len(target)) == (size - noise + spans + 1, noise + spans + 1)
    sizes = corruption.pair_sizes(np.asarray([size]))
    assert [len(source), len(target)] == np.ravel(sizes).tolist()
    # Sentinels are numbered in the order of the text, the same on both sides.
    for side in (source, target):
        assert side[side < FIRST_TOKEN].tolist() == [*SENTINELS[:spans], END]
    assert (source[0], target[0]) == (FIRST_TOKEN, SENTINELS[0])
    spans_of = np.split(target[:-1], np.flatnonzero(target[:-1] < FIRST_TOKEN)[1:])
    found = {part[0]: part[1:] for part in spans_of}
    assert all(len(part) for part in found.values())
    restored = [found.get(token, [token]) for token in source[:-1]]
    np.testing.assert_array_equal(np.concatenate(restored), text)


def test_published_lengths():
    """Inputs of 512 tokens are of texts of 568, and have targets of 114 (T5's task definition)."""
    corruption = SpanCorruption()
    assert corruption.longest_text(512) == 568
    assert np.ravel(corruption.pair_sizes(np.asarray([568]))).tolist() == [512, 114]
    assert corruption.longest_text(512, 50) < 568
    assert corruption.longest_text(2) == 0


def test_gaps_are_everywhere_and_of_all_lengths():
    corruption, dropped, lengths = SpanCorruption(), np.zeros(40), []
    for seed in range(2000):
        spans = corruption.span_lengths(40, np.random.default_rng(seed))
        lengths += spans[1::2].tolist()
        dropped += np.repeat(np.arange(len(spans)) % 2, spans)
    assert sum(dropped) == 2000 * 6
    assert np.mean(lengths) == 3
    assert set(lengths) == {1, 2, 3, 4, 5}
    # Less at the begin, which is kept, and about the same elsewhere.
    assert (dropped[0], dropped[1:].min() > 50, dropped[4:-1].min() > 120) == (0, True, True)


@pytest.mark.parametrize(("density", "mean"), [(0.5, 1.0), (0.9, 3.0), (0.01, 3.0)])
def test_other_densities(density, mean):
    corruption, text = SpanCorruption(density, mean), np.arange(FIRST_TOKEN, FIRST_TOKEN + 100)
    source, target = corruption.corrupt(text, SENTINELS, END, np.random.default_rng(0))
    assert sum(target >= FIRST_TOKEN) == 100 * density
    assert sum(source >= FIRST_TOKEN) == 100 - 100 * density
