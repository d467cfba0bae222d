import gzip
import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
from flaxzoo.data import (
    DataError,
    NumberWords,
    TextToTextData,
    TokenizerConfig,
    TranslationData,
    UserError,
    encode_source,
    start_and_end,
    train_tokenizer,
)
from flaxzoo.data.packing import packed_pairs
from flaxzoo.data.packing.packing import best_fit
from flaxzoo.data.sources.builtin import spelled_numbers as number_words
from flaxzoo.data.tasks import translation
from hypothesis import given
from hypothesis import strategies as st

CHARACTERS = TokenizerConfig(kind="characters")
SIZES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=40)


def data(source, length=16, tokenizer=CHARACTERS, **settings):
    return TranslationData(source=source, length=length, tokenizer=tokenizer, **settings)


def segments_of(row):
    """The (source, labels) token lists of a row, after checking all that a row promises."""
    assert set(row) == set(packed_pairs.ARRAYS)
    assert all(array.dtype == np.int32 for array in row.values())
    assert len({array.shape for array in row.values()}) == 1
    pairs = []
    for segment in range(1, row["segment_ids"].max() + 1):
        there = row["segment_ids"] == segment
        here = row["decoder_segment_ids"] == segment
        assert there.any()
        assert here.any(), "a pair has the same segment on both sides"
        assert row["position_ids"][there].tolist() == list(range(there.sum()))
        assert row["decoder_position_ids"][here].tolist() == list(range(here.sum()))
        labels, shifted = row["labels"][here], row["decoder_input_ids"][here]
        assert shifted[1:].tolist() == labels[:-1].tolist(), "teacher forcing"
        pairs.append((row["input_ids"][there].tolist(), shifted[0], labels.tolist()))
    every = list(packed_pairs.ARRAYS)
    for names in (every[:3], every[3:]):
        padding = row[names[1]] == 0
        assert not any(row[name][padding].any() for name in names)
        assert (np.diff(padding.astype(int)) >= 0).all(), "padding is at the end"
        assert (np.diff(row[names[1]][~padding]) >= 0).all()
    assert row["segment_ids"].max() == row["decoder_segment_ids"].max()
    return pairs


@given(sizes=SIZES, length=st.integers(12, 30))
def test_sequences_have_whole_and_separate_pairs(sizes, length):
    rng = np.random.default_rng(0)
    sources, targets = ([rng.integers(1, 99, n) for n in side] for side in zip(*sizes, strict=True))
    pairs, starts = best_fit(*np.transpose(sizes), (length, length), 1)
    seen = []
    for a, b in pairwise(starts):
        chosen = pairs[a:b].tolist()
        row = packed_pairs.arrays_of_pairs(
            [(sources[i], targets[i]) for i in chosen], (length, length), 7
        )
        found = segments_of(row)
        assert found == [(sources[i].tolist(), 7, targets[i].tolist()) for i in chosen]
        seen += chosen
    assert sorted(seen) == list(range(len(sizes)))


@pytest.fixture
def pair_files(tmp_path):
    def write(*pairs):
        names = []
        for side, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            path = tmp_path / f"x.{side}"
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            names.append(str(path))
        return "pairs:" + ",".join(names)

    return write


def pairs_of(split, tokenizer):
    rows = [split.examples.example(0, i) for i in range(split.examples.num_examples)]
    found = []
    for row in rows:
        for source, start, labels in segments_of(row):
            assert (start, source[-1], labels[-1]) == (*start_and_end(tokenizer), labels[-1])
            assert labels[-1] == source[-1]
            found.append((tokenizer.decode(source[:-1]), tokenizer.decode(labels[:-1])))
    return found


def test_empty_and_over_long_pairs_are_counted_and_shift_nothing(pair_files):
    pairs = [(f"s{i}", f"t{i}") for i in range(20)]
    given = [*pairs[:5], ("", "lost"), ("lost", " \t"), *pairs[5:9], ("x" * 16, "y"), *pairs[9:]]
    config = data(pair_files(*given), validation_fraction=0.0)
    tokenizer = train_tokenizer(config.texts(), CHARACTERS)
    split = config.train_split(tokenizer, (), 0)
    assert sorted(pairs_of(split, tokenizer)) == sorted(pairs)
    first = f"line 6 of {config.source.removeprefix('pairs:').replace(',', ' and ')}"
    assert f"pairs left out: an empty side (first: {first})" in split.summary
    assert "pairs left out: longer than data.length 16 (first: line 12 of " in split.summary
    assert split.summary.startswith("20 pairs, 70 + 70 tokens in ")
    whole = config.whole_source(config.source, tokenizer, ())
    assert list(zip(whole.content.sources, whole.content.targets, strict=True)) == given
    assert sorted(pairs_of(whole, tokenizer)) == sorted(pairs)
    assert whole.fingerprint == split.fingerprint


def test_no_remaining_pair_is_an_error(pair_files):
    config = data(pair_files(("abc" * 9, "d")), length=4, validation_fraction=0.0)
    tokenizer = train_tokenizer(config.texts(), CHARACTERS)
    with pytest.raises(DataError, match=r"data.length .*4, .* 28 "):
        config.train_split(tokenizer, (), 0)
    empty = data(pair_files(("", "d"), ("a", " ")), validation_fraction=0.0)
    with pytest.raises(DataError, match=r"2 pairs .*'pairs:.*both sides"):
        empty.train_split(tokenizer, (), 0)


def test_any_texts_with_targets_of_another_length(tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [("aaaa bb" * (1 + i % 3), "ab"[i % 2] * 2) for i in range(12)]
    rows = [{"long": a, "short": b, "n": 1} for a, b in [*pairs, ("a", "ba" * 5)]]
    file.write_text("\n".join(map(json.dumps, rows)))
    settings = {"length": 24, "tokenizer": CHARACTERS, "validation_fraction": 0.0}
    config = TextToTextData(source=f"jsonl:{file}#long,short", target_length=7, **settings)
    tokenizer = train_tokenizer(config.texts(), CHARACTERS)
    split = config.train_split(tokenizer, (), 0)
    spec = config.batch_spec(0, 0)
    seen = []
    for index in range(split.examples.num_examples):
        row = split.examples.example(0, index)
        assert {name: x.shape for name, x in row.items()} == {n: x.shape for n, x in spec.items()}
        assert row["labels"].shape == (7,)
        for segment in range(1, row["segment_ids"].max() + 1):
            source = row["input_ids"][row["segment_ids"] == segment]
            target = row["labels"][row["decoder_segment_ids"] == segment]
            seen.append((tokenizer.decode(source[:-1]), tokenizer.decode(target[:-1])))
    assert sorted(seen) == sorted(pairs)
    assert "pairs left out: longer than data.length" in split.summary
    with pytest.raises(UserError, match=r"target_length must .*0"):
        TextToTextData(source=config.source, target_length=0, **settings)
    shorter = TextToTextData(source=config.source, target_length=2, **settings)
    with pytest.raises(DataError, match=r"data.length .*24 .*data.target_length 2,"):
        shorter.train_split(tokenizer, (), 0)


def test_splits_and_fingerprints(pair_files):
    config = data(pair_files(*((f"s{i}", f"t{i}") for i in range(60))), validation_fraction=0.2)
    tokenizer = train_tokenizer(config.texts(), CHARACTERS)
    train = config.train_split(tokenizer, (), 0)
    held = config.validation_split(tokenizer, ())
    assert not set(pairs_of(train, tokenizer)) & set(pairs_of(held, tokenizer))
    assert len(pairs_of(train, tokenizer)) + len(pairs_of(held, tokenizer)) == 60
    assert train.fingerprint != held.fingerprint
    again, other = (config.train_split(tokenizer, (), seed) for seed in (0, 1))
    assert np.array_equal(again.examples.pairs, train.examples.pairs)
    assert not np.array_equal(other.examples.pairs, train.examples.pairs)
    assert other.fingerprint == train.fingerprint
    named = data(config.source, validation=config.source)
    assert len(named.train_split(tokenizer, (), 0).content) == 60
    assert len(named.validation_split(tokenizer, ()).content) == 60


def test_vocabulary_has_both_sides_in_order(pair_files, monkeypatch):
    config = data(pair_files(*((f"s{i}", f"t{i}") for i in range(7))), validation_fraction=0.0)
    assert list(config.texts())[:4] == ["s0", "t0", "s1", "t1"]
    assert len(list(config.texts())) == 14
    monkeypatch.setattr(translation, "VOCABULARY_PAIRS", 3)
    kept = list(config.texts())
    assert len(kept) == 6
    assert kept[::2] == [text.replace("t", "s") for text in kept[1::2]]


def test_vocabularies_without_ends():
    words = train_tokenizer(["some words"], TokenizerConfig(kind="wordpiece", vocab_size=22))
    with pytest.raises(DataError, match=r"wordpiece .*start and end"):
        start_and_end(words)
    characters = train_tokenizer(["abc"], CHARACTERS)
    _, end = start_and_end(characters)
    assert encode_source(characters, "ab") == [*characters.encode("ab"), end]
    assert encode_source(characters, "") == [end]


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"validation_fraction must .*1"):
        data("pairs:a,b", validation_fraction=1)
    with pytest.raises(DataError, match=r"no labels .*translate"):
        data("pairs:a,b").input_split("-", None, ())


NUMBERS = TokenizerConfig(kind="sentencepiece-bpe", vocab_size=400)


@pytest.fixture(scope="module")
def numbers():
    config = data("builtin:numbers-en-fr", length=64, tokenizer=NUMBERS)
    tokenizer = train_tokenizer(config.texts(), NUMBERS)
    return config, tokenizer, config.train_split(tokenizer, (), 3)


def test_numbers_depend_on_seed_epoch_and_index_alone(numbers):
    _, tokenizer, split = numbers
    rows = split.examples
    copy = pickle.loads(pickle.dumps(rows))
    for location in [(0, 0), (0, 1), (5, 1), (5, 60_000)]:
        one, other = rows.example(*location), copy.example(*location)
        assert all(np.array_equal(one[name], other[name]) for name in one)
        segments_of(one)
    assert rows.num_examples == translation.NUMBER_EXAMPLES_PER_EPOCH
    inputs = [
        rows.example(epoch, index)["input_ids"].tolist() for epoch in (0, 1) for index in (0, 1)
    ]
    assert len(set(map(tuple, inputs))) == 4
    reseeded = translation.NumberExamples(rows.languages, tokenizer, rows.lengths, 4)
    assert reseeded.example(0, 0)["input_ids"].tolist() != inputs[0]


def test_numbers_translate_and_none_is_held_out(numbers):
    config, tokenizer, split = numbers
    held = {number_words.spell(number, "en") for number in number_words.HELD_OUT[::7]}
    held |= set(config.validation_split(tokenizer, ()).content.sources)
    known = NumberWords.parse(config.source)
    seen = {}
    for index in range(30):
        for source, _, labels in segments_of(split.examples.example(0, index)):
            seen[tokenizer.decode(source[:-1])] = tokenizer.decode(labels[:-1])
    assert not held & set(seen)
    assert len(seen) > 100
    drawn = {pair.source: pair.target for pair in known.vocabulary}
    both = set(drawn) & set(seen)
    assert both
    assert all(drawn[source] == seen[source] for source in both)
    assert split.examples.padding_fraction <= 0.1
    assert "endless" in split.summary


def test_numbers_to_validate_on(numbers):
    config, tokenizer, _ = numbers
    held = config.validation_split(tokenizer, ())
    assert len(pairs_of(held, tokenizer)) == number_words.VALIDATION_SIZE
    assert held.content.sources[0].startswith("six hundred and ")
    whole = config.whole_source("builtin:numbers-en-fr", tokenizer, ())
    assert whole.fingerprint == held.fingerprint
    with pytest.raises(DataError, match=r"number .* \d+ tokens"):
        data(config.source, length=12).train_split(tokenizer, (), 0)


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 64])
def test_padding_of_real_pairs(datasets, length, capsys):
    name, held = (
        "pairs:" + ",".join(str(datasets / "mt" / f"multi30k.{part}.{side}.gz") for side in sides)
        for part, sides in (("train", ("en", "de")), ("val", ("en", "de")))
    )
    vocabulary = TokenizerConfig(kind="sentencepiece-bpe", vocab_size=8000)
    config = data(name, length, vocabulary, validation=held)
    tokenizer = train_tokenizer(config.texts(), vocabulary)
    train = config.train_split(tokenizer, (), 0)
    with capsys.disabled():
        print(f"\n{train.summary}")
    assert train.examples.padding_fraction <= 0.10
    assert len(train.examples.pairs) == 29_000
    raw = gzip.decompress((datasets / "mt" / "multi30k.val.de.gz").read_bytes())
    targets = raw.decode().removesuffix("\n").split("\n")
    split = config.validation_split(tokenizer, ())
    assert list(split.content.targets) == targets
    assert sorted(target for _, target in pairs_of(split, tokenizer)) == sorted(targets)
