"""Pairs of a query and each of its documents, with sampled documents."""

import numpy as np
import pytest
from flaxzoo import data
from flaxzoo.data import RerankData, TokenizerConfig

WORDS = TokenizerConfig(kind="words")
PAIRS = [(f"where is the number {i}", f"the number {i} is here, behind {i + 1}") for i in range(9)]
LISTS = [
    {"query": "a b", "documents": ["c", "d e"], "scores": [0.5, 2]},
    {"query": "f", "documents": ["c"], "scores": [1]},
]


def examples_of(source, *, training=True, **fields):
    given = data.Examples.of(source)
    config = RerankData(source=given, validation=given, length=24, tokenizer=WORDS, **fields)
    tokenizer = config.make_tokenizer()
    make = config.train_split if training else config.validation_split
    split = make(tokenizer, ("score",), 0) if training else make(tokenizer, ("score",))
    return tokenizer, split


def test_each_document_is_a_pair_with_the_query():
    tokenizer, split = examples_of(LISTS)
    row = split.examples.example(0, 0)
    for i, document in enumerate(LISTS[0]["documents"]):
        texts = [tokenizer.encode(x, add_special_tokens=False) for x in ("a b", document)]
        framed = tokenizer.frame.join(*texts)
        size = len(framed.ids)
        assert row["input_ids"][i, :size].tolist() == framed.ids
        assert row["token_type_ids"][i, :size].tolist() == framed.types
        assert row["attention_mask"][i].sum() == size
    assert row["scores"].tolist() == [0.5, 2]
    absent = split.examples.example(0, 1)
    assert not absent["attention_mask"][1].any()
    assert absent["scores"].tolist() == [1, 0]


def test_each_epoch_samples_other_documents():
    tokenizer, split = examples_of(PAIRS)

    def documents(examples, epoch):
        row = examples.example(epoch, 3)
        assert row["scores"].tolist() == [1, 0, 0, 0, 0]
        ids = np.where(row["token_type_ids"] == 1, row["input_ids"], -1)
        return [tokenizer.decode([int(x) for x in one if x >= 0]) for one in ids]

    first, again, second = (documents(split.examples, epoch) for epoch in (0, 0, 1))
    assert first == again
    assert first[0] == second[0]
    assert first != second
    for found in (first, second):
        assert len({*found}) == 5  # never the same twice, and never the positive
    _, evaluation = examples_of(PAIRS, training=False)
    assert documents(evaluation.examples, 0) == documents(evaluation.examples, 1)


def test_documents_of_the_same_query_in_other_records_are_not_sampled():
    tokenizer, split = examples_of([("a", "b"), ("a", "c"), ("d", "e")])
    row = split.examples.example(0, 0)
    assert row["attention_mask"].any(-1).tolist() == [True, True, False, False, False]
    ids = row["input_ids"][1][row["token_type_ids"][1] == 1]
    assert tokenizer.decode([int(x) for x in ids]) == "e"


def test_with_few_documents_fewer_are_sampled():
    _, split = examples_of(PAIRS[:3])
    row = split.examples.example(0, 0)
    assert row["attention_mask"].any(-1).tolist() == [True, True, True, False, False]


def test_documents_that_bm25_finds_are_sampled_first():
    rows = [(f"number {i}", f"x{i} number") for i in range(3)]
    rows += [(f"word {i}", f"y{i} of it") for i in range(30)]
    tokenizer, split = examples_of(rows, sampled_from="bm25", sampled_negatives=3)

    def documents(epoch, index):
        ids = split.examples.example(epoch, index)
        rows = np.where(ids["token_type_ids"] == 1, ids["input_ids"], -1)
        return [tokenizer.decode([int(x) for x in row if x >= 0]).split()[0] for row in rows]

    for epoch in range(3):
        positive, *negatives = documents(epoch, 1)
        assert positive == "x1"
        # BM25 finds two documents with the word "number", and any document follows.
        assert {*negatives[:2]} == {"x0", "x2"}
        assert negatives[2].startswith("y")
        # It finds no document with the word "word".
        assert len({*documents(epoch, 9)}) == 4


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (LISTS, {"sampled_negatives": 2}, "sampled_negatives 2 "),
        ([{"anchor": "a", "positive": "b", "score": None}], {}, "number .*score"),
        ([{"text": "a", "label": "b"}], {}, "labels.*#query,document"),
    ],
)
def test_meaningless_fields_are_refused(source, fields, message):
    with pytest.raises(data.UserError, match=message):
        examples_of(source, **fields)


def test_the_built_in_pairs_are_numbers_in_two_languages():
    config = RerankData(source="builtin:numbers-en-fr", tokenizer=WORDS)
    train, validation = (config._part(split).examples for split in ("train", "validation"))
    assert (len(train), len(validation)) == (5000, 1000)
    assert not {e.anchor for e in train} & {e.anchor for e in validation}
