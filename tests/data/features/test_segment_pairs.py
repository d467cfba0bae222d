from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np
import pytest
from flaxzoo.data import DataError
from flaxzoo.data.corpora.sentence_corpus import SentenceCorpus
from flaxzoo.data.features.segment_pairs import Segments, _truncate, sizes_of_pair
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ...support import frames

CLS, SEP = -1, -2


@dataclass(frozen=True)
class FakeCorpus(SentenceCorpus):
    """Documents in memory in which every token is its own place."""

    sizes: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def tokens(self):
        return np.arange(sum(map(sum, self.sizes)))

    @cached_property
    def sentence_starts(self):
        return np.cumsum([0, *(size for document in self.sizes for size in document)])

    @cached_property
    def document_starts(self):
        return np.cumsum([0, *map(len, self.sizes)])


def segments_of(sizes, length, **options):
    corpus = FakeCorpus(None, 0, "", 0, tuple(map(tuple, sizes)))
    return Segments(corpus, length, frames.bert(CLS, SEP), **options)


def document_of(segments, token):
    corpus = segments.corpus
    starts = corpus.sentence_starts[corpus.document_starts]
    return int(np.searchsorted(starts, token, "right")) - 1


documents = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=25), min_size=1, max_size=8)
lengths = st.integers(8, 40)


def halves(example):
    """Checks the template of an example and returns its segments: A and, of pairs, B."""
    ids, types = example.input_ids, example.token_type_ids
    assert ids.dtype == types.dtype == np.int32
    ends = np.flatnonzero(ids == SEP).tolist()
    assert ids[0] == CLS
    assert ends[-1] == len(ids) - 1
    assert types.tolist() == [0] * (ends[0] + 1) + [1] * (len(ids) - ends[0] - 1)
    starts = [0, *ends[:-1]]
    return [ids[start + 1 : end] for start, end in zip(starts, ends, strict=True)]


@given(sizes=documents, length=lengths, seed=st.integers(0, 99), epoch=st.integers(0, 3))
@settings(deadline=None)
def test_pairs(sizes, length, seed, epoch):
    assume(len(sizes) > 1 and max(map(len, sizes)) > 1)
    segments = segments_of(sizes, length, seed=seed)
    corpus = segments.corpus
    for index in range(segments.num_examples):
        example = segments.example(epoch, index, np.random.default_rng([seed, index]))
        segment = segments.select(epoch, index, np.random.default_rng([seed, index]))
        a, b = halves(example)
        assert len(example.input_ids) <= length
        assert min(len(a), len(b)) > 0
        assert (np.diff(a) == 1).all()
        assert (np.diff(b) == 1).all()
        first, last = document_of(segments, a[0]), document_of(segments, b[0])
        assert first == segment.document
        assert len(sizes[first]) > 1
        if example.label:
            assert first != last
        else:
            assert first == last
            assert segment.other == segment.middle
        starts = corpus.sentence_starts
        whole = [
            starts[segment.middle] - starts[segment.first],
            starts[segment.end] - starts[segment.other],
        ]
        assert (len(a), len(b)) == sizes_of_pair(*whole, length - 3)
        if sum(whole) <= length - 3 and not example.label:  # nothing cut: adjacent
            assert a[-1] + 1 == b[0]


@given(sizes=documents, length=lengths, seed=st.integers(0, 99))
@settings(deadline=None)
def test_single_segments(sizes, length, seed):
    segments = segments_of(sizes, length, seed=seed, next_sentence=False)
    for index in range(segments.num_examples):
        example = segments.example(1, index, np.random.default_rng(index))
        (a,) = halves(example)
        assert example.label is None
        assert 0 < len(a) <= length - 2
        assert (np.diff(a) == 1).all()
        assert document_of(segments, a[0]) == document_of(segments, a[-1])


@given(sizes=documents, length=lengths, seed=st.integers(0, 99), jitter=st.booleans())
@settings(deadline=None)
def test_every_epoch_offers_every_sentence(sizes, length, seed, jitter):
    segments = segments_of(
        sizes, length, seed=seed, next_sentence=False, short_fraction=0, jitter=jitter
    )
    total = sum(-(-sum(document) // segments.target) for document in sizes)
    assert segments.num_examples == total
    for epoch in range(2):
        offered = set()
        for index in range(segments.num_examples):
            segment = segments.select(epoch, index, np.random.default_rng(0))
            offered.update(range(segment.first, segment.end))
        assert offered == set(range(segments.corpus.num_sentences))


@given(sizes=documents, length=lengths, seed=st.integers(0, 99))
@settings(deadline=None)
def test_pairs_in_either_order(sizes, length, seed):
    assume(any(len(document) > 1 for document in sizes))
    segments = segments_of(sizes, length, swap=True, seed=seed)
    for index in range(segments.num_examples):
        rng = np.random.default_rng([seed, index])
        example = segments.example(0, index, rng)
        a, b = halves(example)
        assert document_of(segments, a[0]) == document_of(segments, b[0])
        assert example.label == int(b[0] < a[0])


def test_starts_differ_between_epochs():
    sizes = [[5] * 95, [5] * 73, [5] * 9]
    segments = segments_of(sizes, 53)
    begins = [
        [segments.select(epoch, index, np.random.default_rng(0)).first for index in range(19)]
        for epoch in range(40)
    ]
    assert len({tuple(begin) for begin in begins}) > 5
    assert segments_of(sizes, 53, jitter=False)._begin(0, 1, 0) == 10
    still = segments_of(sizes, 53, jitter=False)
    assert [still._begin(epoch, 3, 0) for epoch in range(3)] == [30] * 3


def test_every_token_is_seen_over_the_epochs():
    rng = Random(0)
    sizes = [[rng.randint(1, 20) for _ in range(rng.randint(2, 40))] for _ in range(6)]
    segments = segments_of([*sizes, [9]], 40)
    seen = Counter()
    for epoch in range(60):
        for index in range(segments.num_examples):
            rng = np.random.default_rng([epoch, index])
            seen.update(segments.example(epoch, index, rng).input_ids.tolist())
    assert set(seen) == {CLS, SEP, *range(sum(map(sum, sizes)) + 9)}


def test_fractions_of_a_large_sample():
    rng = Random(1)
    sizes = [[rng.randint(5, 35) for _ in range(rng.randint(2, 80))] for _ in range(400)]
    sizes += [[12]] * 20
    segments = segments_of(sizes, 128)
    count = segments.num_examples
    places = [segments.select(0, i, np.random.default_rng([0, i])) for i in range(count)]
    random = sum(segment.other != segment.middle for segment in places) / count
    short = sum(segment.short for segment in places) / count
    assert count > 2500
    assert abs(random - 0.5) < 5 * 0.5 / count**0.5
    assert abs(short - 0.1) < 5 * 0.3 / count**0.5
    others = Counter(
        int(np.searchsorted(segments.corpus.document_starts, segment.other, "right")) - 1
        for segment in places
        if segment.other != segment.middle
    )
    expected = count / 2 / len(sizes)
    assert len(others) > 0.95 * len(sizes)
    assert max(others.values()) < expected + 6 * expected**0.5
    assert sum(others[document] for document in range(400, 420)) > 0


def original_sizes(a, b, total):
    """``truncate_seq_pair`` of google-research/bert, of which only the sizes are kept."""
    while a + b > total:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 80))
def test_sizes_are_those_of_the_original(a, b, total):
    assert sizes_of_pair(a, b, total) == original_sizes(a, b, total)


def test_tokens_are_truncated_at_either_end():
    rng = np.random.default_rng(0)
    fronts = Counter(int(_truncate(np.arange(14), 10, rng)[0]) for _ in range(20_000))
    for front, ways in enumerate((1, 4, 6, 4, 1)):  # Pascal's triangle
        expected = ways / 16
        assert abs(fronts[front] / 20_000 - expected) < 5 * (expected / 20_000) ** 0.5
    assert _truncate(np.arange(5), 5, rng).tolist() == list(range(5))


def test_texts_without_pairs_are_refused():
    with pytest.raises(DataError, match="two documents"):
        segments_of([[5, 5, 5]], 32)
    with pytest.raises(DataError, match=r"3 documents .*single sentence"):
        segments_of([[5], [5], [7]], 32)
    with pytest.raises(DataError, match="length 4 "):
        segments_of([[5, 5], [5]], 4)
    assert segments_of([[5]], 32, next_sentence=False).num_examples == 1


def test_documents_of_one_sentence_are_second_segments_only():
    segments = segments_of([[5], [4, 4], [6]], 16)
    assert segments.num_examples == 1
    seen = {segments.select(0, 0, np.random.default_rng(i)).other for i in range(60)}
    assert seen == {0, 2, 3}  # the other two documents, and the sentence that follows
