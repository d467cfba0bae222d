"""Training on prepared sequences: the order, the parts of processes, and what does not fit."""

import dataclasses
import pickle
import shutil

import numpy as np
import pytest
from flaxzoo.data import (
    CausalLMData,
    DataError,
    PretrainingData,
    TokenizerConfig,
    load_documents,
    load_tokenizer,
    prepare,
    train_iterator,
    train_tokenizer,
)

LENGTH = 8
RUN = {"batch_size": 4, "seed": 7, "num_steps": 12}


@pytest.fixture(scope="module")
def work_folder(tmp_path_factory):
    """A folder with texts, a tokenizer and the rows that were prepared of both."""
    work_folder = tmp_path_factory.mktemp("work")
    draw = np.random.default_rng(0)
    for number in range(3):
        lines = ["".join(draw.choice(list("abcde "), draw.integers(2, 40))) for _ in range(30)]
        (work_folder / f"{number}.txt").write_text("\n\n".join(lines))
    train_tokenizer(["abcde "], TokenizerConfig("characters")).save(work_folder / "letters")
    source = f"text:{work_folder}/*.txt#block"
    prepare(
        source,
        work_folder / "rows",
        work_folder / "letters",
        length=LENGTH,
        validation_fraction=0.2,
    )
    return work_folder


@pytest.fixture
def config(work_folder):
    return CausalLMData(
        source=f"prepared:{work_folder}/rows",
        validation_fraction=0.2,
        length=LENGTH,
        tokenizer=TokenizerConfig("byte-bpe", 300),
    )


@pytest.fixture
def split(config):
    return config.train_split(config.make_tokenizer(), (), 0)


def flat(batches):
    """Every row of the batches, as bytes."""
    return [
        b"".join(batch[name][i].tobytes() for name in sorted(batch))
        for batch in batches
        for i in range(len(batch["labels"]))
    ]


def read(rows, **options):
    iterator = train_iterator(rows, **{**RUN, **options})
    batches = list(iterator)
    iterator.close()
    return batches


def test_the_tokenizer_is_the_stored_one(work_folder, config):
    stored = load_tokenizer(work_folder / "letters")
    assert config.make_tokenizer().fingerprint == stored.fingerprint
    named = dataclasses.replace(
        config, tokenizer=TokenizerConfig(path=str(work_folder / "letters"))
    )
    assert named.make_tokenizer().fingerprint == stored.fingerprint


def test_an_epoch_has_every_row_once(split):
    count = split.examples.num_examples
    expected = flat(
        [{k: v[None] for k, v in split.examples.example(0, i).items()} for i in range(count)]
    )
    rows = flat(read(split.examples, batch_size=1, num_steps=2 * count))
    first, second = rows[:count], rows[count:]
    assert first != second
    assert sorted(first) == sorted(second) == sorted(expected)


def test_the_sequences_have_the_whole_text_and_its_counts(work_folder, config, split):
    """What is trained and validated on is what would be without preparing."""
    tokenizer = config.make_tokenizer()
    plain = dataclasses.replace(config, source=f"text:{work_folder}/*.txt#block")
    for ours, theirs in (
        (split, plain.train_split(tokenizer, (), 0)),
        (config.validation_split(tokenizer, ()), plain.validation_split(tokenizer, ())),
    ):
        assert ours.content.num_bytes == theirs.content.num_bytes
        assert ours.content.token_counts.tolist() == theirs.content.token_counts.tolist()
        assert ours.summary.startswith(theirs.summary)
    # Another source validates: then all of it is trained on.
    other = dataclasses.replace(config, validation=f"text:{work_folder}/0.txt#block")
    whole = other.train_split(tokenizer, (), 0)
    assert whole.summary.startswith("90 documents")
    assert whole.summary == config.whole_source(config.source, tokenizer, ()).summary
    held_out = other.validation_split(tokenizer, ())
    assert held_out.summary.startswith("30 documents")
    back = dataclasses.replace(plain, validation=config.source)
    assert back.validation_split(tokenizer, ()).summary == whole.summary
    assert len({split.fingerprint, whole.fingerprint, held_out.fingerprint}) == 3


def test_processes_read_parts_that_make_the_whole(split):
    whole = read(split.examples)
    parts = [read(split.examples, process_index=i, process_count=2) for i in range(2)]
    for batch, *halves in zip(whole, *parts, strict=True):
        assert {half["labels"].shape for half in halves} == {(2, LENGTH)}
        for name in batch:
            assert np.array_equal(batch[name], np.concatenate([half[name] for half in halves]))


def test_resumed_in_another_process_it_is_the_same(split):
    whole = read(split.examples)
    iterator = train_iterator(split.examples, **RUN)
    before = [next(iterator) for _ in range(5)]
    state = iterator.get_state()
    iterator.close()
    packed = pickle.dumps(split.examples)
    assert len(packed) < 1000, "the names of its files, and nothing that is open"
    iterator = train_iterator(pickle.loads(packed), **RUN)
    iterator.set_state(state)
    after = list(iterator)
    iterator.close()
    assert flat(before + after) == flat(whole)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 16}, "length 8, .*data.length .*16: "),
        ({"packing": "first-fit"}, "packing 'concat', .*data.packing .*'first-fit'"),
        ({"validation_fraction": 0.1}, "validation_fraction 0.2, .*data.validation_fract"),
        ({"tokenizer": TokenizerConfig(path="other")}, "another tokenizer .*char"),
        ({"source": "prepared:nothing"}, "prepared sequences .*nothing"),
        ({"source": "prepared:a + prepared:b"}, "joins prepared"),
        ({"source": "prepared:"}, "incomplete: .*prepared:FOLDER"),
    ],
)
def test_a_difference_in_settings_is_named(config, fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["xyz"], TokenizerConfig("characters")).save("other")
    other = dataclasses.replace(config, **fields)
    with pytest.raises(DataError, match=message):
        other.train_split(other.make_tokenizer(), (), 0)


def test_prepared_sequences_are_for_next_tokens_only(config):
    for load in (
        lambda: load_documents(config.source, "train", validation_fraction=0.0),
        lambda: PretrainingData(
            source=config.source, length=LENGTH, tokenizer=config.tokenizer
        ).texts(),
    ):
        with pytest.raises(DataError, match="local text"):
            load()


def test_validation_without_held_out_documents_is_an_error(work_folder, config, tmp_path):
    source = f"text:{work_folder}/0.txt#block"
    prepare(
        source, tmp_path / "rows", work_folder / "letters", length=LENGTH, validation_fraction=0
    )
    other = dataclasses.replace(config, source=f"prepared:{tmp_path}/rows", validation_fraction=0.0)
    with pytest.raises(DataError, match=r"no sequences .*validation"):
        other.validation_split(other.make_tokenizer(), ())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "train.array_record .*missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has changed"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "changed since"),
        (lambda file: (file.parents[2] / "manifest.json").unlink(), "partly"),
        (lambda file: (file.parents[2] / "manifest.json").write_text("{"), "damaged manifest"),
    ],
    ids=["missing", "shorter", "another", "unfinished", "no manifest"],
)
def test_an_incomplete_folder_is_named(work_folder, config, tmp_path, damage, message):
    shutil.copytree(work_folder / "rows", tmp_path / "rows")
    other = dataclasses.replace(config, source=f"prepared:{tmp_path}/rows")
    damage(next((tmp_path / "rows").rglob("train.array_record")))
    with pytest.raises(DataError, match=message):
        other.train_split(load_tokenizer(work_folder / "letters"), (), 0)


def test_a_flipped_bit_is_named_when_it_is_read(work_folder, config, tmp_path):
    (tmp_path / "long.txt").write_text("abcde" * 4000)  # so that its start is not in its end
    tokenizer, rows = load_tokenizer(work_folder / "letters"), tmp_path / "rows"
    source = f"text:{tmp_path}/long.txt"
    prepare(source, rows, work_folder / "letters", length=LENGTH, validation_fraction=0)
    (file,) = rows.rglob("train.array_record")
    raw = bytearray(file.read_bytes())
    raw[64 + 50] ^= 1  # in the first record: behind the headers of the file and of the record
    file.write_bytes(raw)
    other = dataclasses.replace(config, source=f"prepared:{rows}", validation_fraction=0.0)
    split = other.train_split(tokenizer, (), 0)
    with pytest.raises(DataError, match=r"train.array_record .*hash"):
        split.examples.example(0, 0)
    assert split.examples.example(0, 1)["segment_ids"].all()
