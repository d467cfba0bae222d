"""Data of span corruption: packed texts, new gaps in every epoch, one plan for all."""

import numpy as np
import pytest
from flaxzoo.data import DataError, Documents, SpanCorruptionData, TokenizerConfig
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.sentinels import SentinelTokenizer

TEXT = "The quick brown fox jumps over the lazy dog while it reads some other words. "
DOCUMENTS = [TEXT * (1 + i % 5) for i in range(30)]
VOCABULARY = TokenizerConfig("sentencepiece-bpe", 390)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "documents.txt"
    file.write_text("\n".join(DOCUMENTS))
    return f"text:{file}#line"


@pytest.fixture
def made(documents):
    def make(**fields):
        given = {"length": 48, "tokenizer": VOCABULARY, "validation_fraction": 0.2, **fields}
        return SpanCorruptionData(source=documents, **given)

    return make


@pytest.fixture(scope="module")
def tokenizer(documents):
    return SpanCorruptionData(source=documents, length=48, tokenizer=VOCABULARY).make_tokenizer()


def texts_of(example, tokenizer):
    """The texts of an example: sources whose gaps are filled from their targets."""
    first = tokenizer.base.vocab_size
    for number in range(1, example["segment_ids"].max() + 1):
        source = example["input_ids"][example["segment_ids"] == number]
        target = example["labels"][example["decoder_segment_ids"] == number]
        assert source[-1] == target[-1] == tokenizer.special_ids.eos
        spans = np.split(target[:-1], np.flatnonzero(target[:-1] >= first)[1:])
        found = {part[0]: part[1:].tolist() for part in spans}
        yield [x for token in source[:-1].tolist() for x in found.get(token, [token])]


def test_every_text_is_in_an_epoch_once_and_its_gaps_change(made, tokenizer):
    data = made()
    split = data.train_split(tokenizer, (), seed=3)
    examples, number = split.examples, split.examples.num_examples
    epochs = [[examples.example(epoch, i) for i in range(number)] for epoch in (0, 1)]
    found = [
        sorted(text for example in epoch for text in texts_of(example, tokenizer))
        for epoch in epochs
    ]
    assert found[0] == found[1]
    assert any((a["labels"] != b["labels"]).any() for a, b in zip(*epochs, strict=True))
    # The texts are the documents, cut where a source is full.
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in data.texts()]
    longest = examples.corruption.longest_text(*examples.lengths)
    cut = [t[i : i + longest] for t in tokens for i in range(0, len(t), longest)]
    assert found[0] == sorted(text for text in cut if len(text) > 1)
    assert max(example["segment_ids"].max() for example in epochs[0]) > 1
    assert f"{examples.num_texts} texts" in split.summary


def test_arrays_have_the_lengths_that_were_described(made, tokenizer):
    for data in (made(), made(target_length=9)):
        example = data.train_split(tokenizer, (), seed=0).examples.example(0, 0)
        spec = data.batch_spec(0, 0)
        assert {name: x.shape for name, x in example.items()} == {
            name: array.shape for name, array in spec.items()
        }
    assert made().lengths == (48, 12)
    target = example["labels"][example["decoder_segment_ids"] == 1]
    shifted = example["decoder_input_ids"][example["decoder_segment_ids"] == 1]
    assert shifted.tolist() == [tokenizer.special_ids.bos, *target[:-1]]


def test_too_few_sentinels_are_named(made, tokenizer):
    few = SentinelTokenizer(tokenizer.base, 2)
    with pytest.raises(DataError, match=r"3 gaps.* 2 sentinels"):
        made().train_split(few, (), 0)
    with pytest.raises(DataError, match=r"0 sentinels: .*data.num_sentinels 3"):
        made().train_split(tokenizer.base, (), 0)


def test_documents_of_one_token(made, tokenizer):
    with pytest.raises(DataError, match="two tokens"):
        made().whole_source(Documents.of(["a"]), tokenizer, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 2}, "two tokens .*data.length 2"),
        ({"target_length": 2}, "two tokens .*data.target_length 2"),
        ({"num_sentinels": 0}, "num_sentinels must .*0"),
        ({"noise_density": 0.0}, "noise_density must .*0.0"),
    ],
)
def test_impossible_settings(made, fields, message):
    with pytest.raises(UserError, match=message):
        made(**fields)


def test_sentinels_count_in_the_size_of_a_vocabulary(made):
    assert made().make_tokenizer().vocab_size == 390
    few = made(num_sentinels=7, tokenizer=TokenizerConfig("sentencepiece-bpe", 300))
    tokenizer = few.make_tokenizer()
    assert (tokenizer.vocab_size, len(tokenizer.sentinels)) == (300, 7)
    with pytest.raises(UserError, match=r"vocab_size 100 .*sentinels 100"):
        made(tokenizer=TokenizerConfig("sentencepiece-bpe", 100))
    # The minimum includes the sentinels.
    with pytest.raises(DataError, match=r"120 tokens .* at least \d+") as caught:
        made(tokenizer=TokenizerConfig("sentencepiece-bpe", 120)).make_tokenizer()
    least = int(str(caught.value).rpartition(" ")[2])
    smallest = made(tokenizer=TokenizerConfig("sentencepiece-bpe", least)).make_tokenizer()
    assert (smallest.vocab_size, len(smallest.sentinels)) == (least, 100)
