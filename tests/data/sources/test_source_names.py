import gzip
import json

import pytest
from flaxzoo.data import DataError, Source, parse_source, read_documents
from flaxzoo.data.sources.source_names import parse_sources


def read(name):
    return list(read_documents(parse_source(name)))


def test_names():
    assert parse_source("text:a/**/*.txt") == Source(
        "text:a/**/*.txt", "text", "a/**/*.txt", "file"
    )
    assert parse_source("text:a#b.txt#line").location == "a#b.txt"
    assert parse_source("jsonl:a.jsonl#body").part == "body"
    assert parse_source("tfds:wiki40b/en").part == "text"
    assert parse_source("tfds:glue/cola#sentence").location == "glue/cola"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("txt:a", r"unknown source kind 'txt'.* text:GLOB \(nearest\)"),
        ("book.txt", "for a file write text:book.txt"),
        ("text:", "incomplete: write text:GLOB"),
        ("jsonl:a#", "incomplete: write jsonl:GLOB#field"),
        ("text:a#lines", r"unknown unit #lines .*choose line \(nearest\)"),
        ("text:a#sentence", r"unknown unit #sentence .*choose sentences \(nearest\)"),
        ("builtin:docs", "choose builtin:python-docs"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(DataError, match=message):
        parse_source(name)


def test_joined_names():
    joined = parse_sources("text:a b.gz#sentences + text:c/*.txt  +  tfds:wiki40b/en")
    assert [source.name for source in joined] == [
        "text:a b.gz#sentences",
        "text:c/*.txt",
        "tfds:wiki40b/en",
    ]
    assert [source.lines_are_sentences for source in joined] == [True, False, False]
    for name in ("text:a + b.txt", "text:a+text:b", "text:C++ text:b"):
        assert [source.name for source in parse_sources(name)] == [name]
    with pytest.raises(DataError, match=r"unknown unit #word .*in source 'text:b#word'"):
        parse_sources("text:a + text:b#word")
    with pytest.raises(DataError, match=r"no such file.*write the kind of each: text:GLOB \+"):
        read("text:nothing.txt + more.txt")


def test_builtin():
    documents = read("builtin:python-docs")
    assert len(documents) > 70
    assert sum(map(len, documents)) > 400_000


def test_text_units(tmp_path):
    text = "one\ntwo\u2028still two\r\n\n  \nthree\n    four\n\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(f"text:{tmp_path}/a.txt") == [text]
    assert read(f"text:{tmp_path}/a.txt#line") == ["one", "two\u2028still two", "three", "    four"]
    assert read(f"text:{tmp_path}/a.txt#block") == [
        "one\ntwo\u2028still two",
        "three\n    four",
    ]
    assert read(f"text:{tmp_path}/a.txt#sentences") == read(f"text:{tmp_path}/a.txt#block")


def test_globs_are_sorted_and_gzip_is_unpacked(tmp_path):
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "deep/er/a.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "[1].txt").write_text("bracket")
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress("zürich".encode()))
    assert read(f"text:{tmp_path}/**/*.txt") == ["bracket", "b", "a"]
    assert read(f"text:{tmp_path}/[1].txt") == ["bracket"]
    assert read(f"text:{tmp_path}/*.gz") == ["zürich"]


def test_json_lines(tmp_path):
    rows = [{"text": "a\nb"}, {"text": "x\u2028y", "n": 1}, {"text": "  "}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    assert read(f"jsonl:{tmp_path}/a.jsonl") == ["a\nb", "x\u2028y"]


@pytest.mark.parametrize(
    ("unit", "content", "message"),
    [
        ("", b"", "no text in .*a.txt: empty"),
        ("", b" \n", "no text in .*a.txt: empty or only white space"),
        ("", b"ab\n\xffc", "a.txt line 2 is not UTF-8: byte 0xff at its byte 1; convert"),
        ("#line", b"ab\ncd\xe4\n", "a.txt line 2 is not UTF-8: byte 0xe4 at its byte 3"),
        ("#block", b"\xc3\xa9\n\n\x80", "line 3 is not UTF-8: byte 0x80 at its byte 1"),
    ],
)
def test_bad_text(tmp_path, unit, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(f"text:{tmp_path}/a.txt{unit}")


def test_bad_gzip(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"ab\xff"))
    with pytest.raises(DataError, match=r"a.txt.gz line 1 is not UTF-8: byte 0xff at its byte 3"):
        read(f"text:{path}")
    path.write_bytes(gzip.compress(b"long enough " * 99)[:-9])
    with pytest.raises(DataError, match=r"a.txt.gz is not a complete gzip file"):
        read(f"text:{path}")
    path.write_bytes(b"plain")
    with pytest.raises(DataError, match=r"a.txt.gz is not a complete gzip file"):
        read(f"text:{path}")


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"no such file: .*nothing.txt"):
        read(f"text:{tmp_path}/nothing.txt")
    with pytest.raises(DataError, match=r"no file matches .*\*\.txt"):
        read(f"text:{tmp_path}/*.txt")
    with pytest.raises(DataError, match=r"is a folder: name its files, .* by 'text:.*/\*\*/\*'"):
        read(f"text:{tmp_path}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"a.jsonl line 2 is not valid JSON \(.*\): write one JSON object a line"),
        ("plain text", r"a.jsonl line 2 is not valid JSON \(.*\): write one JSON object a line"),
        ("[1]", "a.jsonl line 2 is a JSON list: write one JSON object a line"),
        ('{"body": "x", "id": 3}', "line 2 has no field 'text': its fields are body, id"),
        ('{"text": 3, "body": "x"}', "line 2 field 'text' is a int.* string fields are body"),
        (r'{"text": "a\ud800"}', "lone surrogate at character 1"),
    ],
)
def test_bad_json_lines(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read(f"jsonl:{tmp_path}/a.jsonl")
    assert "\n" not in str(caught.value)
