"""Scores of continuations, packed and with shared prefixes, against each request by itself."""

import random
import re

import jax
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.data.tokenizers.base import SpecialIds, Tokenizer
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.decoding.padding import pad_rows
from flaxzoo.models.rotary_scaling import RotaryScaling
from flaxzoo.models.text.prompting import continuations

VOCABULARY, LENGTH = 23, 96


class Numbers(Tokenizer):
    """Texts such as " 12 7 3", whose tokens are their numbers."""

    kind, vocab_size, fingerprint = "numbers", VOCABULARY, "numbers"
    special_ids = SpecialIds(bos=0, eos=1)

    def encode_with_offsets(self, text, add_special_tokens=True):
        found = list(re.finditer(r" *\d+", text))
        return [int(match[0]) for match in found], [match.span() for match in found]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f" {id}" for id in ids)

    def token(self, id):
        return str(id)

    def save_vocabulary(self, folder):
        raise NotImplementedError


def scorer_of(config):
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    return models.ContinuationScorer(model, params, Numbers())


SIZES = {
    "vocab_size": VOCABULARY,
    "max_length": LENGTH,
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "init_std": 0.3,
}
CONFIGS = {
    "gpt with bands": models.GPTConfig(**SIZES, local_window=9),
    "gpt, relative": models.GPTConfig(**SIZES, positions="buckets"),
    "gpt, convolved heads": models.LectureGPTConfig(**SIZES, head_convolution=3),
    "llama": LlamaConfig(**SIZES, num_kv_heads=1, d_ff=24),
    "transformer": models.EncoderDecoderConfig(**SIZES, positions="learned"),
}


def drawn(seed, *, long):
    """Return requests: most share the beginning of their context, some all of it, some nothing.

    One context is continued by every token, of which one is the most probable.
    """
    draw = random.Random(seed)

    def ids(low, high):
        return [draw.randrange(2, VOCABULARY) for _ in range(draw.randint(low, high))]

    examples = ids(long, long) if long else []
    requests = []
    for _ in range(4):
        query = [*examples, *ids(1, 9)]
        requests += [(query, ids(1, 4)) for _ in range(draw.randint(1, 3))]
    requests += [(ids(1, 30), ids(1, 12)) for _ in range(4)]
    requests += [requests[0], (examples[:-2] or ids(2, 3), ids(1, 5))]
    requests += [(requests[0][0], [token]) for token in range(VOCABULARY)]
    draw.shuffle(requests)
    return requests


def plain(scorer, requests):
    """Each request in a row of its own, from the whole logits of one plain call."""
    model, params = scorer._model, scorer._params
    contexts, continuations = zip(*requests, strict=True)
    if scorer.is_encoder_decoder:
        ids, mask = pad_rows(contexts)
        targets = pad_rows([[0, *row[:-1]] for row in continuations])[0]
        given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": targets}
        firsts = [0] * len(requests)
    else:
        given = {"input_ids": pad_rows([[*c, *row][:-1] for c, row in requests])[0]}
        firsts = [len(context) - 1 for context in contexts]
    logits = jax.jit(lambda params, given: model.apply({"params": params}, **given).logits)
    log_probs = np.asarray(jax.nn.log_softmax(logits(params, given)))
    for row, first, continuation in zip(log_probs, firsts, continuations, strict=True):
        own = row[first : first + len(continuation)]
        greedy = (own.argmax(-1) == continuation).all()
        yield own[np.arange(len(continuation)), continuation], greedy


def assert_equal(found, expected):
    for score, (own, greedy) in zip(found, expected, strict=True):
        np.testing.assert_allclose(score.log_probabilities, own, atol=1e-5)
        assert score.log_probability == pytest.approx(own.sum(), abs=1e-5)
        assert score.is_greedy == greedy


@pytest.fixture
def counted_tokens(monkeypatch):
    """The number of tokens of all requests, and the number without repeated prefixes."""
    counts, plan = [0, 0], continuations.plan

    def counted(requests, *arguments, **options):
        division = plan(requests, *arguments, **options)
        counts[0] += sum(len(request.inputs) for request in requests)
        counts[1] += division.num_tokens
        return division

    monkeypatch.setattr(continuations, "plan", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_each_request_by_itself(name, monkeypatch, counted_tokens):
    """Drawn lengths, packed and shared; a small capacity gives several rows to each prefix."""
    monkeypatch.setattr(continuations, "CAPACITY", {"cpu": 40})
    scorer = scorer_of(CONFIGS[name])
    requests = drawn(len(name), long=50)
    expected = list(plain(scorer, requests))
    assert any(greedy for _, greedy in expected)
    assert_equal(scorer.score(requests), expected)
    # The counts include the targets of an encoder-decoder, but not its sources.
    given, needed = counted_tokens
    if CONFIGS[name].recent_shapes:  # it never shares
        assert needed == given
    else:
        assert needed < given * (0.9 if scorer.is_encoder_decoder else 0.5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_long_requests_do_not_change_the_frequencies_of_short_ones(kind, counted_tokens):
    factors = {"short_factors": (1.0,) * 4, "long_factors": (2.0, 1.5, 1.2, 3.0)}
    scaling = RotaryScaling(
        kind=kind,
        original_length=12,
        **(factors if kind == "longrope" else {"factor": 4.0}),
    )
    scorer = scorer_of(LlamaConfig(**SIZES, d_ff=24, rope_scaling=scaling))
    context = [2, 5, 7, 9, 3, 4, 8]
    requests = [([*context, *context, 6], [3]), (context, [6, 2]), (context, [5]), ([4], [2])]
    expected = [next(plain(scorer, [request])) for request in requests]
    assert_equal(scorer.score(requests), expected)
    # Requests of the trained length have the same frequencies, so that they share rows.
    counted_tokens[:] = 0, 0
    scorer.score(requests[1:])
    given, needed = counted_tokens
    assert needed < given


def test_scores_on_a_mesh_are_those_of_one_device(monkeypatch):
    monkeypatch.setattr(continuations, "CAPACITY", {"cpu": 40})
    config = CONFIGS["llama"]
    scorer, requests = scorer_of(config), drawn(7, long=50)
    expected = list(plain(scorer, requests))
    mesh = train.make_mesh(train.MeshConfig(data=2, fsdp=4))
    params = scorer._params
    scorer._params = jax.device_put(params, train.parameter_shardings(params, mesh, config))
    assert_equal(scorer.score(requests), expected)


@pytest.fixture(scope="module")
def scorer():
    return scorer_of(models.GPTConfig(**{**SIZES, "max_length": 8, "num_layers": 1}))


def test_spaces_before_a_continuation_belong_to_it(scorer):
    assert scorer.encode_pair(" 3 4  ", "5") == ([3, 4], [5])
    assert scorer.encode_pair("", " 5 6") == ([0], [5, 6])
    assert scorer.encode_pair(" ", "0 6") == ([0], [6])  # the text has its own beginning
    texts = scorer([(" 3 4", " 5"), ("", " 5 6")])
    assert texts == scorer.score([([3, 4], [5]), ([0], [5, 6])])


def test_a_context_that_is_too_long_loses_its_first_tokens(scorer):
    lines = []
    long = [2, 3, 4, 5, 6, 7, 8, 9, 10]
    found = scorer.score([(long, [11, 12]), ([*long[2:]], [11, 12]), ([2], [3])], log=lines.append)
    assert found[0] == found[1]
    assert lines == [
        "1 of 3 contexts are longer than the 8 tokens that the model reads: their first tokens are "
        "left out"
    ]


def test_batches_are_reported(scorer):
    progress = []
    scorer.score([([2, 3], [4]), ([2, 5], [6, 7])], on_batch=lambda *done: progress.append(done))
    assert progress == [(2, 4)]  # 2 is computed once, and the last token not at all
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([], [3]), "request 1 .* context"),
        (([3], []), "request 1 .* continuation"),
        (([3], [99]), "request 1 .* 99 … 99"),
        (([3], list(range(2, 11))), "request 1 .* 9 tokens"),
    ],
)
def test_bad_requests_are_refused(scorer, request_, message):
    with pytest.raises(UserError, match=message):
        scorer.score([request_])


def test_a_model_that_sees_later_tokens_is_refused():
    model = models.create(models.GPTConfig(**SIZES, causal=False))
    with pytest.raises(UserError, match="later tokens"):
        models.ContinuationScorer(model, {}, Numbers()).score([([2], [3])])


def test_buckets_are_few_and_waste_little():
    sizes = range(17, 3000)
    assert all(number <= continuations.bucket(number) < 1.25 * number for number in sizes)
    assert len({continuations.bucket(number) for number in sizes}) < 32
    assert continuations.bucket(1) == 16
