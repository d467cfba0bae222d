import pickle

import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, train_tokenizer
from flaxzoo.data.tasks.bert_pretraining import PretrainingData

TOKENIZER = TokenizerConfig("wordpiece", 300)
TEXT = "\n\n".join(
    "\n".join(f"the {word} number {i} of text {d}." for i in range(12) for word in ("cat", "dog"))
    for d in range(20)
)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], TokenizerConfig("wordpiece", 60))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)

    def data(length=32, **fields):
        fields = {"source": f"text:{tmp_path}/a.txt#sentences", "tokenizer": TOKENIZER} | fields
        return PretrainingData(length=length, **fields)

    return data


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def check_row(row, tokenizer, length, max_predictions, next_sentence=True):
    special = tokenizer.special_ids
    ids, mask, types = (row[n] for n in ("input_ids", "attention_mask", "token_type_ids"))
    assert all(array.dtype == np.int32 for array in row.values())
    assert ids.shape == mask.shape == types.shape == (length,)
    assert row["masked_positions"].shape == (max_predictions,)
    size = mask.sum()
    assert mask.tolist() == [1] * size + [0] * (length - size)
    assert set(ids[size:].tolist()) <= {special.pad}
    assert not types[size:].any()
    restored = ids.copy()
    used = row["masked_weights"] == 1
    restored[row["masked_positions"][used]] = row["masked_labels"][used]
    assert special.mask not in restored
    assert restored[0] == special.cls
    seps = np.flatnonzero(restored == special.sep).tolist()
    assert len(seps) == 1 + next_sentence
    assert seps[-1] == size - 1
    if next_sentence:
        assert types[:size].tolist() == [0] * (seps[0] + 1) + [1] * (size - seps[0] - 1)
        assert row["next_sentence_label"].shape == ()
    else:
        assert "next_sentence_label" not in row
        assert not types.any()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"next_sentence": False},
        {"whole_word": True},
        {"segments": "halves"},
        {"segments": "halves", "next_sentence": False},
    ],
)
def test_rows(data, tokenizer, fields):
    split = data(**fields).train_split(tokenizer, (), 3)
    for index in range(split.examples.num_examples):
        check_row(
            split.examples.example(1, index), tokenizer, 32, 5, fields.get("next_sentence", True)
        )


def test_the_tokens_of_a_corpus_are_not_pickled(data, tokenizer):
    rows = data().train_split(tokenizer, (), 3).examples
    rows.example(0, 0)
    assert len(pickle.dumps(rows)) < 2000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"masking_rate": 0.0}, "masking_rate must .*0.0"),
        ({"short_fraction": 1.5}, "short_fraction must .*1.5"),
        ({"max_predictions": 33}, "max_predictions 33"),
    ],
)
def test_bad_settings(data, fields, message):
    with pytest.raises(ValueError, match=message):
        data(**fields)


def test_tokenizer_without_the_special_tokens(data):
    characters = train_tokenizer([TEXT], TokenizerConfig("characters"))
    with pytest.raises(DataError, match=r"cls, sep, mask, pad .*wordpiece"):
        data().train_split(characters, (), 0)


def test_pairs_to_predict_are_located_in_the_files_of_a_glob(data, tmp_path):
    config = data()
    (tmp_path / "1.tsv").write_text("one\ttwo\n")
    (tmp_path / "2.tsv").write_text("\t\n")
    tokenizer = train_tokenizer([TEXT], TokenizerConfig("characters"))  # without a frame
    with pytest.raises(DataError, match=r"2\.tsv line 1 .*no text"):
        config.input_split(f"{tmp_path}/?.tsv", tokenizer, ())


def test_text_without_pairs(data, tokenizer, tmp_path):
    (tmp_path / "b.txt").write_text(TEXT.split("\n\n")[0])
    config = data(source=f"text:{tmp_path}/b.txt", validation=f"text:{tmp_path}/a.txt#line")
    with pytest.raises(DataError, match="two documents"):
        config.train_split(tokenizer, (), 0)
    with pytest.raises(DataError, match="single sentence"):
        config.validation_split(tokenizer, ())


def test_googles_sample(datasets):
    sample = f"text:{datasets}/docs/google_bert_sample_text.txt#sentences"
    bert = TokenizerConfig(path=str(datasets / "tok/bert_base_uncased_vocab.txt"))
    config = PretrainingData(source=sample, length=128, tokenizer=bert, validation_fraction=0.0)
    tokenizer = train_tokenizer((), bert)
    split = config.train_split(tokenizer, (), 0)
    assert (split.content.num_documents, split.content.num_sentences) == (3, 31)
    for epoch in range(3):
        for index in range(split.examples.num_examples):
            check_row(split.examples.example(epoch, index), tokenizer, 128, 20)


def within(share, expected, count, deviations=5.0):
    return abs(share - expected) < deviations * np.sqrt(expected * (1 - expected) / count)


@pytest.mark.slow
def test_statistics_of_brown(datasets):
    source = f"text:{datasets}/docs/brown.train.txt.gz#sentences"
    bert = TokenizerConfig(path=str(datasets / "tok/bert_base_uncased_vocab.txt"))
    config = PretrainingData(source=source, length=128, tokenizer=bert, validation_fraction=0.0)
    tokenizer = train_tokenizer((), bert)
    split = config.train_split(tokenizer, (), 0)
    assert (split.content.num_documents, split.content.num_sentences) == (400, 46_175)
    rows = [split.examples.example(0, index) for index in range(3000)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    weights = batch["masked_weights"] == 1
    tokens, count = int(batch["attention_mask"].sum()), int(weights.sum())
    assert abs(count / tokens - 0.15) < 0.003
    assert tokens / batch["attention_mask"].size > 0.95
    labels = batch["masked_labels"][weights]
    shown = np.take_along_axis(batch["input_ids"], batch["masked_positions"], 1)[weights]
    mask = tokenizer.special_ids.mask
    assert within(np.mean(shown == mask), 0.8, count)
    assert within(np.mean(shown == labels), 0.1, count)
    assert within(np.mean((shown != mask) & (shown != labels)), 0.1, count)
    assert within(np.mean(batch["next_sentence_label"]), 0.5, 3000)
