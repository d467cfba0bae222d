"""Rewards of texts, by name and of the user's own."""

import math

import numpy as np
import pytest
from flaxzoo.data import UserError
from flaxzoo.data.chat.policy import Prompt
from flaxzoo.data.chat.records import PromptedText
from flaxzoo.train import GRPOConfig
from flaxzoo.train.rewards.functions import named_reward, rewards_of

CASES = {
    "exact_match": (["12", " 12\n", "13", "12."], [1, 1, 0, 0]),
    "arithmetic": (["12", "7 + 5 = 12.0", "3,12", "no"], [1, 1, 1, 0]),
    r"format:\d+": (["12", "", "1a", "3"], [1, 0, 0, 1]),
    "length:4": (["", "ab", "abcd", "a" * 9], [0, 0.5, 1, 0]),
    "contains:cat": (["a cat", "cats", "concat", "cat."], [1, 0, 0, 1]),
}


def prompt_of(text, **fields):
    return Prompt(PromptedText(text, ""), text, (), fields)


@pytest.mark.parametrize("name", CASES)
def test_built_in_rewards(name):
    completions, expected = CASES[name]
    reward = named_reward(name)
    assert reward(completions=completions, answer=["12"] * 4, other=None) == expected


def test_an_own_reward_gets_the_arguments_that_it_takes_and_none_is_no_reward():
    def long(prompts, completions):
        return [
            None if prompt == "?" else len(text)
            for prompt, text in zip(prompts, completions, strict=False)
        ]

    settings = GRPOConfig(rewards=("exact_match",), reward_weights=(1.0, 0.5))
    rewards = rewards_of(settings, [long], open_model=named_reward)
    assert list(rewards.functions) == ["exact_match", "long"]
    assert rewards.weights == (1.0, 0.5)
    prompts = [prompt_of("a", answer="x"), prompt_of("?", answer=None)]
    found = rewards(prompts, ["x", "y"])
    np.testing.assert_array_equal(found, np.asarray([[1, 1], [math.nan, math.nan]], np.float32))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "'exact'.*exact_match"),
        ("format:(", r"format:\( must"),
        ("length:no", "length:no must"),
        ("contains:", "contains: must"),
    ],
)
def test_a_wrong_name_is_one_line(name, message):
    with pytest.raises(UserError, match=message):
        rewards_of(GRPOConfig(rewards=(name,)), open_model=named_reward)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions: 1.0, "<lambda> .* 2 values.* got 1.0"),
        (lambda completions: [1.0], r"<lambda> .* 2 values.* got \[1.0\]"),
        (lambda completions: [1.0, math.inf], "<lambda> returned inf"),
        (lambda completions, gold: [0, 0], "<lambda> .*field gold"),
    ],
)
def test_a_wrong_reward_is_one_line(reward, message):
    rewards = rewards_of(GRPOConfig(), [reward], open_model=named_reward)
    with pytest.raises(UserError, match=message):
        rewards([prompt_of("a"), prompt_of("b")], ["x", "y"])


def test_a_run_needs_a_reward_and_a_weight_for_each():
    with pytest.raises(UserError, match=r"objective\.rewards"):
        rewards_of(GRPOConfig(), open_model=named_reward)
    with pytest.raises(UserError, match=r"reward_weights .*2 numbers .*1"):
        rewards_of(
            GRPOConfig(rewards=("exact_match",), reward_weights=(1.0, 2.0)),
            open_model=named_reward,
        )


def test_reward_models_are_asked_first_and_keep_their_column(tmp_path):
    """All processes compute in them together, before a function may fail in one."""
    asked_in_order = []

    def model(completions):
        asked_in_order.append("model")
        return [2.0] * len(completions)

    def own(completions):
        asked_in_order.append("own")
        return [1.0] * len(completions)

    (tmp_path / "judge").mkdir()
    settings = GRPOConfig(rewards=("length:1", str(tmp_path / "judge")))
    rewards = rewards_of(settings, [own], open_model=lambda name: model)
    np.testing.assert_array_equal(rewards([prompt_of("a")], ["x"]), [[1.0, 2.0, 1.0]])
    assert asked_in_order == ["model", "own"]
