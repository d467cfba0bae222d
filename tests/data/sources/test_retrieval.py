"""Collections for retrieval: folders in the form of BEIR, and passages of SQuAD."""

import gzip
import json

import pytest
from flaxzoo.data import DataError, RetrievalData, read_retrieval

CORPUS = [
    {"_id": "d1", "title": "The cat", "text": "sat."},
    {"_id": 2, "title": "", "text": "A dog ran. ", "metadata": {}},
    {"_id": "d3", "text": "Birds"},
]
QUERIES = [{"_id": "q1", "text": "cats"}, {"_id": "q2", "text": "dogs"}, {"_id": "q3", "text": "x"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td3\t0\nq2\t2\t2\nq2\td1\t-1\n"


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def beir(folder, corpus=None, queries=None, qrels=QRELS, split="test"):
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "corpus.jsonl").write_text(lines_of(CORPUS) if corpus is None else corpus)
    (folder / "queries.jsonl").write_text(lines_of(QUERIES) if queries is None else queries)
    (folder / "qrels" / f"{split}.tsv").write_text(qrels)
    return f"beir:{folder}"


def test_a_folder_in_the_form_of_beir(tmp_path):
    found = read_retrieval(beir(tmp_path))
    assert found.documents == {"d1": "The cat sat.", "2": "A dog ran.", "d3": "Birds"}
    assert found.queries == {"q1": "cats", "q2": "dogs"}
    assert found.relevant == {"q1": {"d1": 1}, "q2": {"2": 2}}
    assert (found.summary, found.notes) == ("3 documents, 2 queries, 2 relevant pairs", ())
    found.save(tmp_path / "again")
    assert read_retrieval(f"beir:{tmp_path}/again") == found
    beir(tmp_path, qrels="q3\td3\t1\n", split="dev")
    assert read_retrieval(f"beir:{tmp_path}#dev").relevant == {"q3": {"d3": 1}}
    (tmp_path / "corpus.jsonl.gz").write_bytes(
        gzip.compress((tmp_path / "corpus.jsonl").read_bytes())
    )
    (tmp_path / "corpus.jsonl").unlink()
    assert read_retrieval(f"beir:{tmp_path}") == found


def test_unknown_identifiers_are_reported(tmp_path):
    found = read_retrieval(beir(tmp_path, qrels=QRELS + "q9\td1\t1\nq2\td9\t1\n"))
    assert found.queries.keys() == {"q1", "q2"}
    assert found.relevant["q2"] == {"2": 2, "d9": 1}
    assert found.notes == (
        "1 judged queries are not in queries.jsonl: left out",
        "1 relevant documents are not in corpus.jsonl: they are never found",
    )


TWICE = lines_of([CORPUS[0], CORPUS[0]])
BAD = [
    ({"corpus": TWICE}, "corpus.jsonl line 2: .*'d1' .*twice"),
    ({"corpus": '{"_id": "d"}\n'}, "line 1 .*'text'"),
    (
        {"corpus": '{"_id": "d", "text": 3}\n'},
        r"line 1: title .*text .*got \['', 3\]",
    ),
    ({"corpus": '{"_id": "d", "title": [], "text": "x"}\n'}, r"strings, got \[\[\], 'x'\]"),
    ({"queries": '{"id": "q1"}\n'}, "queries.jsonl line 1 .*'_id'"),
    ({"qrels": "q1\td1\tx\n"}, r"test.tsv line 1 .*QUERY, .*got 'q1\\td1\\tx'"),
    ({"qrels": "q1 d1 1\n"}, "test.tsv line 1 .*QUERY"),
    ({"qrels": "q1\td1\tnan\n"}, "test.tsv line 1 .*QUERY"),
    ({"qrels": "q1\td1\tinf\n"}, "test.tsv line 1 .*QUERY"),
    ({"qrels": "query-id\tcorpus-id\tscore\nq1\td1\t0\n"}, "no query .*relevant"),
    ({"split": "dev"}, "no file .*qrels/test.tsv"),
    ({"corpus": ""}, "got 0 and 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_folders(tmp_path, change, message):
    name = beir(tmp_path, **change)
    with pytest.raises(DataError, match=message):
        read_retrieval(name)


def test_passages_of_squad_without_duplicates(tmp_path):
    qas = [[{"id": f"{i}{j}", "question": f"who {i} {j}?"} for j in range(2)] for i in range(3)]
    paragraphs = [{"context": c, "qas": q} for c, q in zip(["one", "two", "one"], qas, strict=True)]
    content = {"data": [{"title": "T", "paragraphs": paragraphs}]}
    (tmp_path / "squad.json").write_text(json.dumps(content))
    found = read_retrieval(f"squad:{tmp_path}/squad.json")
    assert found.documents == {"T-0": "one", "T-1": "two"}
    assert found.queries["10"] == "who 1 0?"
    assert [*found.relevant.values()] == [{"T-0": 1}] * 2 + [{"T-1": 1}] * 2 + [{"T-0": 1}] * 2
    with pytest.raises(DataError, match=r"beir:FOLDER, squad:GLOB, .*'csv'"):
        read_retrieval("csv:x")


def test_a_query_must_have_a_relevant_document():
    with pytest.raises(DataError, match=r"query 'b' .*relevant"):
        RetrievalData({"d": "x"}, {"a": "x", "b": "y"}, {"a": {"d": 1}, "b": {"d": 0}})
