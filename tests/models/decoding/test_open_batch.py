"""A batch that texts enter and leave: each text is as if it were alone."""

import contextlib

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.decoding.generator import Generator, sampling_keys
from flaxzoo.models.decoding.serving import open_batch, reading
from flaxzoo.models.decoding.serving.row_sampling import (
    TextSampling,
    every_sampling,
    text_key,
)

VOCABULARY, LENGTH = 29, 64
SAMPLED = TextSampling(do_sample=True, temperature=0.9, top_k=8)
SETTINGS = [
    SAMPLED,
    TextSampling(),
    TextSampling(do_sample=True, top_p=0.7, repetition_penalty=1.5),
    TextSampling(do_sample=True, min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5),
    TextSampling(do_sample=True, logit_bias={3: 4.0, 5: -100.0}),
    TextSampling(num_alternatives=2),
]
PROMPTS = [[3, 4, 5], [6], [7, 8] * 9, [9] * 24, [1, 2], [10, 11, 12, 13]]
LIMITS = [9, 20, 12, 30, 5, 16]


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        for module in (open_batch, reading):
            patch.setattr(module, "CHUNKS", (16, 8))
        yield


@pytest.fixture(scope="module")
def generator(tiny):
    made = tiny(vocab_size=VOCABULARY, max_length=LENGTH)
    return Generator(made.model, made.params)


def enter(batch, i, settings=SETTINGS):
    batch.enter(i, PROMPTS[i], key=text_key(i), limit=LIMITS[i], sampling=settings[i])


def finish(batch, tokens, *, entering=(), stop=None):
    """Steps until all texts have ended, with a text entering every second step."""
    entering, step = list(entering), 0
    while batch.is_busy or entering:
        step += 1
        if entering and step % 2:
            enter(batch, entering.pop(0))
        for written in batch.step():
            tokens.setdefault(written.text, []).extend(written.tokens)
            if stop == (written.text, len(tokens[written.text])):
                batch.stop(written.text)
    return tokens


@pytest.fixture(scope="module")
def alone(generator):
    """The tokens of each text in a batch without others."""
    found = {}
    for i in range(len(PROMPTS)):
        finish(generator.open_batch(4), found, entering=[i])
    return found


def test_texts_do_not_depend_on_those_that_enter_and_leave(generator, alone):
    batch = generator.open_batch(4)
    assert batch.row_numbers == [1, 4]
    found = finish(batch, {}, entering=range(len(PROMPTS)), stop=(3, 7))
    assert found.pop(3) == alone[3][:7]
    assert found == {i: tokens for i, tokens in alone.items() if i != 3}
    assert [len(alone[i]) for i in range(len(PROMPTS))] == LIMITS


def test_texts_are_those_of_a_closed_batch(generator, alone):
    for i in (0, 1):
        request = models.GenerationRequest(
            **{n: getattr(SETTINGS[i], n) for n in ("do_sample", "temperature", "top_k")}
        )
        (batch,) = [
            generator.continuous_batch(
                [PROMPTS[i]], request, keys=sampling_keys(i, 1), limits=[LIMITS[i]], num_rows=1
            )
        ]
        assert [token for written in batch for token in written.tokens] == alone[i]


def test_biases_and_penalties_change_the_logits(generator, alone):
    assert 5 not in alone[4]
    batch = generator.open_batch(1)
    never = TextSampling(presence_penalty=2.0, frequency_penalty=2.0, logit_bias={7: 3.0})
    batch.enter(0, [1], key=text_key(0), limit=12, sampling=never)
    tokens = finish(batch, {})[0]
    # A bias of 3 is used up by one token with a penalty of 4.
    assert tokens.count(7) <= 1
    assert len(set(tokens)) > len(set(alone[1]))


def test_alternatives_are_the_most_probable_tokens(generator):
    batch = generator.open_batch(1)
    enter(batch, 5)
    tokens, scores, best = [], [], []
    while batch.is_busy:
        for written in batch.step():
            tokens += written.tokens
            scores += written.log_probs
            best += written.alternatives
    assert [len(row) for row in best] == [2] * 16
    assert [row[0] for row in best] == list(zip(tokens, scores, strict=True))
    expected = generator.token_scores([*PROMPTS[5], *tokens], 2)[len(PROMPTS[5]) - 1 :]
    np.testing.assert_allclose(scores, [one.log_probability for one in expected], atol=1e-5)
    assert [[t for t, _ in row] for row in best] == [[t for t, _ in e.best] for e in expected]
    assert all(one.log_probability == one.best[0][1] for one in expected)


def test_alternatives_do_not_depend_on_other_texts(generator):
    batch, found = generator.open_batch(4), {1: [], 5: []}
    for i in found:
        enter(batch, i)
    while batch.is_busy:
        for written in batch.step():
            found[written.text] += written.alternatives
    assert found[1] == []  # it has not asked for any
    assert [len(row) for row in found[5]] == [2] * LIMITS[5]


def test_a_text_that_is_stopped_frees_its_row_at_once(generator, alone):
    batch = generator.open_batch(1)
    enter(batch, 3)
    enter(batch, 0)
    batch.step()
    batch.stop(3)  # it is being read
    assert batch.num_growing == 0
    assert finish(batch, {}) == {0: alone[0]}
    batch.stop(0)  # it has ended
    enter(batch, 1)
    batch.stop(1)
    assert not batch.is_busy


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"family": "gpt", "num_experts": 4},
        {"family": "mistral", "window": 12, "num_kv_heads": 2},
        {"family": "gpt", "local_window": 12},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_other_models(tiny, fields):
    made = tiny(vocab_size=VOCABULARY, max_length=LENGTH, **fields)
    generator = Generator(made.model, made.params)
    keys = sampling_keys(0, 1)
    request = models.GenerationRequest(max_new_tokens=12)
    batch, found = generator.open_batch(4), {}
    settings = [TextSampling()] * len(PROMPTS)
    for i in (0, 2, 3):
        enter(batch, i, settings)
    finish(batch, found)
    for i in (0, 2, 3):
        closed = generator.continuous_batch(
            [PROMPTS[i]], request, keys=keys, limits=[LIMITS[i]], num_rows=1
        )
        assert [token for written in closed for token in written.tokens] == found[i]


@contextlib.contextmanager
def compiling():
    """The seconds of each program that is compiled within the context."""
    found = []

    def listen(event, duration_secs, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append((kwargs, duration_secs))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(tiny):
    made = tiny(vocab_size=VOCABULARY, max_length=LENGTH, num_layers=1)
    batch = Generator(made.model, made.params).open_batch(2)
    # Half of the programs, to save time: those without penalties.
    samplings = [one for one in every_sampling() if not one.is_adjusted]
    assert len(samplings) == len(every_sampling()) / 2 == 6
    with compiling() as found:
        for length in batch.cache_lengths:
            batch.compile_reading(length, samplings, LENGTH)
            for size in batch.row_numbers:
                batch.compile_rows(size, length, samplings)
    assert len(found) > 12
    assert not batch.is_busy
    with compiling() as found:
        # Texts with different settings share the rows, and pass the end of the context.
        for i, sampling in enumerate([*samplings, *samplings]):
            prompt = PROMPTS[i % len(PROMPTS)]
            batch.enter(i, prompt, key=text_key(i), limit=20 + 40 * (i == 3), sampling=sampling)
        finish(batch, {})
    assert found == []
