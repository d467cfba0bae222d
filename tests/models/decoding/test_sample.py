import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.models import Generator, Sampling
from flaxzoo.models.decoding import sample as generation

from ...support.requests import sampled

LONGEST = 16  # of the tiny model
GREEDY = Sampling(temperature=0.0)
KINDS = {
    "gpt2": {},
    "gpt": {"norm_position": "post", "scale_residual_init": False},
    "sinusoidal": {"positions": "sinusoidal", "position_base": 100.0, "num_layers": 3},
    "banded": {"local_window": 3, "use_bias": False},
}


def stream(generator, prompts, number, *, sampling=None, banned=(), **options):
    """The new tokens of each row, int[B, number]."""
    request = sampled(number, sampling, banned=banned)
    return np.concatenate(list(generator.stream(prompts, request, **options)), axis=1)


def next_logits(tiny, context):
    """The plain forward pass: no cache, no padding before, one row."""
    ids = np.zeros((1, LONGEST), int)
    ids[0, : len(context)] = context
    return tiny.logits(input_ids=ids)[0, len(context) - 1].copy()


def reference(tiny, prompt, number, penalty=1.0):
    """Greedy generation from full forward passes; the oldest tokens fall out."""
    context, seen, new = list(prompt), set(prompt), []
    for _ in range(number):
        if len(context) > LONGEST:
            context = context[-(LONGEST - LONGEST // 4) :]
        logits = next_logits(tiny, context)
        for i in seen:
            logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
        token = int(np.argmax(logits))
        new.append(token)
        context.append(token)
        seen.add(token)
    return new


@pytest.fixture(scope="module")
def small(tiny):
    return tiny(num_layers=2)


@pytest.fixture(scope="module")
def generator(small):
    return Generator(small.model, small.params)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_argmax_of_the_full_forward_pass(tiny, kind):
    # Prompts shorter than the context, filling it, and longer: the oldest tokens fall out.
    model = tiny(**{"num_layers": 2, **KINDS[kind]})
    generator = Generator(model.model, model.params)
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 29, length).tolist() for length in (1, 5, 15, 16, 17, 40)]
    new = stream(generator, prompts, 23, sampling=GREEDY)
    for prompt, row in zip(prompts, new.tolist(), strict=True):
        assert row == reference(model, prompt, 23)
    assert len(set(new.ravel().tolist())) > 2  # no model that always says the same


def test_any_layout_of_layers_generates_the_same(tiny, generator):
    model = tiny(num_layers=2, layers="unroll")
    other = Generator(model.model, model.params)
    ours = stream(other, [[1, 2, 3]], 9, sampling=GREEDY)
    assert np.array_equal(ours, stream(generator, [[1, 2, 3]], 9, sampling=GREEDY))


@pytest.mark.slow
def test_rows_of_a_batch_do_not_know_of_each_other(generator):
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 29, length).tolist() for length in (1, 14, 5, 40, 16)]
    together = stream(generator, prompts, 25, sampling=GREEDY)
    for prompt, row in zip(prompts, together, strict=True):
        assert np.array_equal(row, stream(generator, [prompt], 25, sampling=GREEDY)[0])
    sampled = stream(generator, prompts, 25, seed=7)
    assert np.array_equal(sampled[0], stream(generator, prompts[:1], 25, seed=7)[0])
    changed = stream(generator, [[8, 8, 8], *prompts[1:]], 25, seed=7)
    assert np.array_equal(sampled[1:], changed[1:])
    assert not np.array_equal(sampled[0], changed[0])


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(0.7, top_k=5, top_p=0.8, repetition_penalty=1.3)],
)
def test_tokens_of_a_call_do_not_matter(generator, sampling):
    # Also where the context is full in the middle of a call.
    prompts = [[1, 2, 3], list(range(13))]
    one, many = (
        stream(generator, prompts, 37, sampling=sampling, seed=1, tokens_per_call=n)
        for n in (1, 16)
    )
    assert one.shape == (2, 37)
    assert np.array_equal(one, many)


def test_yields_tokens_as_they_come(generator):
    for per_call, expected in ((1, [1] * 7), (4, [1, 4, 2])):
        pieces = generator.stream([[1], [2]], sampled(7), tokens_per_call=per_call)
        assert [piece.shape for piece in pieces] == [(2, n) for n in expected]
    with pytest.raises(ValueError, match=r"max_new_tokens .*got 0"):
        sampled(0)


def test_the_seed_decides(generator):
    runs = [stream(generator, [[5, 6], [5, 6]], 20, seed=seed) for seed in (0, 0, 1, 2**32 - 1)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert not np.array_equal(runs[2], runs[3])
    assert not np.array_equal(runs[0][0], runs[0][1])  # rows differ too


@pytest.mark.slow
def test_repetition_penalty_counts_all_that_was_seen(small, generator):
    sampling = Sampling(temperature=0.0, repetition_penalty=1.7)
    for prompt in ([3, 1, 4], list(range(28, 6, -1))):
        for per_call in (1, 16):
            new = stream(generator, [prompt], 30, sampling=sampling, tokens_per_call=per_call)
            assert new[0].tolist() == reference(small, prompt, 30, penalty=1.7)


def test_repetition_penalty_by_hand():
    logits = jnp.array([[2.0, -2.0, 1.0, 0.0]])
    seen = jnp.array([[True, True, False, True]])
    ours = generation.penalize_repetition(logits, seen, jnp.float32(2))
    assert ours.tolist() == [[1.0, -4.0, 1.0, 0.0]]


filter_tokens = jax.jit(generation.filter_tokens)


def kept(rows, k, p):
    scores = filter_tokens(jnp.asarray(rows, jnp.float32), jnp.int32(k), jnp.float32(p))
    return [np.flatnonzero(row > -1e29).tolist() for row in np.asarray(scores)]


@pytest.mark.parametrize(
    ("k", "p", "expected"),
    [
        (5, 1.0, [0, 1, 2, 3, 4]),
        (1, 1.0, [3]),
        (3, 1.0, [0, 3, 4]),
        (5, 1e-6, [3]),
        (5, 0.39, [3]),  # the best alone has 0.40
        (5, 0.41, [0, 3]),  # with the second 0.65
        (5, 0.64, [0, 3]),
        (5, 0.66, [0, 3, 4]),  # with the third 0.85
        (5, 0.86, [0, 1, 3, 4]),
        (5, 0.999, [0, 1, 2, 3, 4]),
        (2, 0.60, [3]),  # of two, the best has 0.40 / 0.65 = 0.615
        (2, 0.63, [0, 3]),
    ],
)
def test_filter_tokens_by_hand(k, p, expected):
    row = np.log([0.25, 0.10, 0.05, 0.40, 0.20])
    assert kept([row, row[::-1]], k, p) == [expected, sorted(4 - i for i in expected)]


def test_filter_tokens_keeps_the_scores_and_takes_the_first_of_equals_as_argmax_does():
    ours = filter_tokens(jnp.array([[0.5, -1.25, 3.0]]), jnp.int32(2), jnp.float32(1))
    assert ours[0, ::2].tolist() == [0.5, 3.0]
    rows = [[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    assert kept(rows, 1, 1.0) == [[1], [0]] == [[int(np.argmax(row))] for row in rows]
    assert kept(rows, 2, 1.0) == [[1, 2], [0, 1]]
    assert kept(rows, 4, 0.55) == [[1, 2], [0, 1, 2]]  # 0.29 each; 0.25 each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "same"),
    [
        (GREEDY, [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-6)]),
        (Sampling(), [Sampling(top_k=29), Sampling(top_k=1000), Sampling(top_p=1.0)]),
    ],
)
def test_filters_of_one_token_are_greedy_and_of_all_tokens_change_nothing(generator, limit, same):
    expected = stream(generator, [[4, 2]], 12, sampling=limit)
    for sampling in same:
        assert np.array_equal(stream(generator, [[4, 2]], 12, sampling=sampling), expected)


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(), [0.1, 0.4, 0.05, 0.2, 0.25]),
        (Sampling(temperature=0.5), [0.01, 0.16, 0.0025, 0.04, 0.0625]),
        (Sampling(temperature=2.0), [0.1**0.5, 0.4**0.5, 0.05**0.5, 0.2**0.5, 0.25**0.5]),
        (Sampling(top_k=3), [0, 0.4, 0, 0.2, 0.25]),
        (Sampling(top_p=0.6), [0, 0.4, 0, 0, 0.25]),
        (Sampling(temperature=0.5, top_k=4, top_p=0.7), [0, 0.16, 0, 0, 0.0625]),
        (Sampling(min_p=0.4), [0, 0.4, 0, 0.2, 0.25]),
        (Sampling(temperature=0.5, min_p=0.3), [0, 0.16, 0, 0, 0.0625]),
    ],
)
def test_picks_are_distributed_as_the_scores_say(sampling, weights):
    number = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.1, 0.4, 0.05, 0.2, 0.25])), (number, 5))
    keys = jax.random.split(jax.random.key(0), number)
    arrays = generation.sampling_params(sampling, 5)
    nothing = jnp.zeros((number, 0), jnp.int32)
    past = generation.History(None, nothing, keys, jnp.zeros((number,), jnp.int32))
    picked, *_ = generation.choose(logits, past, sampling=arrays)
    counts = np.bincount(np.asarray(picked), minlength=5)
    expected = number * np.array(weights) / sum(weights)
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = (np.square(counts - expected)[possible] / expected[possible]).sum()
    assert statistic < 18.5  # χ² of 4 degrees of freedom: above with probability 0.001


@pytest.mark.slow
def test_another_prompt_or_value_compiles_nothing(tiny, caplog):
    model = tiny(num_layers=2, max_length=64, vocab_size=31)  # no other test's
    generator = Generator(model.model, model.params)

    def compiled(prompts, number=20, **options):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.DEBUG):
            stream(generator, prompts, number, **options)
        return [r.message for r in caplog.records if r.message.startswith("Compiling")]

    warm = {"sampling": Sampling(0.8, top_k=5, top_p=0.9, repetition_penalty=1.2)}
    assert compiled([[1, 2, 3]], **warm)
    assert not compiled([list(range(20))], **warm)
    assert not compiled([[7]], seed=5, **warm)
    assert not compiled([[1, 2, 3]], 11, **warm)
    other = Sampling(1.3, top_k=9, top_p=0.5, repetition_penalty=1.7)
    assert not compiled([[4, 5]], sampling=other)
    assert compiled([[1], [2]], **warm)  # another number of rows
    assert compiled([[1]])  # neither filter nor penalty
    generator = Generator(model.model, model.params)
    assert not compiled([[1]])


@pytest.mark.slow
def test_banned_sequences_do_not_occur(small, generator):
    # Forbidden are one token of the best continuation, and a pair of two, also across calls.
    prompt, number = [3, 1, 4], 30
    best = reference(small, prompt, number)
    words = ((best[0],), tuple(best[2:4]), (4, best[1]), (*prompt, best[1]))
    options = {"sampling": GREEDY, "banned": words}
    for per_call in (1, 16):
        new = stream(generator, [prompt], number, **options, tokens_per_call=per_call)
        context, expected = list(prompt), []
        for _ in range(number):
            shown = context if len(context) <= LONGEST else context[-(LONGEST - LONGEST // 4) :]
            context = shown
            logits = next_logits(small, context)
            for *beginning, end in words:
                if not beginning or context[-len(beginning) :] == beginning:
                    logits[end] = -np.inf
            expected.append(int(np.argmax(logits)))
            context = [*context, expected[-1]]
        assert new[0].tolist() == expected
    for words, message in (
        (((1, 29),), r"banned sequence \[1, 29\] .*29"),
        (((1,), ()), "banned sequence .*no token"),
        (tuple((token,) for token in range(29)), "29 tokens .*banned"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(generator, [prompt], 1, banned=words)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "one token"),
        ([[1], []], "one token"),
        ([[1], [3, 29]], "3 … 29 .*prompt 1 .*29"),
        ([[-1]], "-1 … -1"),
    ],
)
def test_bad_prompts_are_refused(generator, prompts, message):
    with pytest.raises(ValueError, match=message):
        stream(generator, prompts, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature .*got -0.1"),
        ({"temperature": math.nan}, "temperature .*got nan"),
        ({"top_k": 0}, "top_k .*got 0"),
        ({"top_p": 0.0}, "top_p .*got 0.0"),
        ({"top_p": 1.5}, "top_p .*got 1.5"),
        ({"top_p": math.nan}, "top_p .*got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty .*got 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty .*got nan"),
    ],
)
def test_bad_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_the_best_token_is_that_of_argmax():
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 3, (6, 40)).astype(np.float32)  # many are equal
    logits[0] = -np.inf
    logits[1, 7] = np.inf
    np.testing.assert_array_equal(
        generation.best_token(jnp.asarray(logits)), np.argmax(logits, axis=-1)
    )
    assert generation.best_token(jnp.full((1, 40), jnp.nan)).tolist() == [40]
