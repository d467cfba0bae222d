import numpy as np
import pytest
import tensorflow_datasets as tfds
from flaxzoo.data import DataError, TokenizerConfig, load_documents, open_parallel
from flaxzoo.data.sources.labelled_names import parse_labelled
from flaxzoo.data.sources.published.opening import open_published
from flaxzoo.data.sources.tfds import documents as published
from flaxzoo.data.tasks.multiple_choice import MultipleChoiceData
from flaxzoo.data.tasks.question_answering import QuestionAnsweringData
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData
from flaxzoo.data.tasks.token_classification import TokenClassificationData


def data(source, **fields):
    return SequenceClassificationData(
        source=source, tokenizer=TokenizerConfig(), length=12, **fields
    )


Text = tfds.features.Text
SENTIMENT = {
    "label": tfds.features.ClassLabel(names=["negative", "positive"]),
    "text": Text(),
    "idx": np.int32,
}


def sentiment(n, first=0):
    return [{"label": i % 2, "text": f"text {i}", "idx": i} for i in range(first, first + n)]


def test_published_labels_and_splits(publish, tokenizer):
    publish("tiny_sentiment", SENTIMENT, train=sentiment(9), validation=sentiment(3, 9))
    config = data("tfds:tiny_sentiment")
    labels = config.labels()
    assert labels == ("negative", "positive")
    train = config.train_split(tokenizer, labels, 0)
    validation = config.validation_split(tokenizer, labels)
    assert {example.text for example in train.content} == {f"text {i}" for i in range(9)}
    assert {example.text for example in validation.content} == {"text 9", "text 10", "text 11"}
    assert {(e.text, e.label) for e in validation.content} >= {("text 9", "positive")}
    other = config.whole_source("tfds:tiny_sentiment#label,text", tokenizer, labels)
    assert other.fingerprint == validation.fingerprint


def test_published_records_are_filtered(publish, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))
    publish("tiny_sentiment", SENTIMENT, train=sentiment(20), validation=sentiment(4, 20))
    config = data("tfds:tiny_sentiment#label,text?idx>=16&label==1")
    train = config.train_split(tokenizer, config.labels(), 0)
    assert {example.text for example in train.content} == {"text 17", "text 19"}
    assert train.notes[0] == "18 records left out by the filter idx>=16&label==1"
    with pytest.raises(DataError, match="no field 'votes'"):
        data("tfds:tiny_sentiment#label,text?votes>1").labels()
    documents = {
        split: load_documents("tfds:tiny_sentiment#text?idx>=18", split, validation_fraction=0.0)
        for split in ("train", "validation")
    }
    assert sorted(documents["train"]) == ["text 18", "text 19"]
    assert documents["train"].note == "18 documents left out by the filter idx>=18"
    assert sorted(documents["validation"]) == [f"text {i}" for i in range(20, 24)]
    everything = load_documents("tfds:tiny_sentiment", "train", validation_fraction=0.0)
    assert everything.fingerprint != documents["train"].fingerprint
    with pytest.raises(DataError, match=r"no text .*idx>99"):
        load_documents("tfds:tiny_sentiment#text?idx>99", "train", validation_fraction=0.0)
    pairs = open_parallel("tfds:tiny_sentiment#text,text?idx<2", "train")
    assert (len(pairs), len(pairs.fingerprint)) == (2, 32)


def test_published_documents_are_filtered_and_divided(publish, monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXZOO_CACHE", str(tmp_path / "cache"))
    publish("tiny_sentiment", SENTIMENT, train=sentiment(60))
    train, held_out = (
        load_documents("tfds:tiny_sentiment#text?label==1", split, validation_fraction=0.3)
        for split in ("train", "validation")
    )
    assert len(held_out) > 0
    assert sorted((*train, *held_out)) == sorted(f"text {i}" for i in range(1, 60, 2))


def test_published_without_validation(publish, tokenizer):
    publish("tiny_sentiment", SENTIMENT, train=sentiment(40), test=sentiment(3, 90))
    config = data("tfds:tiny_sentiment", validation_fraction=0.2)
    train = config.train_split(tokenizer, config.labels(), 0)
    validation = config.validation_split(tokenizer, config.labels())
    assert len(train.content) + len(validation.content) == 40
    with pytest.raises(DataError, match=r"validation split.* train, test"):
        config.whole_source("tfds:tiny_sentiment", tokenizer, config.labels())


def test_published_faults(publish, tokenizer):
    publish("tiny_sentiment", SENTIMENT, train=[{"label": -1, "text": "x", "idx": 0}])
    with pytest.raises(DataError, match=r"no field 'body'.*label"):
        data("tfds:tiny_sentiment#label,body").train_split(tokenizer, (), 0)
    with pytest.raises(DataError, match=r"train example 1 .*label \(-1\)"):
        data("tfds:tiny_sentiment").train_split(tokenizer, ("a", "b"), 0)
    with pytest.raises(DataError, match=r"TFDS .*'tiny_sentimen'"):
        data("tfds:tiny_sentimen").labels()


def test_published_tags(publish, tokenizer):
    tags = ["O", "B-PER", "I-PER"]
    features = {
        "tokens": tfds.features.Sequence(Text()),
        "ner": tfds.features.Sequence(tfds.features.ClassLabel(names=tags)),
    }
    rows = [{"tokens": ["mr", "x", "ran"], "ner": [1, 2, 0]}, {"tokens": ["i", "y"], "ner": [0, 1]}]
    publish("tiny_entities", features, train=rows, dev=rows[:1], test=rows)
    config = TokenClassificationData(
        source="tfds:tiny_entities", tokenizer=TokenizerConfig(), length=12
    )
    assert config.labels() == ("O", "B-PER", "I-PER")
    assert len(config.train_split(tokenizer, config.labels(), 0).content) == 2
    validation = config.validation_split(tokenizer, config.labels())
    assert validation.examples.gold() == [["B-PER", "I-PER", "O"]]
    tags = tfds.features.Sequence(tfds.features.ClassLabel(names=[*tags, "B-LOC", "I-LOC"]))
    publish("tiny_places", {**features, "ner": tags}, train=rows, dev=rows)
    config = TokenClassificationData(
        source="tfds:tiny_places", tokenizer=TokenizerConfig(), length=12
    )
    assert config.labels() == ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")  # no example has LOC
    publish("tiny_unknown", features, train=[{"tokens": ["a"], "ner": [-1]}])
    config = TokenClassificationData(
        source="tfds:tiny_unknown", tokenizer=TokenizerConfig(), length=12
    )
    with pytest.raises(DataError, match=r"train example 1 .*-1 .*tags"):
        config.labels()


def test_published_labels_of_several(publish):
    publish("tiny_sentiment", SENTIMENT, train=sentiment(4), validation=sentiment(4))
    assert data("tfds:tiny_sentiment", target="multi_label").labels() == ("negative", "positive")


def test_a_float_is_no_label(publish):
    features = {"label": np.float32, "text": Text()}
    publish("tiny_scores", features, train=[{"label": 3.5, "text": "a"}])
    with pytest.raises(DataError, match=r"label 3.5.*target regression"):
        data("tfds:tiny_scores").labels()


def test_published_answers(publish, tokenizer):
    answers = tfds.features.Sequence({"text": Text(), "answer_start": np.int32})
    texts = {name: Text() for name in ("id", "title", "context", "question")}
    answer = {"text": ["red"], "answer_start": [6]}
    rows = [
        {"id": "a", "title": "t", "context": "it is red", "question": "what", "answers": answer},
        {"id": "b", "title": "t", "context": "it is red", "question": "who",
         "answers": {"text": [], "answer_start": []}},
    ]  # fmt: skip
    publish("tiny_squad", {**texts, "answers": answers}, train=rows, validation=rows)
    config = QuestionAnsweringData(source="tfds:tiny_squad", tokenizer=TokenizerConfig(), length=32)
    assert config.labels() == ("no answer",)
    split = config.train_split(tokenizer, config.labels(), 0)
    assert split.examples.gold() == [{"id": "a", "answers": ["red"]}, {"id": "b", "answers": []}]


KINDS = (
    SequenceClassificationData,
    TokenClassificationData,
    QuestionAnsweringData,
    MultipleChoiceData,
)
KNOWN = [(kind, name) for kind in KINDS for name in kind.published_fields] + [
    (SequenceClassificationData, "imdb_reviews"),
    (TokenClassificationData, "conll2003"),
    (TokenClassificationData, "wikiann/en"),
    (QuestionAnsweringData, "squad/v1.1"),
    (QuestionAnsweringData, "squad/v2.0"),
]


@pytest.mark.parametrize(("kind", "name"), KNOWN)
def test_well_known_data_sets_have_the_fields(monkeypatch, tmp_path, kind, name):
    """What TFDS itself says of them; nothing is downloaded."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(published, "download", lambda builder, source: None)
    source = parse_labelled(f"tfds:{name}", kind.forms)
    records = open_published(source, kind.published_fields)
    features = records.builder.info.features
    assert all(part in features for field in records.source.fields for part in field.split("+"))
    names = records.class_names(records.source.fields[0])
    assert (name == "glue/sst2") == (names == ("negative", "positive"))


def test_published_choices(publish, tokenizer):
    names = ["goal", "sol1", "sol2"]
    features = {
        **{name: Text() for name in names},
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    rows = [{"goal": "cut", "sol1": "knife", "sol2": "spoon", "label": 1}]
    publish("tiny_piqa", features, train=rows, validation=rows)
    source = "tfds:tiny_piqa#label,goal,sol1+sol2"
    config = MultipleChoiceData(source=source, tokenizer=TokenizerConfig(), length=32)
    split = config.validation_split(tokenizer, ())
    assert split.content[0].choices == ("knife", "spoon")
    assert split.examples.gold() == [1]
