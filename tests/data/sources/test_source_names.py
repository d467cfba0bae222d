import gzip
import json

import pytest
from flaxzoo.data import DataError, NumberWords, Source, parse_source, read_documents
from flaxzoo.data.sources.labelled_names import parse_labelled
from flaxzoo.data.sources.parallel_corpus import open_parallel
from flaxzoo.data.sources.source_names import parse_sources, split_mixture

LABELLED = {"tsv": "1,2", "jsonl": "label,text", "tfds": "label,text"}


def labelled(name):
    return parse_labelled(name, LABELLED)


def tagged(name):
    return parse_labelled(name, {"conll": "", "jsonl": "tokens,tags"})


def pairs(name):
    return open_parallel(name, "whole")


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
    ("parse", "name", "message"),
    [
        (parse_source, "txt:a", "text:GLOB.*got 'txt'"),
        (parse_source, "book.txt", "text:GLOB.* got 'book.txt'"),
        (parse_source, "text:", "write text:GLOB"),
        (parse_source, "jsonl:a#", "write jsonl:GLOB#field"),
        (parse_source, "text:a#lines", "'lines'.*mean line"),
        (parse_source, "text:a#sentence", "'sentence'.*mean sentences"),
        (parse_source, "builtin:docs", "builtin:python-docs"),
        (parse_source, "builtin:sums#map", "builtin:sums"),
        (parse_source, "builtin:pattern", "mean builtin:patterns"),
        (parse_source, "builtin:patterns#maps", "'maps'.*mean map"),
        (parse_source, "builtin:patterns#map,", "one of map, .* got ''"),
        (parse_sources, "text:a + text:b#word", "'text:b#word'.*'word'"),
        (parse_sources, "csv:a + text:b", "got 'csv'$"),  # a valid kind, not a misspelling
        (labelled, "tsw:a", "tsv:GLOB#LABEL,TEXT.*got 'tsw'"),
        (labelled, "text:a", "got 'text'$"),
        (labelled, "a.tsv", "tsv:GLOB#LABEL,TEXT, jsonl.* got 'a.tsv'"),
        (labelled, "tsv:a.tsv + tsv:b.tsv", r"tsv:FOLDER/\*"),
        (labelled, "tsv:", "write tsv:GLOB#LABEL,TEXT"),
        (labelled, "tsv:a#", "write tsv:GLOB#LABEL,TEXT"),
        (labelled, "tsv:a#1,,2", "empty field"),
        (tagged, "tsv:words.tsv", "conll:GLOB.* got 'tsv'$"),
        (pairs, "pairs:only", "write pairs:SRC,TGT"),
        (pairs, "pairs:a,b,c", "write pairs:SRC,TGT"),
        (pairs, "pairs:gone,there", "file: 'gone'"),
        (pairs, "pairs:.,there", r"'\.' .*folder"),
        (pairs, "tsv:x#1", "1 field"),
        (pairs, "jsonl:x#en,de,fr", "3 fields"),
        (pairs, "tsf:x#1,2", "tsv:GLOB#1,2.*got 'tsf'"),
        (pairs, "conll:a", "got 'conll'$"),
        (pairs, "x.en,x.de", "pairs:SRC,TGT.* got 'x.en,x.de'"),
        (pairs, "tsv:x#1,2 + builtin:numbers-en-fr", "builtin:numbers-en-fr"),
        (parse_sources, "0.7*text:a + text:b", "'text:b' .*weight, .*0.7.SOURCE"),
        (parse_sources, "text:b + 0.7*text:a", "'text:b' .*weight, .*0.7.SOURCE"),
        (parse_sources, "0*text:a + 1*text:b", "above 0, got '0'"),
        (parse_sources, "-1*text:a + 1*text:b", "above 0, got '-1'"),
        (parse_sources, "inf*text:a + 1*text:b", "above 0, got 'inf'"),
        (parse_sources, "x*text:a + 1*text:b", "above 0, got 'x'"),
        (parse_sources, "0.5*text:a", "two sources"),
        (parse_sources, "0.5*text:a + 0.5*text:a", "two sources"),
        (
            parse_sources,
            "0.5*(1*text:a + 1*text:b) + 1*text:c",
            r"'0.5\*\(1\*text:a' .*weight.*parentheses",
        ),
        (labelled, "0.5*tsv:a + 0.5*tsv:b", r"labeled .*mixed, got '0\.5\*tsv:a \+ "),
        (labelled, "0.5*tsv:a", r"labeled .*mixed, got '0\.5\*tsv:a'"),
        (pairs, "0.5*jsonl:a", r"kind of data .*weights, got '0\.5\*jsonl:a'"),
        (pairs, "0.5*jsonl:a + 0.5*jsonl:b", r"kind of data .*weights, got '0\.5\*jsonl:a "),
        (NumberWords.parse, "builtin:numbers-en-xx", "'xx'"),
        (NumberWords.parse, "builtin:numbers-en-de_", "'de_'.*mean de"),
        (NumberWords.parse, "builtin:numbers-en", "builtin:numbers-en-fr"),
        (NumberWords.parse, "builtin:numbers-en-fr + pairs:a,b", "joined"),
    ],
)
def test_a_faulty_name_is_refused_with_the_valid_form(parse, name, message):
    with pytest.raises(DataError, match=message) as caught:
        parse(name)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(DataError, match=r"file.* text:GLOB \+"):
        read("text:nothing.txt + more.txt")


def test_mixtures():
    first, second = "text:a*.txt", "jsonl:b+c.jsonl#x"
    for name in (f"0.7*{first} + 0.3*{second}", f"0.7 * {first}+.3*{second}"):
        assert split_mixture(name) == ((0.7, first), (0.3, second))
        assert [source.location for source in parse_sources(name)] == ["a*.txt", "b+c.jsonl"]
    for name in ("text:a*b + text:c", "text:2*b.txt", "text:a+0.5*b.txt"):
        assert split_mixture(name) == ()


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
        ("", b"", "no text .*a.txt"),
        ("", b" \n", "no text .*a.txt"),
        ("", b"ab\n\xffc", "a.txt line 2 .*UTF-8.* 0xff .*byte 1"),
        ("#line", b"ab\ncd\xe4\n", "a.txt line 2 .*UTF-8.* 0xe4 .*byte 3"),
        ("#block", b"\xc3\xa9\n\n\x80", "line 3 .*UTF-8.* 0x80 .*byte 1"),
    ],
)
def test_bad_text(tmp_path, unit, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(f"text:{tmp_path}/a.txt{unit}")


def test_bad_gzip(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"ab\xff"))
    with pytest.raises(DataError, match=r"a.txt.gz line 1 .*UTF-8.* 0xff .*byte 3"):
        read(f"text:{path}")
    path.write_bytes(gzip.compress(b"long enough " * 99)[:-9])
    with pytest.raises(DataError, match=r"a.txt.gz .*complete gzip"):
        read(f"text:{path}")
    path.write_bytes(b"plain")
    with pytest.raises(DataError, match=r"a.txt.gz .*complete gzip"):
        read(f"text:{path}")


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match=r"no such .*nothing.txt"):
        read(f"text:{tmp_path}/nothing.txt")
    with pytest.raises(DataError, match=r"matches .*\*\.txt"):
        read(f"text:{tmp_path}/*.txt")
    with pytest.raises(DataError, match=r"folder: .*/\*\*/\*"):
        read(f"text:{tmp_path}")


def test_a_field_that_is_not_a_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 3, "body": "x"}\n')
    with pytest.raises(DataError, match=r"line 2 field 'text' .* int"):
        read(f"jsonl:{tmp_path}/a.jsonl")
