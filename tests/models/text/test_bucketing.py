"""Batches of few shapes: few programs, little padding, and the same numbers for every batch."""

import functools
import random
from typing import Any

import jax
import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.chat.records import PromptedText
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.models.text.bucketing import padded_batches, padded_length
from flaxzoo.train.evaluation.reward_model import RewardModel

pytestmark = pytest.mark.usefixtures("on_one_device")

LIMIT = 59  # not a multiple of 16
SIZES = {"max_length": LIMIT, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32}
LETTERS = "abcdefgh "


def texts_of(number, seed=0, longest=LIMIT - 4):
    rng = random.Random(seed)
    return [
        "".join(rng.choices(LETTERS[:-1], k=rng.choice([1, 3, 15, 16, 17, longest])))
        for _ in range(number)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return CharacterTokenizer.train([LETTERS])


def made(config_class, tokenizer, **settings):
    config = config_class(vocab_size=tokenizer.vocab_size, **SIZES, **settings)
    model = models.create(config)
    return model, models.init_params(model, jax.random.key(0)), tokenizer


@functools.cache
def embedder(tokenizer):
    return models.TextEmbedder(*made(models.GPTConfig, tokenizer))


@functools.cache
def scorer(tokenizer):
    return models.TextScorer(*made(models.GPTConfig, tokenizer))


@functools.cache
def reward(tokenizer):
    head = {"head": "sequence_classification", "labels": ("reward",)}
    return RewardModel(*made(models.GPTConfig, tokenizer, **head), length=LIMIT)


def vectors(tokenizer, texts):
    return embedder(tokenizer)(texts)


def log_probabilities(tokenizer, texts):
    return np.array([score.log_probability for score in scorer(tokenizer)(texts)])


def rewards(tokenizer, texts):
    return np.array(reward(tokenizer)([PromptedText("a ", "")] * len(texts), texts))


@pytest.mark.parametrize("limit", [512, 256, LIMIT, 7])
def test_lengths_are_few_and_little_is_padding(limit):
    lengths = [padded_length(n, limit) for n in range(1, limit + 1)]
    assert all(n <= length <= limit for n, length in enumerate(lengths, start=1))
    assert len(set(lengths)) <= {512: 24, 256: 16, LIMIT: 4, 7: 1}[limit]
    assert all(length - n <= max(15, n // 8) for n, length in enumerate(lengths, start=1))


@pytest.mark.parametrize("number", [1, 2, 3, 5, 31, 32, 33, 100, 1500])
def test_each_row_is_in_one_batch_and_few_rows_are_padding(number):
    lengths = np.random.default_rng(number).integers(0, 257, number).tolist()
    batches = list(padded_batches(lengths, 256))
    assert sorted(i for batch, _ in batches for i in batch) == [
        i for i in range(number) if lengths[i]
    ]
    for batch, num_rows in batches:
        assert num_rows in (1, 2, 4, 8, 16, 32)
        assert 3 * num_rows / 4 <= len(batch) <= num_rows
        length = padded_length(max(lengths[i] for i in batch), 256)
        assert num_rows == 1 or num_rows * length <= 1024  # what a CPU's caches hold
    assert [b for b, _ in padded_batches([9, 9, 9, 0, 9], 256)] == [[0, 1, 2, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("function", [vectors, log_probabilities, rewards])
def test_a_text_has_the_same_numbers_alone_and_among_any_number(function, tokenizer):
    texts = texts_of(100)
    alone = np.stack([function(tokenizer, [text])[0] for text in texts])
    for number in (1, 2, 3, 5, 31, 32, 33, 100):
        found = function(tokenizer, texts[:number])
        np.testing.assert_allclose(found, alone[:number], rtol=1e-6, atol=1e-6)


def test_the_longest_text_that_is_read_is_read_whole(tokenizer):
    text = texts_of(1, longest=LIMIT)[0][:1] * LIMIT
    model, params, _ = made(models.GPTConfig, tokenizer)
    ids = np.array([tokenizer.encode(text)])
    assert ids.shape == (1, LIMIT)
    hidden = model.apply({"params": params}, input_ids=ids).last_hidden_state
    found = vectors(tokenizer, ["a", text])[1]
    np.testing.assert_allclose(found, hidden[0].mean(axis=0), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_three_hundred_calls_compile_few_programs(tokenizer):
    embed = models.TextEmbedder(*made(models.GPTConfig, tokenizer))
    rng = random.Random(1)
    for seed in range(300):
        number = rng.choice([1, 1, 2, 3, 7, 40])
        embed([text[: rng.randint(1, LIMIT)] for text in texts_of(number, seed)])
    # Of the lengths 16 and 32 there are at most 32 rows, of 48 and 59 at most 16.
    compiled: Any = embed._embed
    assert compiled._cache_size() <= 2 * 6 + 2 * 5


@pytest.fixture(scope="module")
def classifier(tokenizer, tmp_path_factory):
    """A run whose data are as long as its model reads."""
    folder = tmp_path_factory.mktemp("classifier") / "run"
    head = {"head": "sequence_classification", "labels": ("x", "y"), "init_std": 0.5}
    train.save_run(folder, *made(models.BertConfig, tokenizer, **head))
    return folder


def test_predictions_are_those_of_each_text_alone(classifier):
    texts = texts_of(33)
    whole = train.predict(classifier, data.Examples.of([{"text": text} for text in texts]))
    for number in (1, 2, 3, 5, 31, 32):
        some = data.Examples.of([{"text": text} for text in texts[:number]])
        for one, other in zip(train.predict(classifier, some), whole, strict=False):
            assert one["text"] == other["text"]
            assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)
