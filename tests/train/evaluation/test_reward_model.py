"""A reward model as a reward."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.chat.policy import PromptRecord
from flaxzoo.data.chat.records import Dialogue, PromptedText
from flaxzoo.data.common.errors import RunError
from flaxzoo.train.evaluation import reward_model
from flaxzoo.train.evaluation.reward_model import RewardModel
from flaxzoo.train.rewards.functions import rewards_of

SIZES = {"max_length": 48, "num_layers": 2, "d_model": 16, "num_heads": 2, "dropout_rate": 0.0}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    tokenizer = data.train_tokenizer(
        ["user: hi bot: you all\n"], data.TokenizerConfig(kind="characters")
    )
    config = models.GPTConfig(
        vocab_size=tokenizer.vocab_size,
        head="sequence_classification",
        labels=("reward",),
        **SIZES,
    )
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    folder = tmp_path_factory.mktemp("judge") / "judge"
    train.save_run(folder, model, params, tokenizer)
    return folder, model, params, tokenizer


def test_scores_are_those_of_the_pairs_that_the_model_was_trained_on(judge):
    folder, model, params, tokenizer = judge
    both = [[USER, {"role": "assistant", "content": text}] for text in ("you", "all of it")]
    pairs = data.RewardData(
        source=data.Examples.of([{"chosen": both[0], "rejected": both[1]}]),
        length=48,
        tokenizer=data.TokenizerConfig(kind="characters"),
    )
    example = pairs.whole_source(pairs.source, tokenizer, ()).examples.example(0, 0)
    expected = model.apply(
        {"params": params},
        input_ids=example["input_ids"],
        attention_mask=example["attention_mask"],
    ).logits[:, 0]
    context = Dialogue((USER,))
    for mesh in (None, train.make_mesh(train.MeshConfig(fsdp=2))):
        reward = RewardModel.of_run(folder, mesh)
        found = reward([context, context], ["you", "all of it"])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_folder_is_a_reward_and_its_prompts_are_texts_or_conversations(judge):
    folder, _, _, tokenizer = judge
    rewards = rewards_of(train.GRPOConfig(rewards=(str(folder),)), open_model=RewardModel.of_run)
    records = [PromptRecord(Dialogue((USER,)), {}), PromptRecord(PromptedText("hi", ""), {})]
    found = rewards([record.encode(tokenizer) for record in records], ["", " you"])
    assert list(rewards.functions) == ["judge"]
    assert found.shape == (2, 1)
    assert np.isfinite(found).all()


def test_another_model_is_no_reward(judge, tmp_path):
    _, model, _, tokenizer = judge
    config = dataclasses.replace(model.config, labels=("good", "bad"))
    two = models.create(config)
    train.save_run(tmp_path / "two", two, models.init_params(two, jax.random.key(0)), tokenizer)
    with pytest.raises(train.RunError, match=r"sequence_classification .*2 labels"):
        RewardModel.of_run(tmp_path / "two")


def test_an_answer_that_the_model_cannot_read_whole_is_refused(judge):
    reward = RewardModel.of_run(judge[0])
    with pytest.raises(data.UserError, match=r"63 tokens, .*48 .*reward model"):
        reward([PromptedText("hi", "")], ["you" * 20])


def test_a_process_hears_of_a_failure_before_it_computes_with_others(judge, monkeypatch):
    @contextlib.contextmanager
    def failing_elsewhere():
        yield
        raise RunError("process 1: it failed")

    reward = RewardModel.of_run(judge[0], train.make_mesh(train.MeshConfig(fsdp=2)))
    monkeypatch.setattr(reward_model, "barrier", failing_elsewhere)
    computed = []
    monkeypatch.setattr(reward_model, "greatest_everywhere", computed.append)
    with pytest.raises(RunError, match="process 1"):
        reward([Dialogue((USER,))], ["you"])
    assert not computed
