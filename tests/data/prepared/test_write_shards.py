"""From files of text to shards, without any workers but this process."""

import dataclasses
import errno
import gzip
import hashlib
import json
from itertools import pairwise

import fsspec
import numpy as np
import pytest
from flaxzoo.data import (
    CausalLMEvaluationExamples,
    DataError,
    TokenizerConfig,
    build_corpus,
    load_tokenizer,
    parse_source,
    prepare,
    read_documents,
    train_tokenizer,
)
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.packing.packed_sequences import decode, encode, gather_tokens, packed_arrays
from flaxzoo.data.packing.packing import first_fit
from flaxzoo.data.prepared import write_shards
from flaxzoo.data.prepared.read_shards import prepared_split
from flaxzoo.data.prepared.shard_format import SPLITS, read_manifest
from flaxzoo.data.prepared.write_shards import prepare_shard
from flaxzoo.data.sources.hash_split import HashSplit, text_digest
from flaxzoo.data.sources.source_names import input_files

LENGTH = 8


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A tokenizer of the letters a to z and the space, with ends of documents."""
    work_folder = tmp_path_factory.mktemp("tokenizer") / "letters"
    train_tokenizer(["abcdefghijklmnopqrstuvwxyz é"], TokenizerConfig("characters")).save(
        work_folder
    )
    return work_folder


@pytest.fixture
def texts(tmp_path):
    """A folder of three files, documents separated by blank lines, one of them packed by gzip."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = "the cat sat on a mat and then it saw some dog run away from her big red house".split()
    for number in range(3):
        draw = np.random.default_rng(number)
        lines = [" ".join(draw.choice(words, draw.integers(1, 9))) for _ in range(40)]
        (folder / f"{number}.txt").write_text("\n\n".join(lines))
    raw = (folder / "1.txt").read_bytes()
    (folder / "1.txt").unlink()
    (folder / "1.txt.gz").write_bytes(gzip.compress(raw))
    return folder


def source_of(texts):
    return f"text:{texts}/*.txt*#block"


def contents(folder):
    """All files below a folder, by their paths."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows_of(folder, tokenizer, splits=SPLITS):
    split = prepared_split(f"prepared:{folder}", splits, tokenizer, {})
    return [split.examples.example(0, i) for i in range(split.examples.num_examples)]


def check_equal(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert all(np.array_equal(row[name], other[name]) for name in row)


def test_records_are_exact():
    tokenizer = train_tokenizer(["abc"], TokenizerConfig("characters"))

    @dataclasses.dataclass
    class Corpus:
        tokens: np.ndarray
        target_starts: np.ndarray

    corpus = Corpus(np.array([0, 2, 3, 0, 0, 4, 0, 0, 2, 0]), np.array([0, 3, 5]))
    for vocab_size, itemsize in ((tokenizer.vocab_size, 2), (1 << 17, 4)):
        pieces = gather_tokens(corpus, [(1, 2), (3, 2), (5, 1)])  # type: ignore[arg-type]
        record = encode(pieces, vocab_size)
        assert len(record) == 4 * 4 + itemsize * 8
        again = decode(record, vocab_size)
        assert again.tokens.tolist() == [2, 3, 0, 0, 4, 0, 0, 2]
        assert again.sizes.tolist() == [2, 2, 1]
    row = packed_arrays(gather_tokens(corpus, [(1, 2), (3, 2), (5, 1)]), 7)  # type: ignore[arg-type]
    assert row["input_ids"].tolist() == [2, 3, 0, 4, 0, 0, 0]
    assert row["labels"].tolist() == [3, 0, 4, 0, 2, 0, 0]
    assert row["segment_ids"].tolist() == [1, 1, 2, 2, 3, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("packing", ["concat", "first-fit"])
def test_the_rows_are_those_of_the_text(texts, letters, tmp_path, packing):
    """File by file; the same documents are held out as where the text itself is trained on."""
    out, tokenizer = tmp_path / "out", load_tokenizer(letters)
    prepare(source_of(texts), out, letters, length=LENGTH, packing=packing, validation_fraction=0.2)

    @dataclasses.dataclass
    class Texts:
        part: object
        split: str

        @property
        def fingerprint(self):
            return f"{self.part} {self.split}"

        def __iter__(self):
            limit = HashSplit.of_each(0.2)
            documents = read_documents(self.part)  # type: ignore[arg-type]
            return (t for t in documents if limit.split(text_digest(t)) == self.split)

    for split in SPLITS:
        expected = []
        for part in input_files(source_of(texts)):
            corpus = build_corpus(Texts(part, split), tokenizer, tmp_path / "corpus")
            if split == "train" and packing == "first-fit":
                spans, starts = first_fit(corpus.target_counts, LENGTH)
                rows = [spans[a:b].tolist() for a, b in pairwise(starts)]
                expected += [packed_arrays(gather_tokens(corpus, row), LENGTH) for row in rows]
            else:
                whole = CausalLMEvaluationExamples(corpus, LENGTH)
                expected += [whole.example(0, i) for i in range(whole.num_examples)]
        check_equal(rows_of(out, tokenizer, [split]), expected)


def test_the_bytes_depend_on_nothing_but_the_files(texts, letters, tmp_path):
    """Not on the order, nor on what was done before; and what is whole is not made again."""
    one, other = tmp_path / "one", tmp_path / "other"
    prepare(source_of(texts), one, letters, length=LENGTH)
    first = contents(one)

    def backwards(parts, folder, settings):
        for part in reversed(parts):
            prepare_shard(part, folder, settings)

    prepare(source_of(texts), other, letters, length=LENGTH, workers=backwards)
    assert contents(other) == first
    times = {path: path.stat().st_mtime_ns for path in one.rglob("*.array_record")}
    prepare(source_of(texts), one, letters, length=LENGTH)
    assert contents(one) == first
    assert times == {path: path.stat().st_mtime_ns for path in one.rglob("*.array_record")}


def test_files_in_an_object_store_are_prepared_as_local_ones(texts, letters, tmp_path):
    local, remote, tokenizer = tmp_path / "local", tmp_path / "remote", load_tokenizer(letters)
    memory, folder = fsspec.filesystem("memory"), f"/{tmp_path.name}-store"
    for path in texts.iterdir():
        memory.pipe(f"{folder}/{path.name}", path.read_bytes())
    prepare(source_of(texts), local, letters, length=LENGTH)
    prepare(source_of(f"memory:/{folder}"), remote, letters, length=LENGTH)
    check_equal(rows_of(remote, tokenizer), rows_of(local, tokenizer))
    memory.rm(folder, recursive=True)


def test_an_interrupted_run_goes_on(texts, letters, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare(source_of(texts), whole, letters, length=LENGTH)

    def killed(parts, folder, settings):
        prepare_shard(parts[1], folder, settings)
        (folder / "shards" / ".2.txt-abc.tmp").mkdir()  # what kill -9 leaves of a shard
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source_of(texts), out, letters, length=LENGTH, workers=killed)
    assert read_manifest(out) is None
    assert len(list((out / "shards").iterdir())) == 2
    prepare(source_of(texts), out, letters, length=LENGTH)
    assert contents(out) == contents(whole)


def test_workers_that_make_nothing_are_reported(texts, letters, tmp_path):
    """Workers may not see the folder; the process that waits for them does not do their work."""
    with pytest.raises(DataError, match=r"3 of 3 shards .*/out"):
        prepare(source_of(texts), tmp_path / "out", letters, length=LENGTH, workers=lambda *_: None)
    assert read_manifest(tmp_path / "out") is None


@pytest.mark.parametrize("name", ["token_counts.npy", "tokenizer"])
def test_damaged_summaries_are_rewritten(texts, letters, tmp_path, name):
    out = tmp_path / "out"
    prepare(source_of(texts), out, letters, length=LENGTH)
    before = contents(out)
    for path in [path for path in out.rglob("*") if path.is_file() and name in str(path)]:
        path.write_bytes(path.read_bytes()[:5])
    prepare(source_of(texts), out, letters, length=LENGTH)
    assert contents(out) == before


def test_changed_files_and_damaged_shards_are_prepared_again(texts, letters, tmp_path):
    out = tmp_path / "out"
    prepare(source_of(texts), out, letters, length=LENGTH)
    before = contents(out)
    damaged = next(out.rglob("0.txt*/train.array_record"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    prepare(source_of(texts), out, letters, length=LENGTH)
    assert contents(out) == before
    (texts / "0.txt").write_text("another text\n\nthan before\n\n" * 9)
    shards = prepare(source_of(texts), out, letters, length=LENGTH)
    after = contents(out)
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed, "the shard, its facts and the manifest"
    assert all(name.startswith("shards/0.txt") or "/" not in name for name in changed)
    (texts / "2.txt").unlink()
    assert len(prepare(source_of(texts), out, letters, length=LENGTH)) == len(shards) - 1
    assert not list(out.rglob("2.txt*")), "a shard without its file is gone"


def test_the_manifest_lists_all_shards(texts, letters, tmp_path):
    out, tokenizer = tmp_path / "out", load_tokenizer(letters)
    (texts / "empty.txt").write_text(" \n")
    prepare(source_of(texts), out, letters, length=LENGTH)
    facts = json.loads((out / "manifest.json").read_text())
    assert (
        facts["tokenizer"] == tokenizer.fingerprint == load_tokenizer(out / "tokenizer").fingerprint
    )
    assert (facts["length"], facts["packing"], facts["validation_fraction"]) == (8, "concat", 0.05)
    names = [shard["name"].rpartition("-")[0] for shard in facts["shards"]]
    assert names == ["0.txt", "1.txt.gz", "2.txt", "empty.txt"]
    assert facts["shards"][3]["splits"] == {}
    tokens = np.zeros(tokenizer.vocab_size, int)
    for shard in facts["shards"]:
        read = (texts / shard["name"].rpartition("-")[0]).read_bytes()
        assert shard["input_sha256"] == hashlib.sha256(read).hexdigest()
        for split, found in shard["splits"].items():
            raw = (out / "shards" / shard["name"] / f"{split}.array_record").read_bytes()
            assert found["file_bytes"] == len(raw)
            assert found["sha256"] == hashlib.sha256(raw).hexdigest()
    rows = rows_of(out, tokenizer)
    assert len(rows) == sum(f["rows"] for s in facts["shards"] for f in s["splits"].values())
    labels = np.concatenate([row["labels"][row["segment_ids"] > 0] for row in rows])
    assert len(labels) == sum(f["tokens"] for s in facts["shards"] for f in s["splits"].values())
    tokens += np.bincount(labels, minlength=tokenizer.vocab_size)
    documents = sum(f["documents"] for s in facts["shards"] for f in s["splits"].values())
    tokens[tokenizer.special_ids.bos] += documents  # the first of each is no label
    assert np.load(out / "token_counts.npy").sum(0).tolist() == tokens.tolist()


def test_json_lines_and_joined_sources(texts, letters, tmp_path):
    (tmp_path / "a[1].jsonl").write_text('{"body": "a cat"}\n{"body": "a dog"}\n')
    source = f"jsonl:{tmp_path}/a[1].jsonl#body + text:{texts}/0.txt#line"
    parts = input_files(source)
    assert [part.kind for part in parts] == ["jsonl", "text"]
    assert list(read_documents(parts[0])) == ["a cat", "a dog"]
    shards = prepare(source, tmp_path / "out", letters, length=4, validation_fraction=0)
    assert [shard.splits["train"].documents for shard in shards] == [2, 40]
    assert shards[0].name.startswith("a-1-.jsonl-")


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ("text:{}/none.txt", {}, "no such file"),
        ("tfds:glue/sst2", {}, "'tfds:glue/sst2'"),
        ("prepared:{}", {}, "'prepared:"),
        ("text:{}/empty.txt", {}, "no text .*'text:.*empty.txt'"),
        ("text:{}/latin.txt", {}, "latin.txt line 2 .*UTF-8.* 0xe9"),
        ("text:{}/half.txt.gz", {}, "complete gzip"),
        ("text:{}/0.txt#block", {"length": 0}, "length .*got 0"),
        (
            "text:{}/0.txt#block",
            {"validation_fraction": 1.5},
            "validation_fraction .* 1.5",
        ),
        ("text:{}/0.txt#file", {"validation_fraction": 1e-9}, "in validation"),
    ],
)
def test_faults_are_named(texts, letters, tmp_path, source, fields, message):
    (texts / "empty.txt").write_text("\n \n")
    (texts / "latin.txt").write_bytes(b"fine\n" + "é".encode("latin-1"))
    (texts / "half.txt.gz").write_bytes((texts / "1.txt.gz").read_bytes()[:-20])
    with pytest.raises(UserError, match=message):
        prepare(source.format(texts), tmp_path / "out", letters, **{"length": LENGTH, **fields})
    assert not list(tmp_path.rglob("manifest.json"))
    assert not list(tmp_path.rglob(".*")), "nothing half done"


def test_a_file_that_changes_meanwhile_is_refused(texts, letters, tmp_path, monkeypatch):
    write_rows = write_shards._write_rows

    def meddle(*arguments):
        (texts / "0.txt").write_text("shorter")
        return write_rows(*arguments)

    monkeypatch.setattr(write_shards, "_write_rows", meddle)
    with pytest.raises(DataError, match="changed"):
        prepare(f"text:{texts}/0.txt#block", tmp_path / "out", letters, length=LENGTH)
    assert not list((tmp_path / "out" / "shards").iterdir())


@pytest.mark.parametrize("what", ["rows", "facts"])
def test_a_full_disk_is_reported_in_one_line(texts, letters, tmp_path, monkeypatch, what):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Writer:
        def __init__(self, *arguments):
            self.write = len

        def close(self):
            raise RuntimeError("write() failed: No space left on device")

    with monkeypatch.context() as patch:
        if what == "rows":
            patch.setattr("array_record.python.array_record_module.ArrayRecordWriter", Writer)
        else:
            patch.setattr(write_shards, "to_json", full)
            patch.setattr(write_shards, "create_folder", lambda *arguments: None)
            (tmp_path / "out" / "shards").mkdir(parents=True)
            load_tokenizer(letters).save(tmp_path / "out" / "tokenizer")
        message = r"0.txt-.*\(.*No space"
        with pytest.raises(DataError, match=message):
            prepare(source_of(texts), tmp_path / "out", letters, length=LENGTH)
    assert not list((tmp_path / "out" / "shards").iterdir())


def test_a_folder_that_is_not_prepared_is_refused(texts, letters, tmp_path):
    source, out = source_of(texts), tmp_path / "out"
    with pytest.raises(DataError, match=texts.name):
        prepare(source, texts, letters, length=LENGTH)
    prepare(source, out, letters, length=LENGTH)
    before = contents(out)
    message = r"prepared with other settings \(length 8 → 16, packing 'concat' → 'first-fit'\)"
    with pytest.raises(DataError, match=message):
        prepare(source, out, letters, length=16, packing="first-fit")
    assert contents(out) == before
    (tmp_path / "empty").mkdir()
    prepare(source, tmp_path / "empty", letters, length=LENGTH)
    assert contents(tmp_path / "empty") == before


def test_wordpiece_has_no_ends(texts, tmp_path, tokenizer):
    tokenizer.save(tmp_path / "wordpiece")
    with pytest.raises(DataError, match="begin and end"):
        prepare(source_of(texts), tmp_path / "out", tmp_path / "wordpiece", length=LENGTH)
    assert parse_source("prepared:a#b").location == "a#b"
