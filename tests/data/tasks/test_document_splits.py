"""Laws of every kind of data that is made from documents: splits, epochs and evaluation."""

import pickle

import numpy as np
import pytest
from flaxzoo import data

TEXT = "The quick brown fox jumps. It reads the lazy dog! Does it? Some other words. "
DOCUMENTS = [f"{TEXT * (2 + i % 4)}\nIt ends with number {i}." for i in range(30)]
PIECES = data.TokenizerConfig("sentencepiece-bpe", 330)
KINDS = {
    "words": (data.PretrainingData, {"tokenizer": data.TokenizerConfig("wordpiece", 90)}),
    "gaps": (data.SpanCorruptionData, {"tokenizer": PIECES, "num_sentinels": 20}),
    "masks": (data.DenoisingData, {"tokenizer": PIECES}),
    "next": (data.CausalLMData, {"tokenizer": data.TokenizerConfig("characters")}),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def given(request):
    """The config of a kind of data, its tokenizer, and a split to train on."""
    kind, fields = request.param
    config = kind(source=data.Examples.of(DOCUMENTS), length=48, validation_fraction=0.3, **fields)
    tokenizer = config.make_tokenizer()
    return config, tokenizer, config.train_split(tokenizer, (), 3)


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_no_document_is_in_both_splits(given):
    config, tokenizer, train = given
    held_out = config.validation_split(tokenizer, ()).content.num_documents
    assert held_out > 0
    assert train.content.num_documents == len(config.texts()) == len(DOCUMENTS) - held_out
    assert config.whole_source(config.source, tokenizer, ()).content.num_documents == 30


def test_examples_depend_on_seed_epoch_and_index_alone(given):
    config, tokenizer, train = given
    copy, number = pickle.loads(pickle.dumps(train.examples)), train.examples.num_examples
    other = config.train_split(tokenizer, (), 4).examples
    rows = [train.examples.example(1, i) for i in range(number)]
    assert all(equal(row, copy.example(1, i)) for i, row in reversed([*enumerate(rows)]))
    for fresh in (train.examples, other):
        epoch = 2 if fresh is train.examples else 1
        found = [fresh.example(epoch, i) for i in range(min(number, fresh.num_examples))]
        assert not all(map(equal, rows, found))


def test_evaluation_is_the_same_each_time(given):
    config, tokenizer, _ = given
    one, other = (config.validation_split(tokenizer, ()) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    for i in range(one.examples.num_examples):
        assert equal(one.examples.example(0, i), other.examples.example(0, i))
