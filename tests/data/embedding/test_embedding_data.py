import csv
import dataclasses
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from flaxzoo import data
from flaxzoo.data import DataError, EmbeddingData, TokenizerConfig
from flaxzoo.data.embedding.columns import examples_of_collection

ROWS = [
    {"id": 1, "anchor": "a cat sat", "positive": "the cat was sitting", "negative": "a dog ran"},
    {"id": 2, "anchor": "where is it", "positive": "it is here", "negative": None},
    {"id": 3, "anchor": "a cat sat", "positive": "it is a cat that sat", "negative": "it is here"},
]
WORDS = TokenizerConfig(kind="words")


def split_of(source, **fields):
    """The training examples of a source, each as (anchor, documents present, scores)."""
    config = EmbeddingData(source=source, validation=source, length=8, tokenizer=WORDS, **fields)
    tokenizer = config.make_tokenizer()
    split = config.train_split(tokenizer, (), 0)
    found = []
    for i in range(split.examples.num_examples):
        row = split.examples.example(0, i)

        def text(ids, mask):
            return tokenizer.decode([int(x) for x in ids[mask != 0]])

        documents = [
            text(*both)
            for both in zip(row["input_ids"], row["attention_mask"], strict=True)
            if both[1].any()
        ]
        scores = row["scores"].tolist() if "scores" in row else None
        found.append((text(row["anchor_ids"], row["anchor_mask"]), documents, scores))
    return found, split


def written(path, rows, kind="jsonl"):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            separator = {"csv": ",", "tsv": "\t"}[kind]
            writer = csv.DictWriter(file, list(rows[0]), delimiter=separator)
            writer.writeheader()
            writer.writerows(rows)
    return f"{kind}:{path}"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "memory"])
def test_each_form_of_a_source_gives_the_same_examples(kind, tmp_path):
    source = data.Examples.of(ROWS) if kind == "memory" else written(tmp_path / "x", ROWS, kind)
    found, split = split_of(source)

    assert found == [
        ("a cat sat", ["the cat was sitting", "a dog ran"], None),
        ("where is it", ["it is here"], None),
        ("a cat sat", ["it is a cat that sat", "it is here"], None),
    ]
    assert "columns: anchor, positive, negative; not read: id" in split.notes
    shapes = {name: x.shape for name, x in split.examples.example(0, 0).items()}
    assert shapes == {
        "anchor_ids": (8,), "anchor_mask": (8,), "input_ids": (2, 8), "attention_mask": (2, 8)
    }  # fmt: skip


LISTS = {"query": "a b", "documents": ["c", "d e"], "scores": [0.5, 2]}


@pytest.mark.parametrize(
    ("row", "fields", "documents", "scores"),
    [
        ({"anchor": "a b", "positive": "c", "negative_1": "d", "negative_2": "e"}, "",
         ["c", "d", "e"], None),
        ({"negatives": ["d", "e"], "positive": "c", "anchor": "a b"}, "", ["c", "d", "e"], None),
        ({"question": "a b", "answer": "c"}, "", ["c"], None),
        ({"source": "a b", "target": "c"}, "", ["c"], None),
        ({"sentence1": "a b", "sentence2": "c", "score": 0.75}, "", ["c"], 0.75),
        ({"x": "a b", "y": "c", "z": 3}, "#x,y,z", ["c"], 3.0),
        ({"x": "a b", "y": "c", "z": "d"}, "#x,y,z", ["c", "d"], None),
        ({"x": "a b", "y": "c", "z": "d"}, "#z,x", ["a b"], None),
        (LISTS, "", ["c", "d e"], [0.5, 2.0]),
    ],
)  # fmt: skip
def test_columns_have_their_roles_by_name_or_by_order(row, fields, documents, scores, tmp_path):
    found, _ = split_of(written(tmp_path / "x", [row, row]) + fields)
    assert found == 2 * [("d" if fields == "#z,x" else "a b", documents, scores)]


@pytest.mark.parametrize("fields", ["", "#text,label"])
def test_texts_with_labels_have_no_documents(fields, tmp_path):
    rows = [{"text": f"a {i}", "label": label} for i, label in enumerate(["x", 7, "x", 7])]
    source = written(tmp_path / "x", rows) + fields
    config = EmbeddingData(source=source, validation=source, length=8, tokenizer=WORDS)
    split = config.train_split(config.make_tokenizer(), (), 0)
    assert "labels: 7 (2), x (2)" in split.notes
    found = [split.examples.example(0, i) for i in range(4)]
    assert [int(one["labels"]) for one in found] == [1, 0, 1, 0]
    assert found[0].keys() == {"anchor_ids", "anchor_mask", "labels"}
    assert split.examples.batches(4, 0, 0).shape == (1, 4)
    with pytest.raises(DataError, match=r"line 1 .*label"):
        split_of(written(tmp_path / "y", [{"text": "a", "label": None}]))


def test_a_batch_is_of_one_of_several_data_sets(tmp_path):
    pairs = [{"anchor": f"a {i}", "positive": f"b {i}"} for i in range(8)]
    scored = [{"text1": f"c {i}", "text2": "d", "score": i / 8} for i in range(12)]
    labelled = [{"text": f"e {i}", "label": i % 2} for i in range(8)]
    lists = 4 * [{"query": "a b", "documents": ["c", "d e"], "scores": [0.5, 2]}]
    files = {"qa": pairs, "sts": scored, "topics": labelled, "lists": lists}
    named = [f"{name}={written(tmp_path / name, rows)}" for name, rows in files.items()]
    source = f"sets:{' | '.join(named)}"
    config = EmbeddingData(source=source, validation=source, length=8, tokenizer=WORDS)
    tokenizer = config.make_tokenizer()
    split = config.train_split(tokenizer, (), 0)
    assert "data sets qa 8, sts 12, topics 8, lists 4" in split.summary
    batches = data.TrainBatches(split.examples, 4, seed=0, num_steps=8)
    found = [batches[step] for step in range(8)]
    assert all(len({*batch["data_set"].tolist()}) == 1 for batch in found)
    sets = [int(batch["data_set"][0]) for batch in found]
    assert sorted(sets) == [0, 0, 1, 1, 1, 2, 2, 3]
    by_set = dict(zip(sets, found, strict=True))
    assert {array.shape for array in (by_set[k]["scores"] for k in range(4))} == {(4, 2)}
    assert by_set[3]["scores"].tolist() == 4 * [[0.5, 2.0]]
    assert not by_set[1]["scores"][:, 1].any()
    assert sorted(by_set[2]["labels"].tolist()) == [1, 1, 2, 2]  # 0 is no label
    turns = dataclasses.replace(config, mixing="round_robin").train_split(tokenizer, (), 0)
    batches = data.TrainBatches(turns.examples, 4, seed=0, num_steps=4)
    assert [int(batches[step]["data_set"][0]) for step in range(4)] == [0, 1, 2, 3]
    whole = config.whole_source(source, tokenizer, ()).examples
    assert whole.data_sets.tolist() == 8 * [0] + 12 * [1] + 8 * [2] + 4 * [3]
    with pytest.raises(DataError, match=r"qa, sts.*sets:qa=SOURCE"):
        config.whole_source(f"sets:{named[0]} | {named[1]}", tokenizer, ())
    with pytest.raises(DataError, match="different names"):
        EmbeddingData(source=f"sets:{named[0]}", length=8, tokenizer=WORDS).score_form()


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "x").write_text("{}")
    with pytest.raises(DataError, match=r"x .*Parquet"):
        split_of(f"parquet:{tmp_path}/x")


def test_negatives_and_queries_have_limits():
    row = {"anchor": "a b c d " * 3, "positive": "p " * 12, "negatives": ["d", "e", "f"]}
    config = {"length": 10, "num_negatives": 2, "query_length": 8, "tokenizer": WORDS}
    rows = data.Examples.of([row, {**row, "negatives": []}])
    data_ = EmbeddingData(source=rows, validation=rows, **config)
    examples = data_.whole_source(data_.source, data_.make_tokenizer(), ()).examples
    shapes = {name: x.shape for name, x in examples.example(0, 1).items()}
    assert (shapes["anchor_ids"], shapes["input_ids"]) == ((8,), (3, 10))
    assert shapes == {name: one.shape for name, one in data_.batch_spec(0, 0).items()}
    with pytest.raises(data.UserError, match=r"query_length 11 .*length 10"):
        EmbeddingData(source="jsonl:x", **{**config, "query_length": 11})


def test_rows_are_padded_to_the_longest_text():
    rows = data.Examples.of([("a b c d", "p " * 12), ("e", "f")])
    source = EmbeddingData(source=rows, validation=rows, length=64, tokenizer=WORDS)
    examples = source.whole_source(rows, source.make_tokenizer(), ()).examples
    row = examples.example(0, 0)
    assert (row["anchor_ids"].shape, row["input_ids"].shape) == ((8,), (1, 16))
    assert int(row["attention_mask"].sum()) >= 12


def test_numbered_negatives_follow_their_numbers(tmp_path):
    texts = {f"negative_{i}": str(i) for i in range(1, 12)}
    rows = 2 * [{"anchor": "a", "positive": "b", **texts}]
    found, _ = split_of(written(tmp_path / "x", rows))
    assert found == 2 * [("a", ["b", *texts.values()], None)]


def test_numbers_in_a_table_are_scores(tmp_path):
    rows = [{"a": "a", "b": "b", "c": "0.5"}, {"a": "c", "b": "d", "c": "1"}]
    found, _ = split_of(written(tmp_path / "x", rows, "tsv") + "#a,b,c")
    assert [scores for _, _, scores in found] == [0.5, 1.0]


def test_the_log_names_scores_and_columns_that_are_not_read(tmp_path):
    rows = 2 * [{"query": "a", "positive": "b", "hard_negative": "c", "score": 1}]
    _, split = split_of(written(tmp_path / "x", rows))
    assert "columns: query, positive, score (scores); not read: hard_negative" in split.notes


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([{"a": "x", "b": "y"}], "", r"columns a, b: .*anchor"),
        ([{"anchor": "x", "positive": ""}], "", "line 1 .*positive"),
        ([{"anchor": "x", "positive": 3}], "", "line 1 .*text"),
        ([{"anchor": " ", "positive": "y"}], "", "line 1 .*anchor"),
        ([{"anchor": "x", "positive": "\n"}], "", "line 1 .*text"),
        ([{"anchor": "x", "positive": "", "negative": "y"}], "", "line 1 .*text"),
        ([{"anchor": "x", "positive": ["y", "z"]}], "", "line 1 .*2 positives"),
        ([{**LISTS, "scores": 1}], "", "line 1 .*2 positives"),
        ([{**LISTS, "documents": "c", "scores": 1}, LISTS], "", "1 of 2 records"),
        ([{"anchor": "x", "positive": "y", "score": "z"}], "", "line 1 .*number"),
        ([{"a": "x", "b": "y", "c": c} for c in ("1", "2", "n/a")], "#a,b,c", "line 3 .*number"),
        ([{**LISTS, "scores": [1]}], "", "line 1 .*1 scores .*2 documents"),
        ([{"anchor": "x", "positive": "y"}], "#anchor", "one column"),
        ([{"anchor": "x", "positive": "y"}], "#anchor,other", "field 'other'"),
    ],
)
def test_bad_rows_are_named(rows, fields, message, tmp_path):
    with pytest.raises(DataError, match=message):
        split_of(written(tmp_path / "x", rows) + fields)


def test_prompts_precede_the_texts():
    prompts = {"query_prompt": "query : ", "document_prompt": "it : "}
    found, _ = split_of(data.Examples.of([("a", "b"), ("c", "query")]), **prompts)
    tokenizer_words = [(anchor.split()[-1], documents) for anchor, documents, _ in found]
    assert len(tokenizer_words) == 2
    assert all(anchor.startswith("query") for anchor, _, _ in found)


def test_no_document_is_in_both_splits():
    rows = [(f"question {i}", f"paragraph {i // 5}") for i in range(200)]
    config = EmbeddingData(
        source=data.Examples.of(rows), validation_fraction=0.3, length=8, tokenizer=WORDS
    )
    tokenizer = config.make_tokenizer()
    splits = config.train_split(tokenizer, (), 0), config.validation_split(tokenizer, ())
    train, validation = ({e.documents for e in split.content} for split in splits)
    assert train
    assert validation
    assert not train & validation


def test_an_absent_document_is_all_zeros():
    _, split = split_of(data.Examples.of(ROWS))
    row = split.examples.example(3, 1)
    assert not row["input_ids"][1].any()
    assert not row["attention_mask"][1].any()
    assert row["input_ids"].dtype == np.int32


def test_a_collection_has_queries_with_their_documents():
    rows = {"documents": {"1": "a b", "2": "c d", "3": "e"}, "queries": {"x": "a", "y": "d"}}
    collection = data.RetrievalData(**rows, relevant={"x": {"1": 1}, "y": {"2": 2, "1": 1}})
    found = examples_of_collection(collection, "beir:x")
    pairs = [("a", "a b"), ("d", "c d"), ("d", "a b")]
    assert [(one.anchor, *one.documents) for one in found] == pairs


def test_a_folder_of_a_collection_is_a_source(tmp_path):
    texts = {"documents": {"1": "a b", "2": "c d", "3": "e"}, "queries": {"x": "a", "y": "d"}}
    relevant = {"x": {"1": 1}, "y": {"2": 1}}
    data.RetrievalData(**texts, relevant=relevant).save(tmp_path / "x")
    source = f"beir:{tmp_path / 'x'}"
    config = EmbeddingData(source=source, validation=source, length=8, tokenizer=WORDS)
    tokenizer = config.make_tokenizer()
    assert config.train_split(tokenizer, (), 0).examples.num_examples == 2
    assert config.validation_split(tokenizer, ()).examples.num_examples == 2


def test_paragraphs_make_pairs_without_a_download():
    config = EmbeddingData(source="builtin:python-docs", length=8, tokenizer=WORDS)
    pairs = [set(config._part(split).examples) for split in ("train", "validation")]
    assert [len(one) > 50 for one in pairs] == [True, True]
    with pytest.raises(DataError, match="built-in pairs"):
        split_of("builtin:reviews")
