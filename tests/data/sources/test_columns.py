"""Parquet and Arrow files, Hugging Face data sets, and files in object stores."""

import json
import sys
import types
from collections.abc import Iterator
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from flaxzoo import data
from flaxzoo.data import DataError
from flaxzoo.data.chat.rows import read_rows
from flaxzoo.data.common import remote_files
from flaxzoo.data.sources.columnar import tables
from flaxzoo.data.sources.parallel_corpus import open_parallel
from flaxzoo.data.sources.read_documents import rows_of
from flaxzoo.data.sources.source_names import parse_sources

ROWS = [
    {"text": f"text {i} " + "word " * (i % 7), "score": i % 5, "label": "ab"[i % 2], "de": "x"}
    for i in range(60)
]


def _stream(table, path, new):
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows in every form; a row group, or a batch, has some of them."""
    folder = tmp_path_factory.mktemp("columns")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "a.jsonl").write_text(lines)
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    _stream(table, folder / "file.arrow", pyarrow.ipc.new_file)
    _stream(table, folder / "stream.arrow", pyarrow.ipc.new_stream)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "hf")
    splits = {"train": ROWS, "validation": ROWS[:9], "test": ROWS[:4]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    ).save_to_disk(folder / "splits")
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/{folder.name}/a.jsonl", lines.encode())
    memory.pipe(f"/{folder.name}/a.parquet", (folder / "a.parquet").read_bytes())
    return folder


FORMS = [
    "parquet:{0}/*.parquet",
    "arrow:{0}/file.arrow",
    "arrow:{0}/stream.arrow",
    "hf:{0}/hf",
    "hf:{0}/splits[train]",
    "jsonl:file://{0}/*.jsonl",
    "jsonl:memory://{1}/a.jsonl",
    "parquet:memory://{1}/*.parquet",
]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_documents_of_json_lines(form, folder):
    name = form.format(folder, folder.name)
    for part in ("", "#text?score>=3"):
        for split in ("train", "validation"):
            given = {"split": split, "validation_fraction": 0.1}
            plain = data.load_documents(f"jsonl:{folder}/a.jsonl{part}", **given)
            found = data.load_documents(name + part, **given)
            assert sorted(found) == sorted(plain)
            assert found.note == plain.note
            # Access by index gives the documents of one reading in order, also backwards.
            assert [found[i] for i in reversed(range(len(found)))] == list(found)[::-1]
            assert found.read([1, 0, 1]) == [found[1], found[0], found[1]]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_records_of_json_lines(form, folder):
    name = form.format(folder, folder.name)
    assert [row for _, row in read_rows(name)] == ROWS
    pairs = open_parallel(f"{name}#text,de?score==4", "whole")
    assert [pair.source for pair in pairs] == [row["text"] for row in ROWS if row["score"] == 4]


def test_a_field_of_a_struct_is_a_column(tmp_path):
    rows = [
        {"id": i, "translation": {"en": f"one {i}", "more": {"de": f"eins {i}"}}} for i in range(9)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "hf")
    for form in ("parquet:{}/a.parquet", "hf:{}/hf"):
        source = form.format(tmp_path)
        texts = data.load_documents(f"{source}#translation.en", "train", validation_fraction=0)
        assert list(texts) == [f"one {i}" for i in range(9)]
        pairs = open_parallel(
            f"{source}#translation.en,translation.more.de", "train", validation_fraction=0
        )
        assert [(pair.source, pair.target) for pair in pairs][3] == ("one 3", "eins 3")
        with pytest.raises(DataError, match=r"translation\.fr"):
            data.load_documents(f"{source}#translation.fr", "train", validation_fraction=0)


def test_documents_of_columns_are_read_by_pieces_and_not_again(folder, monkeypatch):
    read = []
    piece = tables._ParquetTable.piece
    monkeypatch.setattr(
        tables._ParquetTable, "piece", lambda *given: read.append(given[1:]) or piece(*given)
    )
    source = f"parquet:{folder}/a.parquet#text?score<5"
    data.load_documents(source, "train", validation_fraction=0.0)
    assert read == [(i, ["text", "score"]) for i in range(9)]
    read.clear()
    # The division is cached, and one document needs one row group of one column.
    documents = data.load_documents(source, "train", validation_fraction=0.0)
    assert documents[30] == ROWS[30]["text"]
    assert read == [(4, ["text"])]


def test_a_file_of_a_web_server_has_another_version_when_it_changes(monkeypatch):
    facts = {"size": 3, "ETag": "a"}
    system = types.SimpleNamespace(ukey=lambda path: "its URL", info=lambda path: dict(facts))
    monkeypatch.setattr(remote_files, "_file_system", lambda url: (system, url))
    file = remote_files.RemoteFile("https://host/a.txt")
    before = file.version
    assert file.version == before
    facts["ETag"] = "b"
    assert file.version != before


def test_published_splits_are_used_as_those_of_tfds(folder):
    name = f"hf:{folder}/splits"
    given = {"validation_fraction": 0.5}
    assert len(data.load_documents(name, "train", **given)) == 60
    assert list(data.load_documents(name, "validation", **given)) == [r["text"] for r in ROWS[:9]]
    # A split that the source names is divided like a local source.
    held_out = data.load_documents(f"{name}[test]", "validation", **given)
    assert 0 < len(held_out) < 4


def test_records_of_a_data_set_without_a_train_split_are_read_for_validation(tmp_path):
    only = datasets.DatasetDict({"validation": datasets.Dataset.from_list(ROWS[:9])})
    only.save_to_disk(tmp_path / "only")
    rows = [row for _, row in read_rows(f"hf:{tmp_path}/only", "validation")]
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS[:9]]
    with pytest.raises(data.DataError, match="train"):
        list(read_rows(f"hf:{tmp_path}/only", "train"))


def test_opening_an_arrow_file_keeps_no_batch_in_memory(tmp_path):
    table = pyarrow.table({"text": ["a" * 1000] * 50_000})
    options = pyarrow.ipc.IpcWriteOptions(compression="lz4")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1000)
    before = pyarrow.total_allocated_bytes()
    opened = rows_of(parse_sources(f"arrow:{tmp_path}/a.arrow")[0]).open_table(0)
    assert opened.schema.names == ["text"]
    assert sum(opened.sizes) == 50_000
    assert pyarrow.total_allocated_bytes() - before < table.nbytes / 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "hf:{}/splits[dev]",
            r"split .*'hf:.*got 'dev'",
        ),
        ("hf:{}", r"save_to_disk .*parquet:FOLDER"),
        ("hf:nobody/nothing", "'hf:nobody/nothing' .*hf:FOLDER"),
        ("hf:{}/hf#body", "no field 'body'.* text, score, label, de"),
        ("parquet:{}/a.parquet#body", "a.parquet .*'body'.* text"),
        ("parquet:{}/a.parquet#score", "row 1 field 'score' .*string, .* int"),
        ("parquet:{}/a.jsonl", "a.jsonl .*Parquet"),
        ("arrow:{}/a.jsonl", "a.jsonl .*arrow"),
        ("text:memory://nothing/*.txt", r"matches 'memory://nothing/\*.txt'"),
        ("text:gs://bucket/a.txt", "gcsfs: pip install gcsfs"),
        ("text:s3://bucket/a.txt", "s3fs: pip install s3fs"),
        ("text:goose://bucket/a.txt", "fsspec .*got 'goose'"),
    ],
)
def test_a_faulty_source_is_refused_in_one_line(name, message, folder):
    with pytest.raises(DataError, match=message) as caught:
        data.load_documents(name.format(folder), "train", validation_fraction=0.1)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"datasets: pip install"):
        data.load_documents(f"hf:{folder}/./hf", "train", validation_fraction=0.1)


def test_a_classifier_reads_the_class_names_of_a_hub_data_set(folder):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = [{"text": row["text"], "label": i % 2} for i, row in enumerate(ROWS)]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(folder / "classes")
    classified = data.SequenceClassificationData(
        source=f"hf:{folder}/classes", tokenizer=data.TokenizerConfig(kind="wordpiece")
    )
    assert classified.labels() == ("bad", "good")


class _Pets(datasets.GeneratorBasedBuilder):
    """Writes a data set to the cache of `datasets`, as a download from the hub does."""

    BUILDER_CONFIGS = (datasets.BuilderConfig(name="short"), datasets.BuilderConfig(name="long"))

    def _info(self):
        label = datasets.ClassLabel(names=["cat", "dog"])
        return datasets.DatasetInfo(
            features=datasets.Features({"text": datasets.Value("string"), "label": label})
        )

    def _split_generators(self, dl_manager):
        return [
            datasets.SplitGenerator(name=name, gen_kwargs={"number": number})
            for name, number in (("train", 30), ("validation", 4))
        ]

    def _generate_examples(self, **kwargs: Any) -> Iterator[Any]:
        for i in range(kwargs["number"]):
            yield i, {"text": f"{self.config.name} {i}", "label": i % 2}


@pytest.mark.parametrize("owner", ["", "owner/"])
def test_without_a_network_a_name_is_read_from_the_local_cache(owner, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    name = f"{owner}pets"
    for config in ("short", "long"):
        builder = _Pets(
            cache_dir=str(tmp_path),
            dataset_name="pets",
            repo_id=name if owner else None,
            config_name=config,
            hash="0123456789abcdef",
        )
        builder.download_and_prepare()
    source = f"hf:{name}/short"
    texts = data.load_documents(f"{source}#text", "train", validation_fraction=0.5)
    assert list(texts) == [f"short {i}" for i in range(30)]
    held_out = data.load_documents(f"{source}#text", "validation", validation_fraction=0.5)
    assert list(held_out) == [f"short {i}" for i in range(4)]
    classified = data.SequenceClassificationData(
        source=source, tokenizer=data.TokenizerConfig(kind="wordpiece")
    )
    assert classified.labels() == ("cat", "dog")
    # Without a configuration the message lists the configurations.
    with pytest.raises(DataError, match=r"short.*long|long.*short"):
        data.load_documents(f"hf:{name}#text", "train", validation_fraction=0.5)
