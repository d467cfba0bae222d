"""Mixtures: their order is exact, independent of processes, and has the proportions asked for."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from flaxzoo import data
from flaxzoo.data import DataError, TokenizerConfig, TrainBatches, train_iterator
from flaxzoo.data.dataset import DataSplit
from flaxzoo.data.filters.conditions import LeftOut
from flaxzoo.data.mixture import MixedContent, MixedExamples, MixedPart, mix
from flaxzoo.data.prepared.write_shards import prepare

from .test_batching import Numbers, check_equal, take

CHARACTERS = TokenizerConfig("characters")


def mixture(weights, sizes, units=None, unit="tokens"):
    units = units or [1.0] * len(sizes)
    parts = zip(weights, sizes, units, strict=True)
    return MixedExamples(
        tuple(MixedPart(f"s{i}", w, Numbers(n), u) for i, (w, n, u) in enumerate(parts)), unit
    )


@pytest.mark.parametrize(
    ("weights", "units"),
    [
        ([0.7, 0.3], None),
        ([5, 3, 1, 1], None),
        ([1, 1], [100.0, 1.0]),
        ([1e-3, 1], None),
        ([0.8, 0.15, 0.05], [9.0, 40.0, 1.0]),
    ],
)
def test_every_prefix_has_the_proportions(weights, units):
    mixed = mixture(weights, [7] * len(weights), units)
    rates = np.divide(weights, units or 1)
    rates /= rates.sum()
    before = [0] * len(weights)
    for number in range(3000):
        assert mixed.counts(number) == before
        assert np.abs(np.subtract(before, number * rates)).max() <= len(weights)
        part, index = mixed.locate(number)
        # Each source is read in order, without a gap.
        assert index == before[part]
        before[part] += 1
    far = 10**15
    assert sum(mixed.counts(far)) == far
    assert np.allclose(np.divide(mixed.counts(far), far), rates, rtol=1e-6)


def test_a_mixture_skips_what_earlier_stages_read():
    mixed = mixture([0.7, 0.3], [11, 5])
    later = dataclasses.replace(mixed, skipped=(20, 3))
    for number in range(50):
        part, index = mixed.locate(number)
        assert later.locate(number) == (part, index + (20, 3)[part])
        read = np.add(later.counts(number), [20, 3])
        positions = [(x["epoch"], x["example"]) for x in later.positions(number)]
        assert positions == [divmod(n, size) for n, size in zip(read, (11, 5), strict=True)]


def test_each_source_repeats_in_its_epochs_and_the_order_is_that_of_the_source_alone():
    mixed = mixture([0.75, 0.25], [10, 6])
    batches = TrainBatches(mixed, 4, seed=3, num_steps=40)
    ids = np.concatenate([batches[i]["id"] for i in range(40)]).ravel().tolist()
    for part, (size, count) in enumerate([(10, 120), (6, 40)]):
        own = [id for g, id in enumerate(ids) if mixed.locate(g)[0] == part]
        alone = TrainBatches(Numbers(size), 1, seed=3, num_steps=count)
        assert own == [alone[i]["id"].item() for i in range(count)]


def test_any_number_of_processes_reads_the_same_global_batches_and_resumes():
    run = {"batch_size": 8, "seed": 5, "num_steps": 20}
    mixed = pickle.loads(pickle.dumps(mixture([0.7, 0.3], [11, 5])))
    whole = list(train_iterator(mixed, **run))
    for count in (2, 4):
        shares = [
            list(train_iterator(mixed, **run, process_index=i, process_count=count))
            for i in range(count)
        ]
        joined = [
            {"id": np.concatenate([x["id"] for x in step])} for step in zip(*shares, strict=True)
        ]
        check_equal(joined, whole)
    for stop in (1, 9):
        first = train_iterator(mixed, **run)
        take(first, stop)
        state = json.loads(json.dumps(first.get_state()))
        first.close()
        resumed = train_iterator(mixed, **run)
        resumed.set_state(state)
        check_equal(list(resumed), whole[stop:])
    position = {"source": "s1", "epoch": 4, "example": 2}
    assert state == {
        "step": 9, "mixture": [{"source": "s0", "epoch": 4, "example": 6}, position]
    }  # fmt: skip
    other = train_iterator(mixture([0.6, 0.4], [11, 5]), **run)
    with pytest.raises(DataError, match=r"step 9 .*sources.*weights .*batch_size"):
        other.set_state(state)
    other.close()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Long documents of the letter a, and short ones of b."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for letter, longest in (("a", 120), ("b", 9)):
        sizes = rng.integers(2, longest, 400).tolist()
        lines = [letter * size + str(i) for i, size in enumerate(sizes)]
        (folder / f"{letter}.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("unit", ["tokens", "documents"])
@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_the_batches_have_the_proportions_of_tokens_or_documents(texts, unit, packing):
    source = f"0.7*text:{texts}/a.txt#line+0.3 * text:{texts}/b.txt#line"
    config = data.CausalLMData(
        source=source, length=32, packing=packing, mix_by=unit, tokenizer=CHARACTERS
    )
    tokenizer = config.make_tokenizer()
    split = config.train_split(tokenizer, (), 0)
    batches = TrainBatches(split.examples, 8, seed=1, num_steps=800)
    (a,), (b,) = (tokenizer.encode(x, add_special_tokens=False) for x in "ab")
    found = {a: np.zeros(2), b: np.zeros(2)}
    for step in range(800):
        batch = batches[step]
        for ids, segments in zip(batch["input_ids"], batch["segment_ids"], strict=True):
            starts = np.count_nonzero((ids == tokenizer.special_ids.bos) & (segments > 0))
            found[a if (ids == a).sum() > (ids == b).sum() else b] += (
                np.count_nonzero(segments),
                starts,
            )
    share = found[a] / (found[a] + found[b])
    assert share[["tokens", "documents"].index(unit)] == pytest.approx(0.7, abs=0.01)
    description = dict(split.examples.lines(6400))[f"text:{texts}/a.txt#line"]
    assert description.startswith(f"70.0% of all {unit}")
    # Validation has each held-out document once.
    joined = data.CausalLMData(
        source=f"text:{texts}/a.txt#line + text:{texts}/b.txt#line", length=32, tokenizer=CHARACTERS
    )
    one, other = (x.validation_split(tokenizer, ()) for x in (config, joined))
    assert one.fingerprint == other.fingerprint


def test_the_sources_of_a_mixture_are_divided_together(tmp_path):
    large, own = [f"line {i}" for i in range(400)], [f"other {i}" for i in range(3)]
    (tmp_path / "large.txt").write_text("\n".join(large))
    (tmp_path / "small.txt").write_text("\n".join([*own, *large[:50]]))
    config = data.CausalLMData(
        source=f"0.5*text:{tmp_path}/large.txt#line + 0.5*text:{tmp_path}/small.txt#line",
        length=32,
        tokenizer=CHARACTERS,
    )
    learned = [set(part) for part in config.texts().parts]
    held_out = list(config.validation_documents())
    # An equal text in the other source is held out as well, and counts twice.
    assert 10 < len(set(held_out)) < 40
    assert not set(held_out) & (learned[0] | learned[1])
    assert len(held_out) > len(set(held_out))
    # A source with few texts may have no held-out text.
    assert set(own) <= learned[1]


def test_prepared_folders_are_mixed(texts, tmp_path):
    plain = data.CausalLMData(source=f"text:{texts}/*.txt#line", length=32, tokenizer=CHARACTERS)
    tokenizer = plain.make_tokenizer()
    tokenizer.save(tmp_path / "tokenizer")
    for letter in "ab":
        prepare(
            f"text:{texts}/{letter}.txt#line",
            tmp_path / letter,
            tokenizer=tmp_path / "tokenizer",
            length=32,
            packing="concat",
            validation_fraction=0.05,
        )
    source = f"0.7*prepared:{tmp_path}/a + 0.3*prepared:{tmp_path}/b"
    config = data.CausalLMData(source=source, length=32, tokenizer=CHARACTERS)
    assert config.make_tokenizer().fingerprint == tokenizer.fingerprint
    split = config.train_split(tokenizer, (), 0)
    assert [part.weight for part in split.examples.parts] == [0.7, 0.3]
    assert split.examples.counts(1000)[0] == pytest.approx(700, abs=3)
    validation = config.validation_split(tokenizer, ())
    assert validation.examples.num_examples == sum(
        data.CausalLMData(source=f"prepared:{tmp_path}/{x}", length=32, tokenizer=CHARACTERS)
        .validation_split(tokenizer, ())
        .examples.num_examples
        for x in "ab"
    )
    mixed = data.CausalLMData(
        source=f"1*prepared:{tmp_path}/a + 1*text:{texts}/b.txt", length=32, tokenizer=CHARACTERS
    )
    with pytest.raises(DataError, match=r"prepared .*text"):
        mixed.train_split(tokenizer, (), 0)


def test_the_log_states_what_a_filter_leaves_out_of_its_source_only(tmp_path):
    for letter, size in (("a", 40), ("b", 60), ("c", 60)):
        rows = ({"text": f"{letter}{i}", "n": i % 10} for i in range(size))
        (tmp_path / f"{letter}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    a, b, c = (f"jsonl:{tmp_path}/{letter}.jsonl#text" for letter in "abc")
    config = data.CausalLMData(
        source=f"2*{a}?n>6 + 1*{b} + 1*{c}?n>6", length=8, tokenizer=CHARACTERS
    )
    first, left_out_of_a, second, third, left_out_of_c = config.train_split(
        config.make_tokenizer(), (), 0
    ).notes
    assert [note[:5] for note in (first, second, third)] == ["50.0%", "25.0%", "25.0%"]
    assert left_out_of_a == "28 documents left out by the filter n>6"
    assert left_out_of_c == "42 documents left out by the filter n>6"


def test_labeled_examples_and_pairs_cannot_be_mixed(tmp_path):
    settings = {"length": 8, "tokenizer": TokenizerConfig("wordpiece", 20)}
    for source in ("0.5*tsv:a#1,2 + 0.5*csv:b#1,2", "0.5*tsv:a#1,2", "tsv:a#1,2 + tsv:b#1,2"):
        labeled = data.SequenceClassificationData(source=source, **settings)
        with pytest.raises(DataError, match=r"labeled .*mixed, got .*glob, as tsv:FOLDER/\*"):
            labeled.texts()
    pairs = data.TranslationData(source="0.5*tsv:a#1,2 + 0.5*tsv:b#1,2", **settings)
    with pytest.raises(DataError, match=r"weights, got .*join the sources without weights"):
        pairs.texts()


def test_conversations_are_mixed(tmp_path):
    for letter in "ab":
        rows = ({"prompt": f"{letter}{i}", "completion": letter * 3} for i in range(40))
        (tmp_path / f"{letter}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    config = data.SupervisedData(
        source=f"3*jsonl:{tmp_path}/a.jsonl + 1*jsonl:{tmp_path}/b.jsonl",
        length=32,
        mix_by="documents",
        tokenizer=TokenizerConfig("byte-bpe", vocab_size=280),
    )
    tokenizer = config.with_chat_template(config.make_tokenizer())
    split = config.train_split(tokenizer, (), 0)
    names = [part.name for part in split.examples.parts]
    assert names == [f"jsonl:{tmp_path}/a.jsonl", f"jsonl:{tmp_path}/b.jsonl"]
    shares = dict(split.examples.lines(10_000))
    assert shares[names[0]].startswith("75.0% of all documents")
    # A record is in one split only.
    number = len(config.validation_split(tokenizer, ()).content)
    assert sum(part.examples.num_examples for part in split.examples.parts) > 0
    assert number + len(config._part("train", LeftOut())) == 80


def test_a_source_without_training_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree")
    (tmp_path / "empty.txt").write_text(" \n")
    source = f"1*text:{tmp_path}/a.txt#line + 1*text:{tmp_path}/empty.txt"
    config = data.CausalLMData(source=source, length=4, tokenizer=CHARACTERS)
    with pytest.raises(DataError, match=r"no text .*'text:.*empty.txt'"):
        config.make_tokenizer()


@pytest.mark.parametrize(("weights", "before"), [([0.7, 0.3], 32), ([0.2, 0.8], 0)])
def test_a_stage_has_another_batch_size_or_mixture_and_resumes(weights, before):
    first = train_iterator(mixture([0.7, 0.3], [11, 5]), batch_size=8, seed=5, num_steps=4)
    take(first, 4)
    state = first.get_state()
    first.close()
    stage = {"batch_size": 4, "seed": 5, "num_steps": 12, "start": 4, "examples_before": before}
    mixed = mixture(weights, [11, 5])
    begun = train_iterator(mixed, **stage)
    begun.set_state(state)
    take(begun, 3)
    later = json.loads(json.dumps(begun.get_state()))
    assert later == {"step": 7, "mixture": mixed.positions(before + 12)}
    resumed = train_iterator(mixed, **stage)
    resumed.set_state(later)
    check_equal(list(resumed), list(begun))


def test_the_sizes_of_the_sources_do_not_change_the_tokens_of_a_mixture():
    splits = [
        DataSplit(Numbers(size), MixedContent(np.array(counts)), "", "")
        for size, counts in ((10, [20, 0]), (1000, [0, 2000]))
    ]
    mixed = mix({"few": (1.0, splits[0]), "many": (3.0, splits[1])}, "documents", "")
    few, many = mixed.content.token_counts
    assert many == pytest.approx(3 * few)
