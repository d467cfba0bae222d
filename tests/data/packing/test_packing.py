from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from flaxzoo.data import CausalLMEvaluationExamples, CausalLMExamples, DataError, TokenCorpus
from flaxzoo.data.packing.packing import best_fit, first_fit, spans_of_range
from hypothesis import given, settings
from hypothesis import strategies as st

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=40)
lengths = st.integers(1, 25)


@dataclass(frozen=True)
class FakeCorpus(TokenCorpus):
    """Documents in memory in which every token is its own place, counted from 1."""

    pairs: tuple[int, ...] = ()

    @property
    def tokens(self):
        return np.arange(1, sum(self.pairs) + len(self.pairs) + 1)

    @property
    def document_starts(self):
        return np.cumsum([0, *(n + 1 for n in self.pairs[:-1])])


def corpus_of(pairs):
    return FakeCorpus(folder=None, num_bytes=0, vocab_size=0, fingerprint="", pairs=tuple(pairs))


def check_row(row, corpus, length):
    """Checks one example and returns its input tokens, each of which names one pair."""
    ids, labels, segments, positions = (
        row[name] for name in ("input_ids", "labels", "segment_ids", "position_ids")
    )
    assert all(array.shape == (length,) and array.dtype == np.int32 for array in row.values())
    real = segments > 0
    assert not any(array[~real].any() for array in row.values())
    assert (np.diff(real.astype(int)) <= 0).all(), "padding is at the end"
    assert (labels[real] == ids[real] + 1).all(), "labels are the next tokens"
    document = np.searchsorted(corpus.document_starts + 1, ids[real], "right")
    of_label = np.searchsorted(corpus.document_starts + 1, labels[real], "right")
    assert (document == of_label).all(), "no label is in another document"
    for segment in range(1, segments.max() + 1):
        piece = segments == segment
        assert (positions[piece] == np.arange(piece.sum())).all()
        assert (np.diff(ids[piece]) == 1).all()
        assert len(set(document[piece[real]])) == 1
    return ids[real].tolist()


def all_pairs(corpus):
    closing = set((corpus.document_starts[1:]).tolist()) | {len(corpus.tokens)}
    return [token for token in corpus.tokens.tolist() if token not in closing]


@settings(deadline=None)
@given(pairs=sizes, length=lengths)
def test_evaluation_rows_hold_every_pair_once_in_order(pairs, length):
    corpus = corpus_of(pairs)
    rows = CausalLMEvaluationExamples(corpus, length)
    seen = []
    for index in range(rows.num_examples):
        tokens = check_row(rows.example(0, index), corpus, length)
        assert len(tokens) == length or index == rows.num_examples - 1
        seen += tokens
    assert seen == all_pairs(corpus)


@settings(deadline=None)
@given(pairs=sizes, length=lengths, seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_concatenated_rows_are_full_and_hold_no_pair_twice(pairs, length, seed, epoch):
    corpus = corpus_of(pairs)
    if corpus.num_targets < length:
        with pytest.raises(DataError, match="one sequence"):
            CausalLMExamples(corpus, length)
        return
    rows = CausalLMExamples(corpus, length, "concat", seed)
    seen = []
    for index in range(rows.num_examples):
        tokens = check_row(rows.example(epoch, index), corpus, length)
        assert len(tokens) == length
        seen += tokens
    assert len(set(seen)) == len(seen)
    assert corpus.num_targets - len(seen) < length
    assert set(seen) <= set(all_pairs(corpus))


@settings(deadline=None)
@given(pairs=sizes, length=lengths)
def test_first_fit_loses_nothing_and_keeps_documents_whole(pairs, length):
    corpus = corpus_of(pairs)
    if corpus.num_targets < length:
        return
    rows = CausalLMExamples(corpus, length, "first-fit")
    seen, pieces = [], 0
    for index in range(rows.num_examples):
        row = rows.example(3, index)
        seen += check_row(row, corpus, length)
        pieces += row["segment_ids"].max()
    assert sorted(seen) == all_pairs(corpus)
    assert pieces == sum(-(-size // length) for size in pairs)


def test_first_fit_packs_well_and_bounds_its_open_rows():
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 100, 5000)
    _, sequence_starts = first_fit(counts, 128)
    assert counts.sum() / (128 * (len(sequence_starts) - 1)) > 0.97


def test_epochs_cut_at_other_places():
    rows = CausalLMExamples(corpus_of([50, 50]), 10, "concat", seed=1)
    starts = {int(rows.example(epoch, 0)["input_ids"][0]) for epoch in range(8)}
    assert len(starts) > 4
    assert rows.example(2, 3)["input_ids"].tolist() == rows.example(2, 3)["input_ids"].tolist()


def test_spans_by_hand():
    starts = np.array([0, 3, 4, 9])
    assert spans_of_range(0, 3, starts) == [(0, 3)]
    assert spans_of_range(2, 8, starts) == [(2, 1), (3, 1), (4, 5), (9, 1)]


def test_a_short_corpus_is_an_error():
    with pytest.raises(DataError, match="37 target tokens"):
        CausalLMExamples(corpus_of([30, 7]), 128)


two_sides = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=200)


@settings(deadline=None)
@given(sizes=two_sides, length=st.integers(1, 40), seed=st.integers(-5, 5))
def test_best_fit_takes_every_pair_that_fits_once_and_fills_no_side_over(sizes, length, seed):
    source, target = np.transpose(sizes)
    pairs, sequence_starts = best_fit(source, target, (length, length), seed)
    fitting = np.flatnonzero(np.maximum(source, target) <= length)
    assert sorted(pairs.tolist()) == fitting.tolist()
    assert (sequence_starts[0], sequence_starts[-1]) == (0, len(pairs))
    for first, last in pairwise(sequence_starts):
        row = pairs[first:last]
        assert len(row) > 0
        assert source[row].sum() <= length
        assert target[row].sum() <= length
    again = best_fit(source, target, (length, length), seed)
    assert all(map(np.array_equal, again, (pairs, sequence_starts)))


@pytest.fixture(scope="module")
def two_lengths():
    generator = np.random.default_rng(0)
    source = generator.integers(5, 30, 5000)
    return source, np.maximum(1, source + generator.integers(-4, 5, 5000))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("length", [64, 128])
def test_best_fit_packs_well(two_lengths, length, seed):
    _, sequence_starts = best_fit(*two_lengths, (length, length), seed)
    assert np.sum(two_lengths) / (2 * length * (len(sequence_starts) - 1)) > 0.93


def test_best_fit_depends_on_the_seed(two_lengths):
    one, other = (best_fit(*two_lengths, (128, 128), seed)[0] for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_best_fit_of_nothing_that_fits(two_lengths):
    nothing, starts = best_fit(*two_lengths, (1, 1), 0)
    assert (len(nothing), starts.tolist()) == (0, [0])
