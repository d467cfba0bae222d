"""Layers with a window keep the window's tokens only, and every way to a token agrees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models
from flaxzoo.models.decoders.gemma.gemma3 import Gemma3Config
from flaxzoo.models.decoders.mistral import MistralConfig
from flaxzoo.models.decoding import beam_adapters, cached_context
from flaxzoo.models.decoding.generator import Generator, sampling_keys
from flaxzoo.models.decoding.padding import pad_rows
from flaxzoo.models.decoding.rollout import sample_answers
from flaxzoo.models.nn import cache as caches

from ...support.requests import beams

SIZES = {"vocab_size": 23, "max_length": 40, "d_model": 16, "num_heads": 4, "init_std": 0.4}
W = 5
GROUPED = {**SIZES, "num_kv_heads": 2, "d_ff": 24, "window": W}
CONFIGS = {
    "all": MistralConfig(**GROUPED, num_layers=2),
    "mixed": Gemma3Config(**GROUPED, num_layers=2, full_layers=(1,)),
    # Biases by distance, vectors of distances, and a convolution with a history of its own.
    "alibi": models.GPTConfig(**SIZES, num_layers=2, local_window=W, positions="alibi"),
    "relative": models.LectureGPTConfig(
        **SIZES, num_layers=2, local_window=W, positions="relative", position_distance=3,
        head_convolution=3,
    ),
}  # fmt: skip
LENGTH = 24
IDS = np.random.default_rng(0).integers(1, 23, (2, LENGTH))
# The first row has four tokens of padding: more than a ring has slots left over.
MASK = np.ones((2, LENGTH), np.int32)
MASK[0, :4] = 0


@functools.cache
def made(name):
    """Returns a model, its parameters, and both laid out for decoding."""
    model = models.create(CONFIGS[name])
    params = models.init_params(model, jax.random.key(0))
    return model, params, *models.unstack_layers(model, params)


@functools.cache
def full(name):
    model, params, *_ = made(name)
    return np.asarray(compiled(model)(params, IDS, MASK).logits)


@functools.cache
def compiled(model):
    return jax.jit(lambda params, *inputs, **kw: model.apply({"params": params}, *inputs, **kw))


def in_pieces(name, ends, cache, layers="separate"):
    """Returns the logits of calls that end at the given tokens, and the last cache."""
    model, params, separate, unstacked = made(name)
    model, params = (separate, unstacked) if layers == "separate" else (model, params)
    found = []
    for start, end in zip((int(cache.index), *ends), ends, strict=False):
        output = compiled(model)(params, IDS[:, start:end], MASK, cache=cache)
        cache = output.cache
        found.append(output.logits)
    return np.concatenate(found, axis=1), cache


def empty(name, layers="separate", **fields):
    return models.init_cache(CONFIGS[name], models.Execution(layers=layers), 2, LENGTH, **fields)


def agree(assert_close, found, expected, start=0):
    real = MASK[:, start : start + found.shape[1], None] != 0
    assert_close(found * real, expected[:, start : start + found.shape[1]] * real)


@pytest.mark.parametrize("slots", [1, 4, 11])
def test_a_ring_holds_the_newest_tokens(slots):
    """Slot j has the newest token whose number is j modulo R, however the tokens were written."""
    empty = jnp.full((1, 1, 2, slots), -1.0)
    layer = caches.LayerCache(empty, empty.swapaxes(2, 3), window=slots)
    index = 0
    for length in (1, 2, 9, 1, 13, 3):
        tokens = jnp.broadcast_to(index + jnp.arange(float(length)), (1, 1, 2, length))
        layer, _ = caches.write_tokens(layer, tokens, tokens.swapaxes(2, 3), index)
        index += length
        expected = np.full(slots, -1)
        for token in range(index):
            expected[token % slots] = token
        for found in (layer.key[0, 0], layer.value[0, 0].T):
            np.testing.assert_array_equal(found, [expected] * 2)
        newest = np.asarray(caches.newest_tokens(index, slots))
        np.testing.assert_array_equal(np.where(newest < 0, -1, newest), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        # Prompts longer and shorter than the window, then pieces of one token and of many.
        ("all", (9, 10, 11, 15, 22, 24)),
        ("mixed", (3, 4, 5, 11, 12, 24)),
        ("alibi", (3, 4, 11, 12, 24)),
        ("relative", (9, 10, 22, 24)),
    ],
)
def test_pieces_are_the_full_pass(assert_close, name, ends):
    found, _ = in_pieces(name, ends, empty(name))
    agree(assert_close, found, full(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "mixed"])
def test_stacked_layers_decode_too(assert_close, name):
    found, cache = in_pieces(name, (9, 10, 24), empty(name, "scan"), "scan")
    agree(assert_close, found, full(name))
    assert cache.layers.num_slots == (W if name == "all" else LENGTH)


@pytest.mark.parametrize("name", ["all", "mixed", "alibi"])
def test_tokens_are_taken_back(assert_close, name):
    """Four others were written and taken back, twice; a ring has windows and four slots."""
    _, _, model, params = made(name)
    _, cache = in_pieces(name, (9,), empty(name, spare=4))
    for start, end in ((9, 10), (10, 12)):
        others = (IDS[:, start : start + 4] + 7) % 23
        cache = compiled(model)(params, others, MASK, cache=cache).cache
        assert cache.can_go_back(start + 4, start)
        assert not cache.can_go_back(start + 5, start)
        cache = dataclasses.replace(cache, index=jnp.int32(start))
        found, cache = in_pieces(name, (end,), cache)
        agree(assert_close, found, full(name), start)
    assert {ring.num_slots for ring in cache.rings} == {W + 4}


def test_a_cache_has_the_slots_of_its_windows():
    def slots(cache):
        return [layer.num_slots for layer in cache.layers]

    assert slots(empty("all")) == [W, W]
    assert slots(empty("mixed")) == [W, LENGTH]
    assert slots(empty("alibi")) == [LENGTH, W]
    assert slots(empty("mixed", spare=3, num_beams=2)) == [2 * W + 3, LENGTH]
    assert slots(empty("mixed", spare=LENGTH)) == [LENGTH, LENGTH]
    assert empty("all").length == LENGTH
    # Four key/value heads of 4 numbers each, float32, in two layers of keys and values.
    layers = empty("all").layers
    assert sum(x.nbytes for x in jax.tree.leaves(layers)) == 2 * 2 * 2 * (2 * 4) * W * 4
    large = jax.eval_shape(
        lambda: models.init_cache(
            models.preset("mistral-7b"), models.Execution("bfloat16", layers="separate"), 1, 32_768
        )
    )
    assert large.layers[0].key.shape == (1, 8, 128, 4096)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "relative"])
def test_a_cache_grows_before_and_after_its_rings_are_full(assert_close, name):
    execution = models.Execution(layers="separate")
    model, params = made(name)[2:]
    cache = models.init_cache(CONFIGS[name], execution, 2, 4)
    found = []
    for start, end, length in ((0, 3, 4), (3, 7, 8), (7, 20, LENGTH), (20, LENGTH, LENGTH)):
        cache = caches.grow_cache(cache, CONFIGS[name], execution, length)
        assert jax.tree.structure(cache) == jax.tree.structure(
            models.init_cache(CONFIGS[name], execution, 2, length)
        )
        output = compiled(model)(params, IDS[:, start:end], MASK[:, :length], cache=cache)
        cache = output.cache
        found.append(output.logits)
    agree(assert_close, np.concatenate(found, axis=1), full(name))


def greedy(name, prompt, number):
    """Returns what a full pass for every token chooses."""
    model, params, *_ = made(name)
    ids = np.zeros((1, len(prompt) + number), np.int32)
    ids[0, : len(prompt)] = prompt
    for end in range(len(prompt), ids.shape[1]):
        logits = compiled(model)(params, ids).logits
        ids[0, end] = np.argmax(logits[0, end - 1])
    return ids[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_streams_and_rollouts_write_the_tokens_of_full_passes(assert_close):
    model, params, separate, unstacked = made("mixed")
    prompts = [IDS[0, :9].tolist(), IDS[1, :2].tolist()]
    generator = Generator(model, params)
    request = models.GenerationRequest(max_new_tokens=20)
    expected = [greedy("mixed", prompt, 20) for prompt in prompts]
    found = np.concatenate(list(generator.stream(prompts, request)), axis=1)
    assert found.tolist() == expected

    ids, mask = pad_rows(prompts, length=9, left=True)
    answers = jax.jit(
        lambda ids, mask: sample_answers(
            separate,
            unstacked,
            ids,
            mask,
            keys=sampling_keys(0, 2),
            max_new_tokens=20,
            end_ids=(),
            temperature=0.0,
        )
    )(ids, mask)
    assert answers.tokens.tolist() == expected
    whole = np.concatenate([ids, answers.tokens], axis=1)
    real = np.concatenate([mask, answers.mask], axis=1)
    every = jax.nn.log_softmax(model.apply({"params": params}, whole, real).logits[:, 8:-1])
    log_probs = np.take_along_axis(
        np.asarray(every), np.asarray(answers.tokens)[..., None], axis=-1
    )
    assert_close(answers.log_probs, log_probs[..., 0])


@pytest.mark.slow
def test_a_conversation_takes_back_what_the_rings_hold(monkeypatch):
    monkeypatch.setattr(cached_context, "SPARE", 3)
    request = models.GenerationRequest(max_new_tokens=8)
    context = Generator(*made("mixed")[:2]).cached_context()
    first = IDS[0, :9].tolist()
    turns = (first, [*first, *greedy("mixed", first, 6), 3, 4, 5], [*first[:4], 8, 9])
    # 9 + 8 tokens, of which the last is not read; of the second turn 3 + 8 beyond 15 of these; and
    # the third is read anew, for the rings hold no more than 3 tokens before their windows.
    for turn, read in zip(turns, (16, 10, 13), strict=True):
        before = context.num_read
        new = list(context.stream(turn, request, sampling_keys(0, 1)))
        assert new == greedy("mixed", turn, 8)
        assert context.num_read - before == read


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "relative"])
def test_beams_keep_windows_of_all_beams(assert_close, name, monkeypatch):
    """The hypotheses are those of caches that keep every slot."""
    model, params, *_ = made(name)
    prompts = [IDS[0, :9].tolist(), IDS[1, :2].tolist()]
    request = beams(num_beams=3, num_return_sequences=3, max_new_tokens=14)
    used = []

    def search(**fields):
        def init_cache(*args, num_beams):
            used.append(models.init_cache(*args, **{"num_beams": num_beams, **fields}))
            return used[-1]

        jax.clear_caches()
        monkeypatch.setattr(beam_adapters, "init_cache", init_cache)
        return Generator(model, params).search(prompts, request)

    found, expected = search(), search(spare=1000)
    assert used[0].layers[1].num_slots == 3 * W
    assert used[1].layers[1].num_slots == used[1].length > 3 * W
    assert [[x.tokens for x in row] for row in found] == [
        [x.tokens for x in row] for row in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert_close(np.array([x.score for x in one]), np.array([x.score for x in other]))


def test_a_mask_for_each_token_needs_windows_for_all():
    model, params = made("all")[2:]
    mask, places = np.ones((2, 3, LENGTH), bool), np.zeros((2, 3), np.int32)
    with pytest.raises(data.UserError, match=r"T = 3 .*windows of 5, .* 5 slots"):
        model.apply({"params": params}, IDS[:, :3], mask, position_ids=places, cache=empty("all"))
