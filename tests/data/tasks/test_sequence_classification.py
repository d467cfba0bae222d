import numpy as np
import pytest
from flaxzoo.data import (
    DataError,
    TokenizerConfig,
    evaluation_batches,
    load_tokenizer,
)
from flaxzoo.data.tasks.sequence_classification import SequenceClassificationData


@pytest.fixture
def config(data_of_file):
    """`config(text, part, **fields)`: data of a file of these lines."""

    def make(text, part="", **fields):
        fields = {"length": 10, **fields}
        return data_of_file(SequenceClassificationData, f"tsv:a.tsv{part}", text, **fields)

    return make


def test_rows(config, train, tokenizer):
    split = train(config("yes\ta b\nno\tc d e f g h i j k\n"), tokenizer)
    row = split.examples.example(0, 0)
    assert row["input_ids"].tolist() == [2, 5, 6, 3, 0, 0, 0, 0, 0, 0]
    assert row["attention_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert not row["token_type_ids"].any()
    assert (row["labels"], row["labels"].dtype, row["labels"].shape) == (1, np.int32, ())
    assert split.examples.example(3, 1)["input_ids"].tolist() == [2, *range(7, 15), 3]
    assert split.examples.gold() == [1, 0]  # the labels in order of their names
    assert split.summary == "2 examples, 1 of 2 examples truncated: longer than data.length 10"


def test_the_longer_text_of_a_pair_is_truncated(config, train, tokenizer):
    split = train(config("0\ta b c d e f\tx y\n1\ta b c d e f\tu v w x y z\n", "#1,2,3"), tokenizer)
    row = split.examples.example(0, 0)
    assert tokenizer.decode(row["input_ids"], False) == "[CLS] a b c d e [SEP] x y [SEP]"
    assert row["token_type_ids"].tolist() == [0] * 7 + [1] * 3
    row = split.examples.example(0, 1)
    assert tokenizer.decode(row["input_ids"], False) == "[CLS] a b c [SEP] u v w x [SEP]"


def test_empty_texts_are_counted(config, train, tokenizer):
    split = train(config("0\ta\n1\t\n1\t \n"), tokenizer)
    assert split.summary == "3 examples, 2 of them without a text"
    assert split.examples == split.examples  # arrays are not compared


@pytest.mark.parametrize(
    ("column", "labels"),
    [
        (["10", "2", "-1"], ("-1", "2", "10")),
        (["b", "a", "10"], ("10", "a", "b")),
        (["1.5", "1"], ("1", "1.5")),
        (["1", "01", "0"], ("0", "01", "1")),
    ],
)
def test_order_of_labels(config, column, labels):
    text = "".join(f"{label}\ttext {i}\n" for i, label in enumerate(column))
    assert config(text).labels() == labels
    assert config(text, validation_fraction=0.4).labels() == labels  # of those held out, too


def test_decode(config, train, tokenizer):
    rows = train(config("no\ta\nyes\tb\n"), tokenizer).examples
    first, second = rows.decode({"logits": np.array([[0.0, np.log(3)], [1000, -1000]])})
    assert (first["text"], first["label"]) == ("a", "yes")
    assert first["probabilities"] == pytest.approx({"no": 0.25, "yes": 0.75})
    assert second == {"text": "b", "label": "no", "probabilities": {"no": 1.0, "yes": 0.0}}
    with pytest.raises(ValueError, match=r"logits .*1 rows.* 2"):
        rows.decode({"logits": np.zeros((1, 2))})


def test_several_labels(config, train, tokenizer):
    data = config("red,big\ta\n\tb\nbig\tc\n", target="multi_label")
    assert data.labels() == ("big", "red")
    rows = train(data, tokenizer).examples
    assert rows.example(0, 0)["labels"].tolist() == [1, 1]
    assert rows.example(0, 1)["labels"].dtype == np.float32
    assert rows.gold() == [[1, 1], [0, 0], [1, 0]]
    logits = np.array([[0.1, np.log(3)], [-1, 0], [800, -800]])
    decoded = rows.decode({"logits": logits})
    assert [one["labels"] for one in decoded] == [["big", "red"], [], ["big"]]
    assert decoded[0]["probabilities"]["red"] == pytest.approx(0.75)


def test_a_binary_target_is_one_logit(config, train, tokenizer):
    data = config("no\ta\nyes\tb\nno\tc\n", target="binary")
    assert data.labels() == ("yes",)
    split = train(data, tokenizer)
    rows = split.examples
    assert rows.gold() == [[0], [1], [0]]
    assert (rows.example(0, 1)["labels"].tolist(), rows.values.dtype) == ([1.0], np.float32)
    assert split.notes == ("labels: yes (1), no (2)",)
    z = np.array([[-2.0], [np.log(3)], [800.0]])
    decoded = rows.decode({"logits": z})
    assert [one["label"] for one in decoded] == ["not yes", "yes", "yes"]
    assert decoded[1]["probabilities"] == {"yes": pytest.approx(0.75)}
    two = train(config("no\ta\nyes\tb\nno\tc\n"), tokenizer).examples
    softmax = two.decode({"logits": np.concatenate([0 * z, z], axis=1)})
    for one, other in zip(decoded, softmax, strict=True):
        assert one["probabilities"]["yes"] == pytest.approx(other["probabilities"]["yes"])
    assert data.assumed_labels() == ("b",)
    assert data.batch_spec(1, 1)["labels"].shape == (1,)
    with pytest.raises(DataError, match=r"2 labels .*binary.* a, b, c"):
        config("a\tx\nb\ty\nc\tz\n", target="binary").labels()


def test_scores(config, train, tokenizer):
    data = config("2.5\ta\n-1\tb\n", target="regression")
    assert data.labels() == ("score",)
    rows = train(data, tokenizer).examples
    label = rows.example(0, 0)["labels"]
    assert (label, label.shape, label.dtype) == (2.5, (), np.float32)
    assert rows.gold() == [2.5, -1]
    assert rows.decode({"logits": np.array([[1.0], [2.0]])}) == [
        {"text": "a", "score": 1.0},
        {"text": "b", "score": 2.0},
    ]


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("0\ta\n\tb\n1\tc\n", {}, "a.tsv line 2 .*no label: .*empty"),
        ("0\ta\n0\tb\n", {}, "2 labels.*got 0"),
        ("1\ta\nhigh\tb\n", {"target": "regression"}, "line 2 .*score 'high'"),
        ("nan\ta\n", {"target": "regression"}, "line 1 .*score 'nan'"),
        ("".join(f"a sentence {i}\t{i % 2}\n" for i in range(30)), {}, "30 examples "),
        ("\ta\n", {"target": "multi_label"}, "1 labels.*got none"),
    ],
)
def test_bad_labels(config, train, tokenizer, text, fields, message):
    with pytest.raises(DataError, match=message):
        train(config(text, **fields), tokenizer)


@pytest.mark.parametrize(
    ("label", "fields", "message"),
    [
        ("null", {"target": "multi_label"}, "line 2 .*label None"),
        ('["a", null]', {"target": "multi_label"}, "line 2 .*label None"),
        ("1.0", {}, "line 2 .*label 1.0: .*target regression"),
    ],
)
def test_bad_json_labels(tmp_path, tokenizer, label, fields, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"label": 1, "text": "a"}\n{"label": ' + label + ', "text": "b"}\n')
    data = SequenceClassificationData(source=f"jsonl:{path}", tokenizer=TokenizerConfig(), **fields)
    with pytest.raises(DataError, match=message):
        data.labels()


def test_json_labels(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"label": 3, "text": "a"}\n{"label": true, "text": "b"}\n')
    for target in ("single_label", "multi_label"):
        data = SequenceClassificationData(
            source=f"jsonl:{path}", tokenizer=TokenizerConfig(), target=target
        )
        assert data.labels() == ("3", "true")


def test_unknown_label_in_validation(config, tokenizer, tmp_path):
    data = config("0\ta\n1\tb\n")
    (tmp_path / "v.tsv").write_text("0\tx\n2\ty\n")
    with pytest.raises(DataError, match=r"v\.tsv line 2.*label '2'"):
        data.whole_source(f"tsv:{tmp_path}/v.tsv", tokenizer, data.labels())


def test_bad_fields(config, train, tokenizer):
    for part in ("#1", "#1,2,1,2"):
        with pytest.raises(DataError, match=r"\d fields.*label,text"):
            train(config("0\ta\n", part), tokenizer)


def test_input(config, tokenizer, tmp_path):
    data = config("0\ta\tx\n1\tb\ty\n", "#1,2,3")
    (tmp_path / "in.txt").write_text("a b\tf\nc\td e\n")
    split = data.input_split(f"{tmp_path}/in.txt", tokenizer, ("0", "1"))
    assert split.summary == "2 examples"
    assert set(split.examples.example(0, 0)) == {"input_ids", "attention_mask", "token_type_ids"}
    assert split.examples.example(0, 1)["token_type_ids"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    (batch,) = evaluation_batches(split.examples, batch_size=4)
    assert batch["attention_mask"][:, 0].tolist() == [1, 1, 0, 0]
    _, second = split.examples.decode({"logits": np.zeros((2, 2))})
    assert (second["text"], second["text_b"]) == ("c", "d e")
    with pytest.raises(ValueError, match="no labels"):
        split.examples.gold()


def test_input_has_as_many_texts_as_the_run(config, tokenizer, tmp_path):
    (tmp_path / "in").write_text("a\n\nb\n")
    texts = [e.texts for e in config("0\ta\n").examples_to_predict(f"{tmp_path}/in", set())]
    assert texts == [("a",), ("",), ("b",)]  # a prediction for each line
    with pytest.raises(DataError, match=r"in line 1 .*1 text\b.* 2\b"):
        config("0\ta\tx\n", "#1,2,3").examples_to_predict(f"{tmp_path}/in", set())
    (tmp_path / "in").write_text("a\n1\tb\n")
    with pytest.raises(DataError, match=r"in line 2 .*2 .* 1: .*tsv:.*in#LABEL"):
        config("0\ta\n").examples_to_predict(f"{tmp_path}/in", set())


def test_input_of_labelled_files(config, tokenizer, tmp_path):
    (tmp_path / "in.tsv").write_text("?\tb\n\tc\n")
    (tmp_path / "in.jsonl").write_text('{"text": "b"}\n\n{"text": "c", "label": []}\n')
    data = config("0\ta\n1\tb\n", target="regression")
    for path in (f"tsv:{tmp_path}/in.tsv", f"{tmp_path}/in.jsonl", f"jsonl:{tmp_path}/in.jsonl"):
        rows = data.input_split(path, tokenizer, data.labels()).examples
        assert [p["text"] for p in rows.decode({"logits": np.zeros((2, 1))})] == ["b", "c"]
    (tmp_path / "in.csv").write_text("text,label\nb,?\nc,\n")
    for name in ("#text", "#label,text", ""):  # the label's column may be left out
        rows = data.input_split(f"csv:{tmp_path}/in.csv{name}", tokenizer, data.labels()).examples
        assert [p["text"] for p in rows.decode({"logits": np.zeros((2, 1))})] == ["b", "c"]
    with pytest.raises(DataError, match=r"3 fields .* 2"):
        data.input_split(f"csv:{tmp_path}/in.csv#label,text,text", tokenizer, data.labels())
    rows = data.input_split(f"{tmp_path}/in.csv", tokenizer, data.labels()).examples
    assert [e.texts for e in rows.examples] == [("b",), ("c",)]
    (tmp_path / "in.csv").write_text("b,?\nc,\n")
    with pytest.raises(DataError, match=r"in.csv .*table.* csv:.*in.csv#1"):
        data.input_split(f"{tmp_path}/in.csv", tokenizer, data.labels())
    named = config("text\tlabel\na\t0\n", "#label,text")
    assert named.examples_to_predict(f"{tmp_path}/in.jsonl", set())[1].text == "c"
    (tmp_path / "in.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(DataError, match=r"in.jsonl line 1 .* int "):
        data.input_split(f"{tmp_path}/in.jsonl", tokenizer, data.labels())


@pytest.mark.slow
def test_real_files(datasets):
    vocabulary = load_tokenizer(datasets / "tok/bert_base_uncased_vocab.txt")

    def load(source, validation, **fields):
        config = SequenceClassificationData(
            source=f"tsv:{datasets}/cls/{source}",
            validation=f"tsv:{datasets}/cls/{validation}",
            tokenizer=TokenizerConfig(),
            length=64,
            **fields,
        )
        labels = config.labels()
        splits = (
            config.train_split(vocabulary, labels, 0),
            config.validation_split(vocabulary, labels),
        )
        return labels, [np.array(split.examples.gold()) for split in splits], splits

    labels, (train, validation), splits = load("sst2.train.tsv.gz", "sst2.dev.tsv.gz")
    assert (labels, len(train), train.sum()) == (("0", "1"), 6920, 3610)
    assert (len(validation), validation.sum()) == (872, 444)
    first = splits[0].examples.example(0, 0)["input_ids"]
    assert vocabulary.decode(first).startswith("a stirring, funny and finally transporting")
    labels, (train, validation), _ = load("cola.train.tsv#2,4", "cola.dev.tsv#2,4")
    assert (len(train), len(validation)) == (8551, 527)
    with pytest.raises(DataError, match=r"cola.train.tsv line 1 .*4 columns"):
        load("cola.train.tsv", "cola.dev.tsv")
    labels, (train, validation), _ = load("cola.train.tsv#2,4", "cola.dev.tsv")  # the same columns
    assert (labels, len(validation), validation.sum()) == (("0", "1"), 527, 365)
    labels, (train, validation), _ = load("agnews.train.tsv.gz", "agnews.valid.tsv.gz")
    assert (labels, len(train), len(validation)) == (("1", "2", "3", "4"), 9000, 980)
