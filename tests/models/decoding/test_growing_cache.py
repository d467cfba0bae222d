"""Caches that grow with what is written: the same tokens, and few compiled programs."""

import math

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.decoders.gemma.gemma3 import Gemma3Config
from flaxzoo.models.decoding import cached_context, continuous_batch, padding
from flaxzoo.models.decoding.generator import Generator, sampling_keys

NEW, PER_CALL = 230, 5
REQUEST = models.GenerationRequest(do_sample=True, temperature=0.9, top_k=8, max_new_tokens=NEW)
PROMPTS = [[3, 4, 5], [6]]


@pytest.fixture(scope="module")
def made():
    """A model with a layer that keeps a window, and one that keeps all tokens."""
    config = Gemma3Config(
        vocab_size=23, max_length=300, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2,
        d_ff=24, window=70, full_layers=(1,), init_std=0.4,
    )  # fmt: skip
    model = models.create(config)
    return model, models.init_params(model, jax.random.key(0))


def test_stages_double_up_to_the_longest():
    needed = (1, 256, 257, 500, 1024, 1025)
    assert [padding.cache_stage(n, 1088) for n in needed] == [256, 256, 512, 512, 1024, 1088]
    assert padding.cache_stage(33, 64) == 64


@pytest.mark.slow
def test_a_stream_writes_the_same_tokens_with_few_programs(made, monkeypatch):
    lengths = []

    def advance(model, params, state, live, **fields):
        cache = state.context.cache
        lengths.append((cache.length, cache.layers[0].num_slots))
        return sampled(model, params, state, live, **fields)

    sampled = continuous_batch.advance_rows
    monkeypatch.setattr(continuous_batch, "advance_rows", advance)

    def tokens(first_stage):
        lengths.clear()
        monkeypatch.setattr(padding, "FIRST_STAGE", first_stage)
        blocks = Generator(*made).stream(PROMPTS, REQUEST, tokens_per_call=PER_CALL)
        return np.concatenate(list(blocks), axis=1)

    at_once = tokens(10_000)
    assert set(lengths) == {(320, 70)}
    in_stages = tokens(32)
    np.testing.assert_array_equal(in_stages, at_once)
    assert sorted(set(lengths)) == [(64, 64), (128, 70), (256, 70), (320, 70)]
    assert len(set(lengths)) <= math.log2(NEW)
    # No token is written beyond the last slot, and each stage is filled before the next.
    written = 32 + PER_CALL * np.arange(1, len(lengths) + 1)
    stages = np.array([length for length, _ in lengths])
    assert (written <= stages).all()
    assert (written[stages > 64] > stages[stages > 64] // 2).all()


@pytest.mark.slow
def test_a_conversation_grows_and_keeps_what_it_read(made, monkeypatch):
    monkeypatch.setattr(padding, "FIRST_STAGE", 32)
    monkeypatch.setattr(cached_context, "SPARE", 3)
    context = Generator(*made).cached_context()
    found = list(context.stream(PROMPTS[0], REQUEST, sampling_keys(0, 1)))
    blocks = Generator(*made).stream(PROMPTS[:1], REQUEST)
    assert found == np.concatenate(list(blocks), axis=1)[0].tolist()
    assert context.num_read == len(PROMPTS[0]) + NEW - 1
