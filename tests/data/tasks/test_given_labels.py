import json

import pytest
from flaxzoo import data
from flaxzoo.data import DataError, TokenizerConfig

WORDS = TokenizerConfig("wordpiece", vocab_size=30)


def classified(path, **fields):
    return data.SequenceClassificationData(source=f"tsv:{path}", tokenizer=WORDS, **fields)


def test_numbers_get_names_in_the_order_of_the_numbers(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("1\tgood film\n0\tbad film\n1\tfine\n0\tpoor\n")
    config = classified(path, label_names=("negative", "positive"))
    assert config.labels() == ("negative", "positive")
    split = config.whole_source(config.source, config.make_tokenizer(), config.labels())
    assert [example.label for example in split.content] == ["positive", "negative"] * 2
    assert split.examples.example(0, 0)["labels"] == 1
    # The files of an evaluation may have the names.
    path.write_text("positive\tgood film\n0\tbad film\n")
    again = classified(path, label_names=("negative", "positive"))
    assert [example.label for example in again._whole().examples] == ["positive", "negative"]


def test_several_labels_have_names(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("0,2\tone\n1\ttwo\n\tthree\n")
    config = classified(path, target="multi_label", label_names=("x", "y", "z"))
    assert [example.label for example in config._whole().examples] == [("x", "z"), ("y",), ()]


@pytest.mark.parametrize("form", ["jsonl", "conll"])
def test_tags_have_names(tmp_path, form):
    path, names = tmp_path / "a", ("O", "B-PER", "I-PER")
    rows = [{"tokens": ["Ada", "Byron", "wrote"], "tags": [1, 2, 0]}] * 2
    lines = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "conll": "Ada 1\nByron 2\nwrote 0\n\n" * 2,
    }
    path.write_text(lines[form])
    config = data.TokenClassificationData(
        source=f"{form}:{path}", label_names=names, tokenizer=WORDS
    )
    assert config._whole().examples[0].tags == ("B-PER", "I-PER", "O")
    assert config.labels() == names


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (
            "2\ta\n",
            {"label_names": ("x", "y")},
            "line 1 .*label '2', .* 0 to 1",
        ),
        ("0,1\ta\n", {"label_names": ("x", "y")}, "label '0,1'"),
        ("0\ta\n", {"label_names": ("x",)}, "different names, .*got 'x'"),
        ("0\ta\n", {"label_names": ("x", "x")}, "different names, .*got 'x, x'"),
        ("0\ta\n", {"label_names": ("x", "y"), "target": "regression"}, "target regression"),
    ],
)
def test_faulty_names_are_refused(tmp_path, content, fields, message):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        classified(tmp_path / "a.tsv", **fields).labels()
    assert "\n" not in str(caught.value)
