"""Prompts for reinforcement learning."""

import numpy as np
import pytest
from flaxzoo import data
from flaxzoo.data.sources.builtin.toys import Toy

CHARACTERS = data.TokenizerConfig(kind="characters")


def prompts(source="builtin:sums", length=12, answer_length=4):
    config = data.PolicyData(source=source, length=length, tokenizer=CHARACTERS)
    return config.with_answer_length(answer_length)


def test_a_prompt_is_padded_on_the_left_and_found_again():
    config = prompts()
    tokenizer = config.make_tokenizer()
    split = config.train_split(tokenizer, (), seed=1)
    example = split.examples.example(2, 5)
    assert {name: x.shape for name, x in example.items()} == {
        name: spec.shape for name, spec in config.batch_spec(0, 0).items()
    }
    prompt = split.examples.prompts.prompt(int(example["epoch"]), int(example["index"]))
    a, b = prompt.text[:-1].split("+")
    assert prompt.fields == {"answer": str(int(a) + int(b))}
    number = int(example["prompt_mask"].sum())
    assert example["prompt_mask"].tolist() == [0] * (8 - number) + [1] * number
    expected = tokenizer.encode(prompt.text)
    assert example["prompt_ids"][-number:].tolist() == expected
    other = config.train_split(tokenizer, (), seed=2).examples.example(2, 5)
    assert not np.array_equal(other["prompt_ids"], example["prompt_ids"])


CONVERSATION = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "you"}
RECORDS = {
    "text": {"prompt": "hi", "answer": "4"},
    "document": {"text": "hi"},
    "completion": {"prompt": "hi", "completion": "you"},
    "messages": {"prompt": CONVERSATION, "answer": "4"},
    "conversation": {"messages": [*CONVERSATION, ANSWER]},
    "preference": {"chosen": [*CONVERSATION, ANSWER], "rejected": [*CONVERSATION, ANSWER]},
    "alpaca": {"instruction": "hi", "output": "you"},
    "dialogue": {
        "chosen": "\n\nHuman: hi\n\nAssistant: you",
        "rejected": "\n\nHuman: hi\n\nAssistant: not",
    },
}


@pytest.mark.parametrize("form", RECORDS)
def test_prompts_of_all_forms(form):
    record = RECORDS[form]
    config = prompts(data.Examples.of([record]), length=32)
    tokenizer = data.train_tokenizer(["user: hi bot: you \n\n"], CHARACTERS)
    split = config.whole_source(config.source, tokenizer, ())
    prompt = split.examples.prompts.prompt(0, 0)
    if form in ("text", "document", "completion"):
        assert prompt.text == "hi"
    else:
        encoded = data.encode_chat(tokenizer, CONVERSATION, add_generation_prompt=True)
        assert (prompt.text, prompt.ids) == (encoded.text, tuple(encoded.ids))
        assert prompt.fields["messages"] == CONVERSATION
    assert prompt.fields.get("answer") == record.get("answer")


def test_validation_asks_every_sum_once():
    config = prompts()
    split = config.validation_split(config.make_tokenizer(), ())
    texts = {split.examples.prompts.prompt(0, i).text for i in range(split.examples.num_examples)}
    assert len(texts) == split.examples.num_examples == 100
    assert "3+4=" in texts


def test_no_training_text_of_words_begins_like_a_held_out_prompt():
    toy = Toy.parse("builtin:words")
    held_out = {text.prompt for text in toy.validation_texts()}
    drawn = {toy.training_text(0, 0, i).prompt for i in range(2000)}
    begun = {" ".join(text.split()[:2]) for text in toy.documents()}
    assert 10 < len(held_out) < 50
    assert not held_out & (drawn | begun)
    assert Toy.parse("builtin:patterns") is None


def test_half_of_the_sums_are_wrong():
    right = [a.partition("=") for a in Toy.parse("builtin:sums").documents()]
    share = np.mean([sum(map(int, query.split("+"))) == int(answer) for query, _, answer in right])
    assert 0.5 < share < 0.56  # a random number is right at times


def test_a_prompt_that_is_too_long_is_refused():
    config = prompts("builtin:words", length=10, answer_length=5)
    with pytest.raises(data.DataError, match=r"5 tokens.*max_new_tokens"):
        config.validation_split(config.make_tokenizer(), ())
