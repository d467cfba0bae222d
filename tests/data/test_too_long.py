"""What happens to an example that is longer than a sequence: the rows of the data guide's table."""

import re
from pathlib import Path

import numpy as np
import pytest
from flaxzoo import data

LETTERS = data.TokenizerConfig(kind="characters")
GUIDE = Path(__file__).parents[2] / "docs" / "explain" / "long-examples.md"


def split_of(kind, rows, **fields):
    """The split to train on, of characters, and its tokenizer."""
    fields = {"length": 12, "tokenizer": LETTERS, "validation_fraction": 0.0, **fields}
    config = kind(source=data.Examples.of(rows), **fields)
    tokenizer = config.make_tokenizer()
    return config.train_split(tokenizer, config.labels(), 0), tokenizer


def test_answers_are_never_cut():
    rows = [{"prompt": "a" * n, "completion": "b" * 4} for n in (1, 8, 9, 20)]
    split, tokenizer = split_of(data.SupervisedData, rows, packing="none")
    assert split.notes == ("2 of 4 demonstrations left out: longer than data.length 12",)
    for index, given in enumerate(rows[:2]):
        row = split.examples.example(0, index)
        learned = row["labels"][row["loss_mask"] == 1].tolist()
        assert tokenizer.decode(learned[:-1]) == given["completion"]
        assert learned[-1] == tokenizer.special_ids.eos


@pytest.mark.parametrize(
    ("kind", "read"),
    [(data.DPOData, 13), (data.RewardData, 12)],
)
def test_pairs_of_answers_are_never_cut(kind, read):
    most = read - 2  # without the prompt and the end
    sizes = [(1, 1), (most - 1, 2), (2, most), (2, most + 1), (40, 1), (1, 40), (40, 40)]
    rows = [{"prompt": "a", "chosen": "b" * a, "rejected": "c" * b} for a, b in sizes]
    split, _ = split_of(kind, rows)
    assert split.notes == ("4 of 7 pairs left out: longer than data.length 12",)
    masks = [split.examples.example(0, i)["attention_mask"].sum(-1).tolist() for i in range(3)]
    first = 3 if kind is data.RewardData else 2
    assert masks == [[first, first], [11, first + 1], [first + 1, 12]]


def test_prompts_are_never_cut():
    rows = [{"prompt": "a" * n} for n in (1, 8, 9, 30)]
    split, _ = split_of(data.PolicyData, rows)
    assert split.examples.num_examples == 1
    assert split.notes[0].startswith("3 of 4 prompts left out: longer than the 6 tokens of")


@pytest.mark.parametrize("kind", [data.TranslationData, data.TextToTextData])
def test_sentence_pairs_are_never_cut(kind):
    split, tokenizer = split_of(kind, [("ab", "cd"), ("a" * 12, "b"), ("a", "b" * 30)])
    assert "2 of 3 pairs left out: longer than data.length 12" in split.summary
    row = split.examples.example(0, 0)
    assert tokenizer.decode(row["labels"][:2].tolist()) == "cd"
    whole = [("ab", "cd"), ("a" * 12, "b")]
    config = kind(source=data.Examples.of(whole), length=12, tokenizer=LETTERS)
    evaluated = config.whole_source(config.source, tokenizer, ())
    assert "1 of 2 pairs left out of the loss: longer than" in evaluated.summary
    assert len(evaluated.content.sources) == 2


def test_texts_and_choices_are_truncated(tokenizer):
    texts = [{"label": "ab"[i % 2], "text": "abc " * (1 + i)} for i in range(6)]
    config = data.SequenceClassificationData(source=texts, length=12, tokenizer=LETTERS)
    split = config.whole_source(config.source, tokenizer, ("a", "b"))
    assert "3 of 6 examples truncated: longer than data.length 12" in split.summary
    assert split.examples.num_examples == 6
    choices = [{"label": 0, "context": "abc", "choices": ["a", "b" * n]} for n in (2, 9)]
    config = data.MultipleChoiceData(source=choices, length=12, tokenizer=LETTERS)
    split = config.whole_source(config.source, tokenizer, ())
    assert "1 of 4 choices truncated: longer than data.length 12" in split.summary


def test_words_with_tags_are_divided(tokenizer):
    rows = [{"tokens": ["ab", "cd" * 8, "ef", "ghijklm"], "tags": ["O", "B-X", "O", "O"]}]
    config = data.TokenClassificationData(source=rows, length=12, tokenizer=LETTERS)
    split = config.whole_source(config.source, tokenizer, ("B-X", "O"))
    assert "4 words, 3 rows of 12 tokens, 1 of 4 words truncated: longer than" in split.summary


def test_questions_whose_answer_is_in_no_window_are_left_out(tokenizer):
    passage = "ab cd ef gh ij kl mn op"
    rows = [
        {"context": passage, "question": question, "id": question,
         "answers": {"text": [text], "answer_start": [passage.index(text)]}}
        for question, text in (("q", "kl"), ("r", passage), ("what", "ab"))
    ]  # fmt: skip
    fields = {"length": 12, "stride": 2, "max_question_length": 2, "validation_fraction": 0.0}
    config = data.QuestionAnsweringData(source=rows, tokenizer=LETTERS, **fields)
    split = config.train_split(tokenizer, (), 0)
    assert "1 of 3 questions truncated: longer than 2 tokens" in split.summary
    assert (
        "1 of 3 questions left out: an answer that does not fit in any window (r)" in split.summary
    )
    assert [gold["id"] for gold in split.examples.gold()] == ["q", "what"]


@pytest.mark.parametrize("kind", [data.CausalLMData, data.SpanCorruptionData, data.DenoisingData])
def test_plain_text_is_divided_and_nothing_is_lost(kind):
    text = "".join(chr(0x4E00 + i) for i in range(60))
    fields = {"length": 12, "tokenizer": LETTERS, "validation_fraction": 0.0}
    config = kind(source=data.Examples.of([text]), **fields)
    tokenizer = config.make_tokenizer()
    examples = config.whole_source(config.source, tokenizer, ()).examples
    rows = [examples.example(0, i) for i in range(examples.num_examples)]
    names = ("labels",) if kind is data.CausalLMData else ("labels", "input_ids")
    seen = np.concatenate([row[name] for row in rows for name in names])
    known = {*tokenizer.encode(text, add_special_tokens=False)}
    if kind is data.CausalLMData:  # the first token follows the token that begins a text
        assert known <= {*seen.tolist()}
    else:
        assert known == {*seen.tolist()} & known


def test_the_guide_has_a_row_for_each_kind_of_data():
    table = GUIDE.read_text().partition("## By kind of data")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| \w", table, re.MULTILINE)) == 13
