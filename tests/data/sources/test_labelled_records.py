import gzip
import io
import json
import sys

import pytest
from flaxzoo.data import DataError
from flaxzoo.data.common.files import input_lines
from flaxzoo.data.sources.labelled_names import parse_labelled, with_known_fields
from flaxzoo.data.sources.labelled_records import read_fields
from flaxzoo.data.sources.tables import LABELED_TEXTS

FORMS = {"tsv": "1,2", "jsonl": "label,text", "tfds": "label,text"}


def read(name):
    return list(read_fields(parse_labelled(name, FORMS), LABELED_TEXTS))


def values(name):
    return [record.values for record in read(name)]


def test_names():
    source = parse_labelled("tsv:a#b.tsv#2,4", FORMS)
    assert (source.kind, source.location, source.fields) == ("tsv", "a#b.tsv", ("2", "4"))
    assert parse_labelled("jsonl:a.jsonl", FORMS).fields == ("label", "text")
    assert parse_labelled("conll:a", {"conll": ""}).fields == ()


def test_columns(tmp_path):
    (tmp_path / "a.tsv").write_bytes("1\tx\u2028y\r\n\n0\té\n".encode())
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"2\tz\n"))
    assert values(f"tsv:{tmp_path}/*.tsv*") == [("1", "x\u2028y"), ("0", "é"), ("2", "z")]
    assert [r.location for r in read(f"tsv:{tmp_path}/a.tsv")] == [
        f"{tmp_path}/a.tsv line 1", f"{tmp_path}/a.tsv line 3"
    ]  # fmt: skip


def test_columns_by_name(tmp_path):
    (tmp_path / "a.tsv").write_text("id\tlabel\ttext\n7\t1\tx\n8\t\ty\n")
    assert values(f"tsv:{tmp_path}/a.tsv#label,text") == [("1", "x"), ("", "y")]
    assert values(f"tsv:{tmp_path}/a.tsv#3,id") == [("x", "7"), ("y", "8")]
    assert values(f"tsv:{tmp_path}/a.tsv#id,text+2")[0] == ("7", ["x", "1"])


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("", "1\tx\n0\ty\tz\n", "a.tsv line 2 .*3 columns"),
        ("", "1\tx\n\n0\n", "a.tsv line 3 .*1 column"),
        ("#1,4", "1\tx\n", "line 1 .*1, 2, got '4'"),
        ("#0,1", "1\tx\n", "1, 2, got '0'"),
        ("", "a\t1\t\tx\n", "a.tsv line 1 .*4 columns: .* #2,4 "),
        ("#label,body", "label\ttext\n", "label, text, got 'body'"),
    ],
)
def test_bad_columns(tmp_path, part, content, message):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read(f"tsv:{tmp_path}/a.tsv{part}")
    assert "\n" not in str(caught.value)


def test_json_lines(tmp_path):
    rows = [{"label": 1, "text": "a\nb", "more": ["x"]}, {"label": 0, "text": "c", "more": ["y"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert values(f"jsonl:{tmp_path}/a.jsonl") == [(1, "a\nb"), (0, "c")]
    assert values(f"jsonl:{tmp_path}/a.jsonl#more,text+label")[0] == (["x"], ["a\nb", 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"label": ', "a.jsonl line 2 .*JSON"),
        ("plain text", "a.jsonl line 2 .*JSON"),
        ("[1]", "line 2 .*JSON list"),
        ('{"label": 1}', "line 2 .*'text': .* label"),
        (r'{"label": 1, "text": "a\ud800"}', "line 2 field 'text' .*surrogate"),
        (r'{"label": ["\ud800"], "text": ""}', "line 2 field 'label' .*surrogate"),
        ("\xff", "a.jsonl line 2 .*UTF-8.* 0xff .*byte 1"),
    ],
)
def test_bad_json_lines(tmp_path, line, message):
    raw = line.encode("latin-1")
    (tmp_path / "a.jsonl").write_bytes(b'{"label": 0, "text": "fine"}\n' + raw + b"\n")
    with pytest.raises(DataError, match=message):
        read(f"jsonl:{tmp_path}/a.jsonl")


def test_input(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    wanted = [(f"{tmp_path}/a.txt", 1, "one"), (f"{tmp_path}/a.txt", 2, "two")]
    assert list(input_lines(f"{tmp_path}/a.txt")) == wanted
    stdin = io.TextIOWrapper(io.BytesIO(b"one\ntwo \xc3\xa9\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(input_lines("-"))[1] == ("standard input", 2, "two é")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n")))
    with pytest.raises(DataError, match=r"standard input line 2 .*UTF-8.* 0xff"):
        list(input_lines("-"))
    with pytest.raises(DataError, match="no such file"):
        list(input_lines(f"{tmp_path}/b.txt"))
    with pytest.raises(DataError, match="is a folder"):
        list(input_lines(f"{tmp_path}"))


def test_fields_of_another_published_data_set():
    named = parse_labelled("tfds:glue/mnli#label,premise", FORMS)
    custom = parse_labelled("tfds:glue/mnli", FORMS)
    known = {"glue/mrpc": "label,one,two"}
    for name, like, fields in (
        ("tfds:glue/mnli", named, ("label", "premise")),
        ("tfds:glue/mrpc", named, ("label", "one", "two")),
        ("tfds:glue/new", named, ("label", "premise")),
        ("tfds:glue/mrpc", custom, ("label", "one", "two")),
    ):
        assert with_known_fields(parse_labelled(name, FORMS, like), known).fields == fields
