"""Denoising: how much is masked, in which spans, and that nothing else is lost."""

import numpy as np
from flaxzoo.data.features.denoising import Denoising
from hypothesis import given
from hypothesis import strategies as st

MASK, END, STOP = 999, 998, 7


@given(
    tokens=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    fraction=st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]),
    permutes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_law_of_a_source(tokens, fraction, permutes, seed):
    """The target is the whole text; in the source exactly the masked tokens are missing."""
    noise = Denoising(fraction, 3.0, (STOP,) if permutes else ())
    text = np.asarray(tokens)
    source, target = noise.corrupt(text, (MASK,), END, np.random.default_rng(seed))
    assert target.tolist() == [*tokens, END]
    assert source[-1] == END
    kept = source[:-1][source[:-1] != MASK].tolist()
    masked = noise.num_masked(len(tokens))
    assert masked == np.ceil(np.round(fraction * len(tokens), 9))
    assert len(kept) == len(tokens) - masked
    assert len(source) - 1 - len(kept) <= masked  # masks; so no source is longer than its target
    sizes = noise.pair_sizes(np.asarray([len(tokens)]))
    assert len(source) <= sizes[0][0]
    assert len(target) == sizes[1][0]
    if not permutes:  # the kept tokens stay in their order
        rest = iter(tokens)
        assert all(token in rest for token in kept)
    else:
        assert not set(kept) - set(tokens)
    again = noise.corrupt(text, (MASK,), END, np.random.default_rng(seed))
    assert (again[0].tolist(), again[1].tolist()) == (source.tolist(), target.tolist())


def test_spans_have_the_lengths_of_a_poisson_distribution():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([Denoising().span_lengths(4000, rng)[:-1] for _ in range(40)])
    expected = 16_000 * np.exp(-3.0) * np.asarray([1, 3, 4.5, 4.5, 3.375, 2.025]) / 16_000
    found = np.bincount(lengths, minlength=6)[:6] / len(lengths)
    assert np.abs(found - expected).max() < 0.01
    assert abs(lengths.mean() - 3) < 0.05


def test_masks_are_everywhere_and_also_between_tokens():
    """A mask of no token is inserted; every place is masked as often, but for either end."""
    noise, text = Denoising(0.3), np.arange(20)
    missing, inserted = np.zeros(20), 0
    rng = np.random.default_rng(1)
    for _ in range(2000):
        source, _ = noise.corrupt(text, (MASK,), END, rng)
        tokens = source[:-1].tolist()
        missing[list(set(range(20)) - set(tokens))] += 1
        inserted += sum(
            a + 1 == b
            for a, mask, b in zip(tokens, tokens[1:], tokens[2:], strict=False)
            if mask == MASK
        )
    assert missing.sum() == 2000 * 6
    assert missing[3:-3].min() > 0.8 * missing.max()
    assert inserted > 50


def test_all_sentences_are_shuffled_with_their_ends():
    text = np.asarray([1, STOP, 2, 2, STOP, 3, 3, 3, STOP, 4])
    noise = Denoising(0.0, 3.0, (STOP,))
    seen = set()
    for seed in range(200):
        source, _ = noise.corrupt(text, (MASK,), END, np.random.default_rng(seed))
        seen.add(tuple(source[:-1].tolist()))
    sentences = {(1, STOP), (2, 2, STOP), (3, 3, 3, STOP), (4,)}
    assert len(seen) == 24
    for order in seen:
        rest = order
        while rest:
            first = next(s for s in sentences if rest[: len(s)] == s)
            rest = rest[len(first) :]
