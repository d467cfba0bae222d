"""`flaxzoo predict` of imported models against torch: pairs in every form, and answers."""

import csv
import dataclasses
import gzip
import io
import json
import sys

import numpy as np
import pytest
import torch
import transformers
from flaxzoo import data, train
from flaxzoo.train.cli import main as cli
from flaxzoo.train.runs.load_run import open_run

pytestmark = pytest.mark.usefixtures("on_one_device")

WORDS = "the old man went down to sea and was calm who ?".split()
PAIRS = [("the old man", "went down"), ("the sea was calm", "the man went down to the sea")]


def saved(folder, model_class, **fields):
    """A BERT with random weights that spread, and its tokenizer."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, **{"max_position_embeddings": 24, **fields},
    )  # fmt: skip
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    model_class = transformers.BertForSequenceClassification
    tokenizer, model = saved(folder, model_class, num_labels=3)

    def right(*texts):
        with torch.no_grad():
            logits = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
        return torch.softmax(logits, -1).numpy()

    return folder, right


def probabilities(folder, given, log=None):
    found = train.predict(folder, given, log=log or (lambda _: None))
    return np.array([[*row["probabilities"].values()] for row in found]), found


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(rows, delimiter):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue()


NAMES = [
    ("text", "text_b"), ("text", "text_pair"), ("sentence1", "sentence2"), ("question", "context"),
    ("premise", "hypothesis"), ("query", "document"), ("question1", "question2"),
]  # fmt: skip
FORMS = {
    "lines.txt": "".join(f"{a}\t{b}\n" for a, b in PAIRS),
    "plain.tsv": "".join(f"{a}\t{b}\n" for a, b in PAIRS),
    **{f"{a}_{b}.jsonl": lines_of({"id": 1, b: two, a: one} for one, two in PAIRS)
       for a, b in NAMES},
    **{f"{a}_{b}.csv": table([("id", b, a), *((1, two, one) for one, two in PAIRS)], ",")
       for a, b in NAMES},
    **{f"{a}_{b}.tsv": table([(a, b), *PAIRS], "\t") for a, b in NAMES},
    "labeled.csv#premise,hypothesis": table([("label", "premise", "hypothesis"),
                                            *((0, *pair) for pair in PAIRS)], ","),
    "numbers.tsv#1,2,3": "".join(f"0\t{a}\t{b}\n" for a, b in PAIRS),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_read_from_every_form(classifier, tmp_path, form):
    config, tokenizer = open_run(classifier[0])
    name, mark, fields = form.partition("#")
    for suffix in ("", ".gz"):
        content, given = FORMS[form].encode(), str(tmp_path / name) + suffix
        (tmp_path / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
        kind = name.rpartition(".")[2]
        sources = [] if mark else [given]
        if kind != "txt" and name != "plain.tsv":  # its columns have no names
            sources.append(f"{kind}:{given}{mark}{fields}")
        for source in sources:
            split = config.data.input_split(source, tokenizer, config.model.labels)
            assert [example.texts for example in split.content] == PAIRS


@pytest.mark.parametrize("fields", ["1,2", "hypothesis,premise"])
def test_two_fields_that_may_be_label_and_text_are_refused(classifier, tmp_path, fields):
    config, tokenizer = open_run(classifier[0])
    (tmp_path / "a.tsv").write_text(table([("premise", "hypothesis"), *PAIRS], "\t"))
    with pytest.raises(data.DataError, match=fields):
        config.data.input_split(f"tsv:{tmp_path}/a.tsv#{fields}", tokenizer, config.model.labels)


@pytest.mark.parametrize("form", ["lines.txt", "text_text_b.jsonl", "premise_hypothesis.csv"])
def test_a_pair_is_classified_as_by_torch(classifier, tmp_path, form):
    folder, right = classifier
    (tmp_path / form).write_text(FORMS[form])
    found, rows = probabilities(folder, str(tmp_path / form))
    assert np.allclose(found, [right(*pair) for pair in PAIRS], atol=1e-5)
    assert [(row["text"], row["text_b"]) for row in rows] == PAIRS


@pytest.mark.slow
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
def test_a_text_longer_than_the_sequences_of_the_recipe_is_read_whole(head, tmp_path):
    model_class = getattr(transformers, f"BertFor{head}")
    tokenizer, model = saved(tmp_path, model_class, max_position_embeddings=200)
    text = " ".join(WORDS * 14)
    (found,) = train.predict(tmp_path, [text], log=lambda _: None)
    with torch.no_grad():
        right = torch.softmax(model(**tokenizer(text, return_tensors="pt")).logits[0], -1)
    if head == "SequenceClassification":
        assert np.allclose([*found["probabilities"].values()], right, atol=1e-5)
    else:
        assert np.allclose(found["probabilities"], right.max(-1).values[1:-1], atol=1e-5)


def test_pairs_in_python_and_on_standard_input(classifier, monkeypatch, capsys):
    folder, right = classifier
    expected = np.array([right(*pair) for pair in PAIRS])
    dicts = [dict(zip(("premise", "hypothesis"), pair, strict=True)) for pair in PAIRS]
    for given in (PAIRS, dicts):
        assert np.allclose(probabilities(folder, given)[0], expected, atol=1e-5)
    typed = io.TextIOWrapper(io.BytesIO(FORMS["lines.txt"].encode()))
    monkeypatch.setattr(sys, "stdin", typed)
    assert cli.main(["predict", str(folder), "--input", "-"]) == 0
    found = [json.loads(line)["probabilities"] for line in capsys.readouterr().out.splitlines()]
    assert np.allclose([[*row.values()] for row in found], expected, atol=1e-5)


def test_single_texts_and_fields_that_are_not_read(classifier, tmp_path):
    folder, right = classifier
    expected = np.array([right("the old man"), right(*PAIRS[1])])
    rows = [
        {"text": "the old man", "note": 3},
        dict(zip(("text", "text_b"), PAIRS[1], strict=True)),
    ]
    file = tmp_path / "in.jsonl"
    file.write_text(lines_of(rows))
    for given in (rows, str(file), f"jsonl:{file}"):
        lines = []
        assert np.allclose(probabilities(folder, given, lines.append)[0], expected, atol=1e-5)
        assert any("not read: note" in line for line in lines)
    (tmp_path / "one.csv").write_text('label,review\n1,"the old man"\n')
    assert np.allclose(probabilities(folder, str(tmp_path / "one.csv"))[0], expected[:1], atol=1e-5)
    for name, text in (
        ("in.txt", "a\tb\tc\n"),
        ("in.jsonl", '{"words": "a"}\n'),
        ("in.csv", "a\n"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(data.DataError, match=name):
            probabilities(folder, str(tmp_path / name))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(rows)`: a run of a tiny classifier on dicts of these fields."""
    work_folder = tmp_path_factory.mktemp("runs")

    def make(name, rows):
        config = train.recipe("reviews")
        tiny = dataclasses.replace(config.model, d_model=16, num_heads=2)
        given = dataclasses.replace(config.data, source=rows, validation=rows)
        whole = dataclasses.replace(config, model=tiny, data=given, epochs=0.0, steps=1)
        if not (work_folder / name).exists():
            train.train(whole, work_folder / name, quiet=True)
        return work_folder / name

    return make


@pytest.mark.slow
def test_a_run_reads_as_many_texts_as_it_was_trained_on(trained, tmp_path):
    labeled = [{"label": "ab"[i % 2], "text": f"good {i}"} for i in range(8)]
    single = trained("single", labeled)
    pairs = trained("pairs", [{**row, "text_b": "bad"} for row in labeled])
    one, two = {"text": "good"}, {"text": "good", "text_b": "bad"}
    (tmp_path / "one.jsonl").write_text(lines_of([one]))
    (tmp_path / "two.jsonl").write_text(lines_of([two]))
    (tmp_path / "one.txt").write_text("good\n")
    (tmp_path / "two.txt").write_text("good\tbad\n")
    (tmp_path / "two.csv").write_text("text,text_b\ngood,bad\n")
    for form in ("jsonl", "txt"):
        assert probabilities(single, str(tmp_path / f"one.{form}"))[1][0]["text"] == "good"
        assert probabilities(pairs, str(tmp_path / f"two.{form}"))[1][0]["text_b"] == "bad"
        for folder, file in ((single, f"two.{form}"), (pairs, f"one.{form}")):
            with pytest.raises(data.DataError, match=file):
                probabilities(folder, str(tmp_path / file))
    for given in ([two], [("good", "bad")], str(tmp_path / "two.csv")):
        assert probabilities(pairs, given)[1][0]["text_b"] == "bad"
        with pytest.raises(data.DataError):
            probabilities(single, given)
    with pytest.raises(data.DataError):
        probabilities(pairs, ["good"])


def test_the_probability_of_an_answer_is_that_of_its_start_and_end(tmp_path):
    tokenizer, model = saved(tmp_path, transformers.BertForQuestionAnswering)
    question, passage = "who was calm ?", "the old man went down to the sea and was calm"
    words, question_length = passage.split(), len(question.split())
    rows = [{"question": question, "context": passage}]
    (answer,) = train.predict(tmp_path, rows, log=lambda _: None)
    with torch.no_grad():
        outputs = model(**tokenizer(question, passage, return_tensors="pt"))
    first = question_length + 2
    seen = [0, *range(first, first + len(words))]
    start, end = (torch.log_softmax(x[0, seen], -1) for x in (outputs[0], outputs[1]))
    best = {}
    for i in range(len(words)):
        for j in range(i, len(words)):
            score = (outputs[0][0, first + i] + outputs[1][0, first + j]).item()
            text = " ".join(words[i : j + 1])
            found = (score, torch.exp(start[i + 1] + end[j + 1]).item())
            best[text] = max(found, best.get(text, (-np.inf, 0)))
    expected = sorted(best.items(), key=lambda item: -item[1][0])[:5]
    assert [one["answer"] for one in answer["n_best"]] == [text for text, _ in expected]
    found = [(one["score"], one["probability"]) for one in answer["n_best"]]
    assert np.allclose(found, [values for _, values in expected], atol=1e-5)
