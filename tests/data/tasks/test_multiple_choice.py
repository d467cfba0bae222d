import json

import numpy as np
import pytest
from flaxzoo.data import DataError, TokenizerConfig, evaluation_batches
from flaxzoo.data.tasks.multiple_choice import MultipleChoiceData


@pytest.fixture
def config(data_of_file):
    """`config(rows, part)`: data of a file of these JSON objects."""

    def make(rows, part="", **fields):
        text = "\n".join(map(json.dumps, rows)) + "\n"
        fields = {"length": 8, **fields}
        return data_of_file(MultipleChoiceData, f"jsonl:a.jsonl{part}", text, **fields)

    return make


ROWS = [
    {"label": 1, "context": "a b", "question": "q ?", "choices": ["x", "y z", "w"]},
    {"label": "0", "context": "c d e f g", "question": "r", "choices": ["u", "v", "w"]},
]


def texts(tokenizer, rows, index):
    return [tokenizer.decode(ids, False) for ids in rows.example(0, index)["input_ids"]]


def test_rows(config, tokenizer):
    split = config(ROWS).train_split(tokenizer, (), 0)
    row = split.examples.example(0, 0)
    assert row["input_ids"].shape == (3, 8)
    assert texts(tokenizer, split.examples, 0)[1] == "[CLS] a b [SEP] y z [SEP] [PAD]"
    assert row["token_type_ids"][1].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert row["attention_mask"].sum(1).tolist() == [6, 7, 6]
    assert (row["labels"], row["labels"].shape, row["labels"].dtype) == (1, (), np.int32)
    assert texts(tokenizer, split.examples, 1)[0] == "[CLS] c d e f [SEP] u [SEP]"
    assert split.examples.gold() == [1, 0]
    assert split.summary == (
        "2 examples, 3 choices each, 3 of 6 choices truncated: longer than data.length 8"
    )
    (batch,) = evaluation_batches(split.examples, batch_size=4)
    assert batch["input_ids"].shape == (4, 3, 8)
    assert batch["attention_mask"][:, :, 0].tolist() == [[1] * 3] * 2 + [[0] * 3] * 2


def test_the_question_precedes_each_choice(config, tokenizer):
    data = config(ROWS, "#label,context,question,choices", length=12)
    rows = data.train_split(tokenizer, (), 0).examples
    assert texts(tokenizer, rows, 0)[0].startswith("[CLS] a b [SEP] q? x [SEP] [PAD]")
    assert data.labels() == ()
    assert list(data.texts())[:3] == ["a b", "q ?", "x"]


def test_choices_in_fields_of_their_own(config, tokenizer, tmp_path):
    rows = [{"label": 1, "goal": "a", "one": "x", "two": "y"}]
    split = config(rows, "#label,goal,one+two").train_split(tokenizer, (), 0)
    assert split.content[0].choices == ("x", "y")
    (tmp_path / "a.tsv").write_text("1\ta\tx\ty\n")
    data = MultipleChoiceData(
        source=f"tsv:{tmp_path}/a.tsv#1,2,3+4", tokenizer=TokenizerConfig(), length=8
    )
    assert data.whole_source(data.source, tokenizer, ()).content[0].choices == ("x", "y")


def test_decode(config, tokenizer):
    rows = config(ROWS).train_split(tokenizer, (), 0).examples
    first, second = rows.decode({"logits": np.log([[1, 2, 1], [5, 1, 4.0]])})
    assert (first["choice"], first["text"], first["context"]) == (1, "y z", "a b")
    assert first["probabilities"] == pytest.approx([0.25, 0.5, 0.25])
    assert second["choice"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": ["x", "y"]}, "line 2 .*2 choices, .* line 1 has 3: "),
        ({"choices": ["x"]}, "line 2 .*1 choices"),
        ({"choices": "xyz"}, "line 2 .*context .*list"),
        ({"choices": ["x", 1, 2]}, "line 2 .*context .*list"),
        ({"label": 3}, "line 2 .*label 3: .*0 to 2"),
        ({"label": -1}, "line 2 .*label -1"),
        ({"label": "B"}, "line 2 .*label 'B'"),
        ({"label": None}, "line 2 .*label None"),
    ],
)
def test_bad_examples(config, tokenizer, change, message):
    with pytest.raises(DataError, match=message):
        config([ROWS[0], {**ROWS[1], **change}]).train_split(tokenizer, (), 0)


def test_bad_fields(config, tokenizer):
    with pytest.raises(DataError, match=r"2 fields.*label,context"):
        config(ROWS, "#label,context").train_split(tokenizer, (), 0)


def test_input(config, tokenizer, tmp_path):
    unlabelled = [{"context": "a", "choices": ["x", "y"]}, {"context": "b", "choices": ["z", "w"]}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, unlabelled)))
    split = config(ROWS).input_split(f"{tmp_path}/in.jsonl", tokenizer, ())
    assert set(split.examples.example(0, 0)) == {"input_ids", "attention_mask", "token_type_ids"}
    assert [p["choice"] for p in split.examples.decode({"logits": np.eye(2)})] == [0, 1]
    with pytest.raises(ValueError, match="no labels"):
        split.examples.gold()
    (tmp_path / "own.jsonl").write_text('{"goal": "a", "one": "x", "two": "y"}\n')
    rows = [{"label": 1, "goal": "a", "one": "x", "two": "y"}]
    data = config(rows, "#label,goal,one+two")
    for path in (f"{tmp_path}/own.jsonl", f"jsonl:{tmp_path}/own.jsonl"):
        (example,) = data.input_split(path, tokenizer, ()).content
        assert (example.choices, example.label) == (("x", "y"), None)
    data = config(ROWS, "#label,context,question,choices")
    split = data.input_split(data.source, tokenizer, ())
    assert split.examples.decode({"logits": np.eye(2, 3)})[0]["question"] == "q ?"
    (tmp_path / "in.jsonl").write_text('{"context": "a"}')
    with pytest.raises(DataError, match=r"in.jsonl line 1 .*'choices'"):
        config(ROWS).input_split(f"{tmp_path}/in.jsonl", tokenizer, ())
