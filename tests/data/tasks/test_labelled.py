import pickle

import pytest
from flaxzoo.data import DataError, Examples, TokenizerConfig
from flaxzoo.data.tasks.multiple_choice import MultipleChoiceData
from flaxzoo.data.tasks.question_answering import QuestionAnsweringData
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData
from flaxzoo.data.tasks.token_classification import TokenClassificationData


def data(source, **fields):
    return SequenceClassificationData(
        source=source, tokenizer=TokenizerConfig(), length=12, **fields
    )


def write(path, rows):
    path.write_text("".join(f"{label}\t{text}\n" for label, text in rows))
    return f"tsv:{path}"


ROWS = [(i % 2, f"text {i}") for i in range(60)]


def test_division(tmp_path, tokenizer):
    def parts(rows, name):
        config = data(write(tmp_path / name, rows), validation_fraction=0.2)
        labels = config.labels()
        return config.train_split(tokenizer, labels, 0), config.validation_split(tokenizer, labels)

    train, validation = parts(ROWS, "a.tsv")
    texts = [{example.text for example in part.content} for part in (train, validation)]
    assert not texts[0] & texts[1]
    assert texts[0] | texts[1] == {text for _, text in ROWS}
    assert 4 <= len(texts[1]) <= 20
    again = parts(ROWS + ROWS[:7], "b.tsv")  # the same texts stay where they were, and together
    assert [{example.text for example in part.content} for part in again] == texts
    moved = parts(ROWS, "c.tsv")
    assert [part.fingerprint for part in moved] == [train.fingerprint, validation.fingerprint]
    assert len({train.fingerprint, validation.fingerprint, again[0].fingerprint}) == 3
    assert (
        pickle.loads(pickle.dumps(train.examples)).example(3, 1).keys()
        == train.examples.example(0, 1).keys()
    )


def test_other_sources(tmp_path, tokenizer):
    validation = write(tmp_path / "v.tsv", ROWS[:5])
    config = data(write(tmp_path / "a.tsv", ROWS), validation=validation)
    labels = config.labels()
    assert labels == ("0", "1")
    assert len(config.train_split(tokenizer, labels, 0).content) == 60
    assert len(config.validation_split(tokenizer, labels).content) == 5
    assert config.whole_source(validation, tokenizer, labels).summary == "5 examples"
    texts = config.texts()
    assert list(texts) == [text for _, text in ROWS]
    assert texts.fingerprint == config.texts().fingerprint


def test_other_sources_have_the_same_fields(tmp_path, tokenizer):
    (tmp_path / "a.tsv").write_text("a\tno\tx\nb\tyes\ty\n")
    (tmp_path / "a.jsonl").write_text('{"label": "no", "text": "x"}\n')
    source = f"tsv:{tmp_path}/a.tsv"
    config = data(f"{source}#2,3", validation=source)
    labels = config.labels()
    wanted = [("x", "no"), ("y", "yes")]
    for split in (
        config.validation_split(tokenizer, labels),
        config.whole_source(source, tokenizer, labels),
        config.whole_source(f"jsonl:{tmp_path}/a.jsonl", tokenizer, labels),  # its own
    ):
        found = [(example.text, example.label) for example in split.content]
        assert found == wanted[: len(found)]
    with pytest.raises(DataError, match=r"line 1.*label 'a' .*COLUMN"):
        config.whole_source(f"{source}#1,3", tokenizer, labels)
    (tmp_path / "a.conll").write_text("a B-X NN\nb O DT\n")
    tags = TokenClassificationData(
        source=f"conll:{tmp_path}/a.conll#2", tokenizer=TokenizerConfig(), length=12
    )
    split = tags.whole_source(f"conll:{tmp_path}/a.conll", tokenizer, tags.labels())
    assert split.examples.gold() == [["B-X", "O"]]


@pytest.mark.parametrize(
    "kind",
    [
        SequenceClassificationData,
        TokenClassificationData,
        QuestionAnsweringData,
        MultipleChoiceData,
    ],
)
def test_missing_and_empty_sources_are_refused(tmp_path, tokenizer, kind):
    (tmp_path / "a").write_text("")
    form = next(iter(kind.forms))
    config = kind(source=f"{form}:{tmp_path}/a", tokenizer=TokenizerConfig(), length=16)
    for use in (config.labels, config.texts, lambda: config.train_split(tokenizer, (), 0)):
        if not (use == config.labels and kind is MultipleChoiceData):
            with pytest.raises(DataError, match=rf"no {kind.noun} .*'{form}:.*a' .*empty"):
                use()
    with pytest.raises(DataError, match=r"predict .*a: .*empty"):
        config.input_split(f"{tmp_path}/a", tokenizer, ())


def test_nothing_to_validate_on(tmp_path, tokenizer):
    one = write(tmp_path / "a.tsv", [(0, "same"), (1, "same")])
    with pytest.raises(DataError, match="same text"):
        data(one).validation_split(tokenizer, ("0", "1"))
    assert len(data(one, validation_fraction=0).train_split(tokenizer, ("0", "1"), 0).content) == 2
    with pytest.raises(DataError, match=r"validation split.*validation_fraction"):
        data(one, validation_fraction=0).validation_split(tokenizer, ("0", "1"))
    with pytest.raises(ValueError, match=r"validation_fraction must .*1.5"):
        data(one, validation_fraction=1.5)
    with pytest.raises(ValueError, match=r"length must .*7"):
        SequenceClassificationData(source=one, tokenizer=TokenizerConfig(), length=7)


def test_the_log_counts_what_a_condition_leaves_out(tokenizer):
    tags = [{"tokens": ["a"], "tags": ["B-X"], "n": n} for n in range(4)]
    answer = {"text": "a", "answer_start": 0}
    questions = [{"context": "a b", "question": "q", "answers": [answer], "n": n} for n in range(4)]
    for kind, rows, fields in (
        (TokenClassificationData, tags, "tokens,tags"),
        (QuestionAnsweringData, questions, "context,question,answers"),
    ):
        source = Examples.of(rows, fields=f"{fields}?n>=1")
        config = kind(source=source, tokenizer=TokenizerConfig(), length=16)
        notes = config.whole_source(source, tokenizer, config.labels()).notes
        assert notes[0] == "1 record left out by the filter n>=1"


def test_a_source_is_read_once(tmp_path, tokenizer, monkeypatch):
    config = data(write(tmp_path / "a.tsv", ROWS))
    read, times = SequenceClassificationData.read, []
    monkeypatch.setattr(
        SequenceClassificationData,
        "read",
        lambda *args: times.append(args[1].source.name) or read(*args),
    )
    labels = config.labels()
    assert len(list(config.texts())) > 40
    before = config.train_split(tokenizer, labels, 0).fingerprint
    config.validation_split(tokenizer, labels)
    assert len(times) == 1
    assert config == data(config.source)
    assert data(config.source).train_split(tokenizer, labels, 0).fingerprint == before
