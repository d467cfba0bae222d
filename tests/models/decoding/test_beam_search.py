"""Beam search: against exhaustive search, against forward passes, and alone in its row."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.decoding import beam_search as beam
from flaxzoo.models.decoding.banned_sequences import banned_sequences
from flaxzoo.models.decoding.beam_step import (
    BeamParams,
    best_candidates,
    score_upper_bound,
    top_tokens,
)

from ...support.requests import beams

START, EOS = 1, 2
search = functools.partial(beams, decoder_start_token_id=START, eos_token_id=(EOS,))
SIZES = {"max_length": 64, "num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 32}


def make(vocab_size, seed=0, eos_bias=0.0):
    """A model whose next tokens are far from equally likely."""
    config = models.EncoderDecoderConfig(vocab_size=vocab_size, **SIZES, output_bias=True)
    model = models.create(config)
    params = jax.jit(lambda: models.init_params(model, jax.random.key(seed)))()
    noise = jax.random.normal(
        jax.random.key(seed + 1), params["token_embedding"]["embedding"].shape
    )
    params["token_embedding"]["embedding"] += 0.3 * noise
    params["output_bias"] = params["output_bias"].at[EOS].set(eos_bias)
    return model, params


@pytest.fixture(scope="module")
def large():
    model, params = make(37, eos_bias=1.5)
    return model, params, models.Generator(model, params)


LONGEST = 16


def log_probabilities(model, params, source, tokens):
    """What a forward pass says of each next token, `[T, V]`: one shape, compiled once."""
    ids = np.zeros((1, LONGEST), np.int32)
    ids[0, : len(tokens)] = [START, *tokens[:-1]]
    padded = np.zeros((2, 1, LONGEST), np.int32)
    padded[:, 0, : len(source)] = [source, [1] * len(source)]
    output = _apply(model, params, padded[0], padded[1], ids)
    return np.asarray(jax.nn.log_softmax(output.logits[0], axis=-1))[: len(tokens)]


@functools.partial(jax.jit, static_argnums=0)
def _apply(model, params, ids, mask, decoder_input_ids):
    return model.apply({"params": params}, ids, mask, decoder_input_ids=decoder_input_ids)


def whole(hypothesis):
    return [*hypothesis.tokens, *[EOS] * hypothesis.ended]


def penalty(form, length, alpha):
    return ((5 + length) / 6 if form == "gnmt" else length) ** alpha


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "alpha"),
    [("gnmt", 0.6), ("power", 0.6), ("gnmt", 0.0), ("power", 1.5), ("gnmt", -0.5), ("power", -1.0)],
)
def test_wide_beams_find_what_exhaustive_search_finds(form, alpha):
    vocabulary, longest = 4, 4
    model, params = make(vocabulary, seed=3)
    source = [3, 0, 2]
    others = [token for token in range(vocabulary) if token != EOS]
    every = [
        [*body, *ending]
        for length in range(longest + 1)
        for body in itertools.product(others, repeat=length)
        for ending in ([[EOS]] if length < longest else [[]])
    ]
    every = [tokens for tokens in every if tokens]
    ids = np.zeros((len(every), longest), np.int32)
    for row, tokens in enumerate(every):
        ids[row, : len(tokens)] = tokens
    inputs = np.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    sources = np.tile(np.array([source], np.int32), (len(every), 1))
    logits = _apply(model, params, sources, np.ones_like(sources), inputs).logits
    scores = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    ranked = sorted(
        (
            sum(scores[row, i, token] for i, token in enumerate(tokens))
            / penalty(form, len(tokens), alpha),
            tokens,
        )
        for row, tokens in enumerate(every)
    )[::-1]
    settings = search(
        num_beams=128,
        num_return_sequences=10,
        length_penalty=alpha,
        penalty_form=form,
        max_new_tokens=longest,
    )
    [found] = models.Generator(model, params).search([source], settings)
    assert [whole(h) for h in found] == [tokens for _, tokens in ranked[:10]]
    np.testing.assert_allclose([h.score for h in found], [s for s, _ in ranked[:10]], atol=1e-5)


SOURCES = [[5, 9, 30, 2], [7, 2], [11, 12, 13, 14, 15, 16, 17, 18, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 4])
def test_scores_are_what_a_forward_pass_gives(large, num_beams):
    model, params, generator = large
    settings = search(num_beams=num_beams, num_return_sequences=num_beams, max_extra_tokens=5)
    found = generator.search(SOURCES, settings)
    for source, row in zip(SOURCES, found, strict=True):
        assert len(row) == num_beams
        assert [h.score for h in row] == sorted((h.score for h in row), reverse=True)
        for h in row:
            tokens = whole(h)
            assert EOS not in h.tokens
            assert h.ended or len(h.tokens) == len(source) + 5
            scores = log_probabilities(model, params, source, tokens)
            expected = sum(scores[i, token] for i, token in enumerate(tokens))
            assert h.log_probability == pytest.approx(expected, abs=1e-4)
            alpha = 0.0 if num_beams == 1 else 0.6
            divided = expected / penalty("gnmt", len(tokens), alpha)
            assert h.score == pytest.approx(divided, abs=1e-4)


def test_greedy_takes_the_best_token_each_time(large):
    model, params, generator = large
    settings = search(num_beams=1, max_extra_tokens=5)
    for source, [found] in zip(SOURCES, generator.search(SOURCES, settings), strict=True):
        tokens = whole(found)
        assert EOS in tokens or len(tokens) == len(source) + 5
        scores = log_probabilities(model, params, source, tokens)
        assert np.argmax(scores, axis=-1).tolist() == tokens


@pytest.mark.slow
def test_rows_do_not_depend_on_each_other(large):
    *_, generator = large
    settings = search(num_return_sequences=4, max_extra_tokens=8)
    assert generator.search([], settings) == []
    together = generator.search(SOURCES, settings)
    for source, row in zip(SOURCES, together, strict=True):
        [alone] = generator.search([source], settings)
        assert [h.tokens for h in alone] == [h.tokens for h in row]
        np.testing.assert_allclose([h.score for h in alone], [h.score for h in row], atol=1e-5)


def test_early_stopping_finds_the_same_hypotheses(large):
    """The bound is exact: who is answered first is the same however many are asked for."""
    *_, generator = large
    first = search(num_return_sequences=1, max_extra_tokens=8)
    all_four = search(num_return_sequences=4, max_extra_tokens=8)
    ours = generator.search(SOURCES, first)
    longer = generator.search(SOURCES, all_four)
    assert [row[0].tokens for row in ours] == [row[0].tokens for row in longer]


@pytest.mark.slow
def test_suppressed_tokens_do_not_occur_and_the_end_may_be_forced(large):
    *_, generator = large
    plain = generator.search(SOURCES, search(max_extra_tokens=5))
    unwanted = tuple({token for [h] in plain for token in h.tokens})
    assert unwanted
    settings = search(max_extra_tokens=5, bad_words_ids=[(token,) for token in unwanted])
    found = generator.search(SOURCES, settings)
    assert not {token for [h] in found for token in h.tokens} & set(unwanted)
    settings = search(max_new_tokens=3, forced_eos_token_id=EOS, bad_words_ids=[(EOS,)])
    for [found] in generator.search(SOURCES, settings):
        assert found.ended
        assert len(found.tokens) == 2


@pytest.mark.slow
def test_other_values_need_no_compilation(large):
    *_, generator = large
    generator.search(SOURCES, search(max_extra_tokens=8))
    before = beam.begin._cache_size()
    other = search(max_new_tokens=9, num_return_sequences=3, length_penalty=1.0)
    generator.search(SOURCES[1:] + SOURCES[:1], dataclasses.replace(other, eos_token_id=(EOS + 1,)))
    assert beam.begin._cache_size() == before
    # Nor does another search of such a model.
    models.Generator(*large[:2]).search(SOURCES, other)
    assert beam.begin._cache_size() == before
    for suppressed in ((3, 4, 5), (3, 4, 5, 6)):
        settings = search(max_extra_tokens=8, bad_words_ids=[(token,) for token in suppressed])
        generator.search(SOURCES, settings)
    assert beam.begin._cache_size() == before + 1


@pytest.mark.parametrize("number", [1, 8])
def test_best_tokens_of_a_large_vocabulary(number):
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5000))
    logits = logits.at[:, :, 100:120].add(4.0)  # several in one block
    values, tokens = top_tokens(logits, number)
    expected, places = jax.lax.top_k(logits, number)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(tokens, places)


def candidates(params, vocab_size, num_beams):
    """Of one beam, all of whose continuations are equally likely."""
    recent = jnp.zeros((1, 1, 0), jnp.int32)
    last = jnp.zeros((1,), bool)
    return best_candidates(
        jnp.zeros((1, 1, vocab_size)),
        jnp.zeros((1, 1)),
        recent,
        last,
        params=params,
        num_beams=num_beams,
    )


def test_candidates_of_few_tokens_are_filled_up():
    none = banned_sequences([], 2)
    params = BeamParams(jnp.float32(0), jnp.array([0]), jnp.int32(1), none, "gnmt", "never", False)
    found = candidates(params, 2, num_beams=2)
    assert found.log_probs.tolist() == [
        [pytest.approx(math.log(0.5)), pytest.approx(math.log(0.5)), -math.inf, -math.inf]
    ]


@pytest.mark.parametrize(("renormalize", "probability"), [(False, 0.25), (True, 0.5)])
def test_probabilities_are_among_all_tokens_or_those_that_may_be_chosen(renormalize, probability):
    never = banned_sequences([[0], [3]], 4)
    params = BeamParams(
        *(jnp.float32(0), jnp.array([0]), jnp.int32(1), never, "gnmt", "never", False, renormalize)
    )
    found = candidates(params, 4, num_beams=1)
    assert sorted(found.tokens[0].tolist()) == [1, 2]
    np.testing.assert_allclose(found.log_probs, math.log(probability), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 0}, "num_beams .*got 0"),
        ({"num_return_sequences": 5}, "num_return_sequences 5 .*num_beams 4"),
        ({"max_extra_tokens": -1}, "max_extra_tokens .*got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens .*got 0"),
        ({"num_beams": True}, "num_beams .* True"),
        ({"length_penalty": float("inf")}, "length_penalty .* inf"),
        ({"eos_token_id": (True,)}, "eos_token_id .*True"),
        ({"decoder_start_token_id": True}, "decoder_start_token_id .*True"),
        ({"bad_words_ids": ((5, True),)}, "bad_words_ids .*True"),
        ({"eos_token_id": (EOS, -1)}, r"eos_token_id .* \(2, -1\)"),
    ],
)
def test_refused_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        search(**fields)


@pytest.mark.parametrize(
    ("sources", "special", "message"),
    [
        ([[5], []], {}, "source 1 .*0 tokens: .*64"),
        ([[5] * 65], {}, "source 0 .*65 tokens: .*64"),
        ([[5], [40]], {}, "40 … 40 .*source 1 "),
        ([[5]], {"decoder_start_token_id": None}, "decoder_start_token_id .*missing"),
        ([[5]], {"decoder_start_token_id": 37}, "decoder_start_token_id 37 .* 37"),
        ([[5]], {"eos_token_id": (37,), "forced_eos_token_id": 37}, "forced_eos_token_id 37 .* 37"),
        ([[5]], {"do_sample": True}, "do_sample True"),
        ([[5]], {"bad_words_ids": tuple((token,) for token in range(37))}, "all 37 tokens"),
    ],
)
def test_refused_sources(large, sources, special, message):
    with pytest.raises(ValueError, match=message):
        large[2].search(sources, search(**special))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eos_bias", "count"), [(20.0, 1), (-20.0, 12)], ids=["ends at once", "never ends"]
)
def test_search_stops_when_no_live_beam_can_win(monkeypatch, eos_bias, count):
    loop, counts = jax.lax.while_loop, []

    def counted(condition, body, state):
        last = loop(condition, body, state)
        jax.debug.callback(counts.append, last.count)
        return last

    monkeypatch.setattr(jax.lax, "while_loop", counted)
    vocabulary = 37 + count  # of a model that was not searched before
    generator = models.Generator(*make(vocabulary, eos_bias=eos_bias))
    settings = search(num_beams=4, max_new_tokens=12)
    generator.search(SOURCES[:1], settings)
    jax.effects_barrier()
    assert counts == [count]


def test_the_best_that_a_beam_can_reach():
    """Nothing more is lost, and the length is the best there is: the longest, or for α < 0 now."""
    log_probs, count, limits = jnp.array([-1.0]), jnp.int32(2), jnp.array([8])
    none = banned_sequences([], 2)

    def bound(alpha, early_stopping):
        params = BeamParams(
            *(jnp.float32(alpha), jnp.array([0]), jnp.int32(1), none),
            *("power", early_stopping, False, False),
        )
        return float(score_upper_bound(log_probs, count, limits, params)[0])

    assert bound(1.0, "never") == -1 / 8
    assert bound(-1.0, "never") == -2
    assert bound(1.0, False) == -1 / 2
    assert bound(0.0, "never") == -1
