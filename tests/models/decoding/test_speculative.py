"""Speculative decoding: the same greedy tokens, and the same distribution of sampled ones."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import data, models
from flaxzoo.models.decoders.gemma.gemma3 import Gemma3Config
from flaxzoo.models.decoding import rows, sample
from flaxzoo.models.decoding.generator import sampling_keys
from flaxzoo.models.decoding.speculative import DraftedStates, Proposed, speculate, verify

from ...support.requests import beams, sampled

GREEDY = models.Sampling(temperature=0.0)
SMALL = {"vocab_size": 29, "max_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 2}
FAMILIES = {
    "gpt2": models.GPTConfig(**SMALL),
    "alibi": models.GPTConfig(**SMALL, positions="alibi"),
    "gemma3": Gemma3Config(**SMALL, d_ff=16, d_head=8, window=3),  # rings beside whole caches
}


def made(config, seed=0, scale=3.0):
    """A model with parameters so large that its best tokens differ."""
    model = models.create(config)
    params = jax.jit(model.init)(jax.random.key(seed), np.ones((1, 1), np.int32))["params"]
    return model, jax.tree.map(lambda x: x * scale, params)


def stream(generator, prompts, request, **options):
    return np.concatenate(list(generator.stream(prompts, request, **options)), axis=1)


@pytest.fixture(scope="module")
def poor():
    """A draft model that knows nothing of the models, and reads less than they."""
    return models.Draft(*made(models.GPTConfig(**{**SMALL, "max_length": 9}), 3), num_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_model_alone(family, poor):
    """Prompts of one token, that fill the context, and longer ones: oldest tokens fall out."""
    model, params = made(FAMILIES[family])
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 29, length).tolist() for length in (1, 5, 16, 40)]
    request = sampled(23, models.Sampling(0.0, repetition_penalty=1.2), banned=[[3], [4, 5]])
    alone = stream(models.Generator(model, params), prompts, request)
    assert len(set(alone.ravel().tolist())) > 4
    for draft in (poor, models.Draft(model, params, 3)):
        generator = models.Generator(model, params, draft=draft)
        assert np.array_equal(stream(generator, prompts, request), alone)
        seen = generator.acceptance
        # Tokens beyond the end of a text or of the context do not count.
        assert seen.calls < seen.proposed <= 3 * seen.calls
        assert (seen.accepted > 0.9 * seen.proposed) == (draft is not poor)


def test_each_row_is_what_it_is_alone_and_the_seed_decides(poor):
    model, params = made(FAMILIES["gpt2"])
    generator = models.Generator(model, params, draft=poor)
    request = sampled(12, models.Sampling(0.8, top_k=9))
    prompts = [[1, 2, 3], [4], [5, 6]]
    together = stream(generator, prompts, request, seed=4)
    assert together.shape == (3, 12)
    assert np.array_equal(stream(generator, prompts[:1], request, seed=4), together[:1])
    assert not np.array_equal(stream(generator, prompts[:1], request, seed=5), together[:1])


def test_log_probabilities_are_the_models_own(poor):
    model, params = made(FAMILIES["gpt2"])
    generator = models.Generator(model, params, draft=poor)
    keys = sampling_keys(0, 1)
    batch = generator.continuous_batch([[1, 2]], sampled(9), keys=keys, limits=[9], num_rows=1)
    written = list(batch)
    tokens = np.array([[token for new in written for token in new.tokens]])
    log_probs = np.array([[x for new in written for x in new.log_probs]])
    ids = np.concatenate([[[1, 2]], tokens], axis=1)
    logits = model.apply({"params": params}, ids).logits
    every = np.asarray(jax.nn.log_softmax(logits[:, 1:-1]))
    expected = np.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def chi_square(counts, probabilities):
    """Pearson's statistic, and its degrees of freedom; cells below 5 expected are joined."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    joined = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    joined, expected = joined[expected > 0], expected[expected > 0]
    return ((joined - expected) ** 2 / expected).sum(), len(joined) - 1


def is_likely(counts, probabilities):
    """Whether the statistic is within four standard deviations of its mean."""
    statistic, freedom = chi_square(counts, probabilities)
    return statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_verified_tokens_have_the_distribution_of_the_model():
    """Two proposals in a vocabulary of 5: the first two tokens of 20,000 rows, by their keys."""
    draw, number = np.random.default_rng(0), 20_000
    p, q = draw.dirichlet(np.full(5, 0.7), 3), draw.dirichlet(np.full(5, 0.7), 2)
    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), (number, 5))
    proposed = jax.vmap(jax.vmap(jax.random.categorical, in_axes=(0, 0)), in_axes=(0, None))(
        keys[:, :2], jnp.log(jnp.asarray(q, jnp.float32))
    )

    def of_rows(x):
        return jnp.broadcast_to(jnp.asarray(x, jnp.float32), (number, *x.shape))

    accepted, last = jax.jit(verify)(of_rows(p), Proposed(proposed, of_rows(q)), keys[:, 2:])
    accepted, last, proposed = (np.asarray(x) for x in (accepted, last, proposed))
    assert set(accepted.tolist()) == {0, 1, 2}
    first = np.where(accepted == 0, last, proposed[:, 0])
    assert is_likely(np.bincount(first, minlength=5), p[0])
    second = np.where(accepted == 1, last, proposed[:, 1])[accepted > 0]
    assert is_likely(np.bincount(second, minlength=5), p[1])
    third = last[accepted == 2]
    assert is_likely(np.bincount(third, minlength=5), p[2])
    assert not is_likely(np.bincount(proposed[:, 0], minlength=5), p[0])  # the test can fail
    rate = np.minimum(p[0], q[0]).sum()  # Leviathan et al. 2023, section 3.1
    assert abs((accepted > 0).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / number)


@pytest.mark.slow
def test_sampled_texts_have_the_distribution_of_the_model():
    """Texts of three tokens of a vocabulary of 5, in 4,000 rows: the joint probabilities."""
    small = {"vocab_size": 5, "max_length": 8, "d_model": 8, "num_layers": 1, "num_heads": 1}
    config, number = models.GPTConfig(**small), 4_000
    pairs = [models.unstack_layers(*made(config, seed, 6.0)) for seed in (0, 1)]
    method, banned = models.Sampling(0.8, top_p=0.9, repetition_penalty=1.3), ((2, 2),)
    sampling = sample.sampling_params(method, 5, banned=banned)
    # All rows have the tokens 1 and 2, of which the first was read.
    ones = jnp.ones((number,), jnp.int32)
    caches = []
    for back, pair in enumerate(pairs):
        cache = rows.RowCaches.empty(pair[0], 0 * ones, length=8, spare=2)
        _, cache = cache.read(*pair, ones[:, None])
        caches.append(cache.moved_to(cache.cache.index - back))
    state = DraftedStates(
        caches[0],
        2 * ones,
        sample.History(
            jnp.broadcast_to(jnp.isin(jnp.arange(5), jnp.array([1, 2])), (number, 5)),
            2 * ones[:, None],
            jax.random.split(jax.random.key(0, impl="threefry2x32"), number),
            0 * ones,
        ),
        caches[1],
        1 * ones,
    )
    live = ones == 1
    texts = [[] for _ in range(number)]
    for _ in range(3):
        state, new = speculate(
            *pairs[0],
            state,
            live,
            draft_model=pairs[1][0],
            draft_params=pairs[1][1],
            sampling=sampling,
            num_tokens=2,
        )
        for text, tokens, n in zip(texts, *map(np.asarray, (new.tokens, new.lengths)), strict=True):
            text.extend(tokens[:n].tolist())
    lengths = np.array([len(text) for text in texts])
    assert set(lengths.tolist()) == set(range(3, 10))
    counts = np.bincount(np.array([text[:3] for text in texts]) @ [25, 5, 1], minlength=125)

    triples = np.array(list(itertools.product(range(5), repeat=3)))
    ids = np.concatenate([np.tile([[1, 2]], (len(triples), 1)), triples], axis=1)
    logits = pairs[0][0].apply({"params": pairs[0][1]}, ids).logits
    probabilities = np.ones(len(triples))
    for i in range(3):
        past = ids[:, : 2 + i]
        seen = np.zeros((len(triples), 5), bool)
        np.put_along_axis(seen, past, values=True, axis=1)
        before = sample.History(jnp.asarray(seen), jnp.asarray(past[:, -1:]), None, None)
        scores = sample.processed_logits(logits[:, 1 + i], before, sampling=sampling)
        chosen = np.asarray(jax.nn.softmax(scores))[np.arange(len(triples)), triples[:, i]]
        probabilities *= chosen
    assert np.isclose(probabilities.sum(), 1, atol=1e-5)
    assert (counts[probabilities == 0] == 0).all()
    assert is_likely(counts, probabilities)


@pytest.mark.parametrize("number", [1, 3])
def test_a_token_of_each_row_copies_no_cache(number):
    """Neither copies of whole caches nor selections among them: writes go into their slots."""
    small = {**SMALL, "num_layers": 1, "max_length": 97}
    model, params = models.unstack_layers(*made(models.GPTConfig(**small)))
    nothing = jnp.zeros((number,), jnp.int32)
    state = rows.RowStates(
        rows.RowCaches.empty(model, nothing, length=97),
        nothing,
        sample.History(None, nothing[:, None][:, :0], sampling_keys(0, number), nothing),
    )
    sampling = sample.sampling_params(GREEDY, 29)
    lowered = rows.advance_rows.lower(
        model, params, state, nothing == 0, sampling=sampling, num_tokens=1
    )
    program = lowered.compile().as_text()
    whole = rf"= f32\[(?:{number},)?(?:1,)?2,(?:8,97|97,8)\]\S* "
    assert re.search(whole + r"fusion\(|" + whole + r"dynamic-update-slice\(", program)
    assert not re.search(whole + r"(?:copy|select)\(", program)


def test_generate_takes_an_assistant_as_transformers_does(poor):
    model, params = made(FAMILIES["gpt2"])
    options = {"max_new_tokens": 9, "eos_token_id": 7}
    alone = models.generate(model, params, [[1, 2, 3], [4]], **options)
    helped = models.generate(
        model,
        params,
        [[1, 2, 3], [4]],
        assistant_model=(poor.model, poor.params),
        num_assistant_tokens=3,
        **options,
    )
    assert np.array_equal(alone, helped)


def test_an_end_in_the_middle_of_a_draft_ends_the_text():
    """The draft model is the model itself, so that the end is proposed, and others behind it."""
    model, params = made(FAMILIES["gpt2"])
    whole = models.generate(model, params, [[1, 2, 3]], max_new_tokens=9)[0, 3:].tolist()
    end = next(token for i, token in enumerate(whole) if i and token not in whole[:i])
    alone = models.generate(model, params, [[1, 2, 3]], max_new_tokens=9, eos_token_id=end)
    helped = models.generate(
        model,
        params,
        [[1, 2, 3]],
        max_new_tokens=9,
        eos_token_id=end,
        assistant_model=(model, params),
    )
    assert np.array_equal(alone, helped)
    assert helped[0, -1] == end
    assert helped.shape[1] == 3 + whole.index(end) + 1 < 12


@pytest.mark.parametrize(
    ("changes", "number", "message"),
    [
        ({"vocab_size": 30}, 3, "vocabulary .*30 .* 29"),
        ({"head_convolution": 3}, 3, "draft model .*head_convolution"),
        ({"num_experts": 4}, 3, "draft model .*num_experts 4"),
        ({"max_length": 5}, 4, "5 tokens .*propose 4 .*3"),
        ({}, 0, "num_assistant_tokens.* 0"),
    ],
)
def test_drafts_that_cannot_be_are_refused(changes, number, message):
    model = models.create(FAMILIES["gpt2"])
    config_class = models.LectureGPTConfig if "head_convolution" in changes else models.GPTConfig
    other = models.create(config_class(**vars(FAMILIES["gpt2"]) | changes))
    with pytest.raises(data.UserError, match=message):
        models.Draft(other, {}, number).check(model)


def test_a_beam_search_takes_no_draft(poor):
    generator = models.Generator(*made(FAMILIES["gpt2"]), draft=poor)
    with pytest.raises(data.UserError, match="beam search"):
        generator.search([[1]], beams(max_new_tokens=3))
    with pytest.raises(data.UserError, match="num_beams 4"):
        next(generator.stream([[1]], beams(max_new_tokens=3)))
    with pytest.raises(data.UserError, match="assistant_model"):
        models.generate(*made(FAMILIES["gpt2"]), [[1]], num_assistant_tokens=3)
    with pytest.raises(data.UserError, match=r"assistant_model .*GPT"):
        models.generate(*made(FAMILIES["gpt2"]), [[1]], assistant_model=poor.model)


def test_a_continuous_batch_has_rows_and_limits_and_forgets_texts_that_are_stopped():
    generator = models.Generator(*made(FAMILIES["gpt2"]))

    def batch(*, num_rows: int = 1, limits: tuple[int, ...] = (3, 3), keys: int = 2):
        return generator.continuous_batch(
            [[1], [2, 3]],
            sampled(3, GREEDY),
            keys=sampling_keys(0, keys),
            limits=limits,
            num_rows=num_rows,
        )

    for wrong in (lambda: batch(num_rows=0), lambda: batch(limits=(3, 0))):
        with pytest.raises(data.UserError, match="at least 1"):
            wrong()
    for wrong in (lambda: batch(keys=1), lambda: batch(limits=(3,))):
        with pytest.raises(data.UserError, match="every prompt"):
            wrong()
    texts = batch()
    texts.stop(1)  # it waits for the only row
    assert {written.text for written in texts} == {0}
