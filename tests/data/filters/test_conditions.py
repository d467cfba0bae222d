"""Filters on a field of a source: `jsonl:GLOB#text?score>=3`."""

import datetime
import json
import re

import numpy as np
import pytest
from flaxzoo import data
from flaxzoo.data.filters.conditions import Condition, split_conditions, written
from flaxzoo.data.sources.labelled_names import parse_labelled
from flaxzoo.data.sources.labelled_records import read_fields
from flaxzoo.data.sources.tables import LABELED_TEXTS

ROWS = [
    {"text": "one good answer", "score": 3, "lang": "en", "day": "2019-02-01"},
    {"text": "junk", "score": -2, "lang": "en", "day": "2019-01-01"},
    {"text": "une bonne réponse", "score": 12, "lang": "fr", "day": "2018-12-31"},
    {"text": "another answer", "score": 2.5, "lang": "en", "day": "2019-03-09", "nsfw": True},
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))


def write(folder, rows=ROWS):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{folder}/a.jsonl"


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ("score>=3", [0, 2]),
        ("score > 3", [2]),
        ("score<2.5", [1]),
        ("score<=2.5", [1, 3]),
        ("score==3.0", [0]),
        ("score!=3", [1, 2, 3]),
        ("lang==en", [0, 1, 3]),
        ("lang!=en", [2]),
        ("day>=2019-01-31", [0, 3]),
        ("score>=2&lang==en&day<2019-03", [0]),
    ],
)
def test_every_comparison_selects_documents(tmp_path, conditions, kept):
    source = data.parse_source(f"{write(tmp_path)}#text?{conditions}")
    expected = [ROWS[i]["text"] for i in kept]
    assert list(data.read_documents(source)) == expected
    memory = data.Examples.of(ROWS, fields=f"text?{conditions}")
    assert list(data.read_documents(data.parse_source(memory))) == expected


@pytest.mark.parametrize(
    ("value", "condition", "holds"),
    [
        (True, "a==true", True),
        (np.int64(4), "a>=3", True),
        (np.float32(2.5), "a<2.75", True),
        (datetime.date(2024, 1, 2), "a==2024-01-02", True),
        (None, "a!=null", False),
        (1, "a==true", False),
        ("3", "a>=3", True),
        ("10", "a>9", True),
        ("b", "a>abc", True),
        ("", "a==", True),
        ("x=y", "a==x=y", True),
        (1e3, "a<=1e3", True),
    ],
)
def test_values(value, condition, holds):
    rest, (parsed,) = split_conditions(f"f#x?{condition}", "name")
    assert (rest, str(parsed), written([parsed])) == ("f#x", condition, condition)
    assert parsed.holds(value, "line 1") == holds


@pytest.mark.parametrize("value", [None, True, "many", [1], {}])
def test_values_without_an_order_are_refused(value):
    with pytest.raises(data.DataError, match=r"^a\.jsonl line 7 field 'score'"):
        Condition("score", ">=", "3").holds(value, "a.jsonl line 7")


def test_a_question_mark_of_the_glob_is_none_of_a_filter(tmp_path):
    name = write(tmp_path).replace("a.jsonl", "?.jsonl")
    assert data.parse_source(name).conditions == ()
    filtered = data.parse_source(f"{name}#?score>=3")
    assert (filtered.part, filtered.location) == ("text", name.removeprefix("jsonl:"))
    assert list(data.read_documents(filtered)) == [ROWS[0]["text"], ROWS[2]["text"]]
    assert data.parse_source("jsonl:a#is_ok?").part == "is_ok?"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("jsonl:a.jsonl#text?score=3", "'score=3': write FIELD>=VALUE"),
        ("jsonl:a.jsonl#text?>=3", "'>=3': write FIELD"),
        ("text:a.txt#line?score>=3", "?score>=3"),
        ("builtin:python-docs#?score>=3", "?score>=3"),
    ],
)
def test_faulty_filters(name, message):
    with pytest.raises(data.DataError, match=re.escape(message)):
        data.parse_source(name)


def test_a_record_without_the_field_is_named(tmp_path):
    source = data.parse_source(f"{write(tmp_path)}#text?nsfw!=true")
    with pytest.raises(data.DataError, match=r"a.jsonl line 1 .*'nsfw'"):
        list(data.read_documents(source))
    with pytest.raises(data.DataError, match=r"no text .* 4 documents"):
        list(data.read_documents(data.parse_source(f"{write(tmp_path)}#text?score>99")))
    with pytest.raises(data.DataError, match=r"conll .*fields"):
        parse_labelled("conll:a#4?x==1", {"conll": ""})


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl", "memory"])
@pytest.mark.parametrize("by_name", [True, False])
def test_labeled_records_are_filtered(tmp_path, kind, by_name):
    texts = [("label", "text", "votes"), ("good", "a b", "10"), ("bad", "c d", "9"), ("x", "e", "")]
    rows = texts[1:3]
    if kind in ("tsv", "csv"):
        separator = "\t" if kind == "tsv" else ","
        lines = [separator.join(row) for row in (texts if by_name else rows)]
        (tmp_path / "a").write_text("\n".join(lines[:3]) + "\n")
        name = f"{kind}:{tmp_path}/a" + ("#label,text?votes>9" if by_name else "#1,2?3>9")
    else:
        records = [dict(zip(texts[0], (*row[:2], int(row[2])), strict=True)) for row in rows]
        name = data.Examples.of(records, fields="label,text?votes>9")
        if kind == "jsonl":
            name = f"{write(tmp_path, records)}#label,text?votes>9"
    config = data.SequenceClassificationData(
        source=name, length=8, tokenizer=data.TokenizerConfig("wordpiece", 20)
    )
    source = parse_labelled(config.source_name, config.forms)
    assert [record.values for record in read_fields(source, LABELED_TEXTS)] == [("good", "a b")]
    loaded = config.read(config.open(config.source), "train")
    note = f"1 record left out by the filter {'votes' if by_name else '3'}>9"
    assert len(loaded.examples) == 1
    if by_name or kind in ("tsv", "csv"):
        assert note in loaded.lines


def test_documents_of_a_run_are_filtered_and_counted(tmp_path):
    rows = [{"text": f"text {i}", "score": i % 4} for i in range(40)]
    name = f"{write(tmp_path, rows)}#text?score>=3"
    train, held_out = (
        data.load_documents(name, split, validation_fraction=0.2)
        for split in ("train", "validation")
    )
    assert sorted((*train, *held_out)) == sorted(f"text {i}" for i in range(3, 40, 4))
    assert train.note == "30 documents left out by the filter score>=3"
    tokenizer = data.TokenizerConfig("characters")
    config = data.CausalLMData(source=name, length=8, tokenizer=tokenizer)
    assert config.train_split(config.make_tokenizer(), (), 0).notes == (train.note,)
    every = data.load_documents(name.partition("?")[0], "train", validation_fraction=0.0)
    assert (len(every), every.note) == (40, "")


def test_pairs_are_filtered(tmp_path):
    rows = [{"source": "a", "target": "b", "ok": True}, {"source": "c", "target": "d", "ok": False}]
    pairs = data.open_parallel(f"{write(tmp_path, rows)}#source,target?ok==true", "train")
    assert pairs.sources == ("a",)
    assert pairs.notes() == ("1 pair left out by the filter ok==true",)
