"""What the order of tokens means to a model: nothing, unless something tells their positions.

Bloem, "Machine Learning at VU", lecture 10; Borealis AI, "Transformers I", section 4.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models
from flaxzoo.data import TokenizerConfig, train_tokenizer
from flaxzoo.data.sources.builtin.reviews import template_reviews
from flaxzoo.models.lectures.attention import LectureAttention
from flaxzoo.models.lectures.lecture_bert import LectureBertLayer
from flaxzoo.models.lectures.positions import LecturePositions
from flaxzoo.models.nn.attention import AttentionContext, MultiHeadAttention
from flaxzoo.models.nn.layers import FeedForward, LayerNorm
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.models.nn.stack import LayerInputs, make_layer_context

RNG = np.random.default_rng(0)
IDS = RNG.integers(5, 29, (3, 12))
MASK = (np.arange(12) < [[12], [7], [3]]).astype(np.int32)
CLASSIFIER = {"head": "sequence_classification", "labels": ("no", "yes"), "num_token_types": 0}


@pytest.mark.parametrize("attends", [True, False])
def test_only_attention_carries_information_between_tokens(tiny, attends):
    """In a block with norms before its sublayers, as in each block of a transformer."""
    made = tiny("gpt", norm_position="pre")
    params, (changed, later) = made.params, (3, slice(4, None))
    if not attends:
        silent = jax.tree.map(jnp.zeros_like, params["layers"]["attention"])
        params = {**params, "layers": {**params["layers"], "attention": silent}}
    other = IDS.copy()
    other[:, changed] = (other[:, changed] + 1) % 29
    before, after = (
        np.asarray(made.model.apply({"params": params}, input_ids=ids).logits)
        for ids in (IDS, other)
    )
    assert np.abs(after - before)[:, changed].max() > 1e-3
    assert (np.abs(after - before)[:, later].max() > 1e-3) == attends


@pytest.fixture
def classifier(tiny):
    """`classifier(**fields)`: a tiny classifier of sequences without token types."""
    return lambda **fields: tiny("lecture_bert", **{**CLASSIFIER, **fields})


def shuffled(rng):
    """The real tokens of each sequence in another order, with the padding where it was."""
    ids = IDS.copy()
    for row, n in enumerate(MASK.sum(axis=1)):
        ids[row, :n] = ids[row, rng.permutation(n)]
    return ids


BLIND = {
    "bag": {"num_layers": 0, "pooling": "max"},
    "simple": {"attention": "simple", "pooling": "mean"},
    "blocks": {"pooling": "mean"},
    "blocks, max": {"pooling": "max"},
}


@pytest.mark.parametrize("name", BLIND)
def test_logits_are_the_same_for_any_order(classifier, name):
    model = classifier(positions="none", **BLIND[name])
    logits, rng = model.logits(input_ids=IDS, attention_mask=MASK), np.random.default_rng(1)
    assert np.ptp(logits, axis=0).max() > 1e-3  # other words have other logits
    for _ in range(5):
        other = model.logits(input_ids=shuffled(rng), attention_mask=MASK)
        np.testing.assert_allclose(other, logits, rtol=0, atol=1e-6)


def test_the_man_ate_the_fish_as_the_fish_ate_the_man(classifier):
    """The same words: the same label without positions, and another one is possible with them."""
    man, fish = np.array([[5, 6, 7, 5, 8]]), np.array([[5, 8, 7, 5, 6]])
    for positions, differ in (("none", False), ("learned", True)):
        model = classifier(positions=positions, pooling="mean")
        change = np.abs(model.logits(input_ids=man) - model.logits(input_ids=fish)).max()
        assert change > 1e-3 if differ else change < 1e-6


KINDS = {
    "learned": {},
    "sinusoidal": {},
    "rotary": {},
    "relative": {},
    "buckets": {},
    "alibi": {},
    "counter": {},
    "binary": {},
    "table": {"position_table": tuple(RNG.normal(size=16 * 16).tolist())},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_position_breaks_it(classifier, kind):
    model = classifier(positions=kind, pooling="mean", num_layers=1, **KINDS[kind])
    logits = model.logits(input_ids=IDS, attention_mask=MASK)
    other = model.logits(input_ids=shuffled(np.random.default_rng(1)), attention_mask=MASK)
    assert np.abs(other - logits).max() > 1e-4


@pytest.mark.parametrize("attention", ["simple", "learned"])
@pytest.mark.parametrize("part", ["attention", "block"])
def test_a_permuted_input_gives_the_permuted_output(tiny, attention, part):
    model = tiny("lecture_bert", attention=attention, num_layers=1)
    config, execution = model.config, model.execution
    mask = AttentionMask(9, 9).materialized()
    params = jax.tree.map(lambda x: x[0], model.params["layers"])

    @jax.jit
    def apply(x):
        if part == "attention":
            module = LectureAttention(config, execution, None)
            context = AttentionContext(mask, LecturePositions())
            return module.apply({"params": params.get("attention", {})}, x, context)[0]
        context = make_layer_context(
            config, execution, mask, cache=None, rng=None, output_attentions=False,
            positions=LecturePositions(),
        )  # fmt: skip
        layer = LectureBertLayer(config, execution)
        return layer.apply({"params": params}, x, LayerInputs(0, None), context)[0]

    x, order = jnp.asarray(RNG.normal(size=(2, 9, 16)), jnp.float32), RNG.permutation(9)
    np.testing.assert_allclose(apply(x[:, order]), apply(x)[:, order], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_only_attention_carries_information_over_time(tiny):
    """Without it the second output depends on the second input alone."""
    model = tiny("bert", num_layers=1)
    config, execution = model.config, model.execution
    params = jax.tree.map(lambda x: x[0], model.params["layers"])
    mask = AttentionMask(4, 4).materialized()
    x = jnp.asarray(RNG.normal(size=(1, 4, 16)), jnp.float32)
    parts = {
        "feed_forward": lambda p, x: FeedForward(config, execution, None).apply(p, x),
        "attention_norm": lambda p, x: LayerNorm(config, execution).apply(p, x),
        "attention": lambda p, x: MultiHeadAttention(config, execution, None).apply(
            p, x, AttentionContext(mask)
        )[0],
    }
    for name, apply in parts.items():
        second = jax.jacobian(lambda x, a=apply, n=name: a({"params": params[n]}, x)[0, 1])(x)
        reaches = np.abs(second).max(axis=(0, 1, 3)) > 1e-9  # from each of the four inputs
        expected = [True] * 4 if name == "attention" else [False, True, False, False]
        assert reaches.tolist() == expected


def test_parameters_do_not_depend_on_the_length():
    sizes = {"vocab_size": 29, "num_layers": 1, "d_model": 16, "num_heads": 4, "positions": "none"}
    short, long = (
        jax.eval_shape(
            lambda n=n: models.init_params(
                models.create(models.BertConfig(max_length=n, **sizes)), jax.random.key(0)
            )
        )
        for n in (8, 8000)
    )
    assert jax.tree.map(jnp.shape, short) == jax.tree.map(jnp.shape, long)
    assert "position_embedding" not in short


# Pooling.


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_padding_is_not_pooled(classifier, assert_close, pooling):
    model = classifier(pooling=pooling)
    assert set(model.params) >= {"layers", "head"}
    assert "pooler" not in model.params
    padded = model(input_ids=IDS, attention_mask=MASK)
    for row, n in enumerate(MASK.sum(axis=1)):
        hidden = np.asarray(padded.last_hidden_state)[row, :n]
        pooled = hidden.mean(axis=0) if pooling == "mean" else hidden.max(axis=0)
        assert_close(padded.body.pooler_output[row], pooled)
        assert_close(padded.logits[row], model.logits(input_ids=IDS[row : row + 1, :n])[0])


def test_what_cannot_be_pooled_is_refused(classifier):
    sizes = {"vocab_size": 8, "max_length": 8, "num_layers": 1, "d_model": 16, "num_heads": 4}
    with pytest.raises(ValueError, match=r"pooling 'mean' .*sequence_classification"):
        models.BertConfig(**sizes, pooling="mean", head="masked_lm")
    model = classifier(pooling="mean").model
    per_query = np.ones((3, 12, 12), bool)
    with pytest.raises(ValueError, match=r"tokens .*real"):
        model.init(jax.random.key(0), IDS, per_query, position_ids=np.arange(12)[None])


def test_another_head_pools_the_first_token():
    sizes = {"vocab_size": 8, "max_length": 8, "num_layers": 1, "d_model": 16, "num_heads": 4}
    config = models.BertConfig(**sizes, **CLASSIFIER, pooling="mean")
    assert config.with_head("multiple_choice", ()).pooling == "cls"
    assert config.with_head("sequence_classification", ("a", "b")).pooling == "mean"


def test_a_model_without_layers(classifier, assert_close):
    stacked = classifier(num_layers=0, pooling="max")
    assert not [name for name in stacked.params if name.startswith("layers")]
    assert_close(
        classifier(num_layers=0, pooling="max", layers="separate").logits(input_ids=IDS),
        stacked.logits(input_ids=IDS),
    )
    out = stacked(input_ids=IDS, output_attentions=True)
    assert out.attentions is None
    sizes = {"vocab_size": 8, "max_length": 8, "d_model": 16, "num_heads": 4}
    with pytest.raises(ValueError, match=r"num_layers must .*0"):
        models.GPTConfig(**sizes, num_layers=0)
    with pytest.raises(ValueError, match=r"num_layers 0 .*cache"):
        models.BertConfig(**sizes, num_layers=0, head="causal_lm")
    with pytest.raises(ValueError, match=r"num_layers .*-1"):
        models.BertConfig(**sizes, num_layers=-1)


@pytest.mark.parametrize("fields", [{"pooling": "max"}, {"positions": "none"}], ids=str)
def test_export_is_refused_by_name(classifier, tmp_path, fields):
    model = classifier(**fields)
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"{name} '{value}'"):
        models.save(tmp_path, model.model, model.params)


# What can be learned.

PARTS = ("plain", "negated", "order")


def accuracies(fields, steps):
    """Trains a classifier on the built-in reviews; its accuracy on the held-out ones by part."""
    trained, held_out = (template_reviews(split) for split in ("train", "validation"))
    tokenizer = train_tokenizer([r.text for r in trained], TokenizerConfig("words"))
    length = 5  # of "not terrible, great."

    def arrays(reviews):
        ids = np.zeros((len(reviews), length), np.int32)
        for row, review in zip(ids, reviews, strict=True):
            # The words that decide, so that it takes seconds.
            text = review.text.split(" was ")[1]
            tokens = tokenizer.encode(text, add_special_tokens=False)
            row[: len(tokens)] = tokens
        return ids, (ids != 0).astype(np.int32), np.array([r.label == "positive" for r in reviews])

    config = models.LectureBertConfig(
        **{"vocab_size": tokenizer.vocab_size, "max_length": length, "d_model": 32, "num_heads": 4},
        **{"dropout_rate": 0.0, "init_std": 0.18, "d_ff": 64, "num_layers": 1},
        **{**CLASSIFIER, "pooling": "mean"},
    )
    model = models.create(models.config_from_dict({**models.config_to_dict(config), **fields}))
    params = models.init_params(model, jax.random.key(0))
    tx = optax.adam(5e-3)

    def logits(params, ids, mask):
        return model.apply({"params": params}, input_ids=ids, attention_mask=mask).logits

    @jax.jit
    def run(params, ids, mask, labels):
        def step(carry, batch):
            def loss(params):
                found = logits(params, *batch[:2])
                return optax.softmax_cross_entropy_with_integer_labels(found, batch[2]).mean()

            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), (ids, mask, labels))[0][0]

    ids, mask, labels = arrays(trained)
    rows = np.random.default_rng(0).integers(0, len(ids), (steps, 64))
    params = run(params, ids[rows], mask[rows], labels[rows].astype(np.int32))
    ids, mask, labels = arrays(held_out)
    right = np.asarray(logits(params, ids, mask)).argmax(axis=1) == labels
    return {part: right[[review.part == part for review in held_out]].mean() for part in PARTS}


@pytest.mark.slow
def test_order_is_learned_with_positions_only():
    """And negation by attention only, not by a mean of words.

    The scores of words add up: if "terrible" is bad, "not terrible" is worse or "not great" good.
    """
    bag = accuracies({"positions": "none", "num_layers": 0}, 200)
    assert (bag["plain"] + bag["negated"]) / 2 < 0.75
    simple = accuracies({"positions": "none", "attention": "simple"}, 250)
    assert min(simple["plain"], simple["negated"]) > 0.95
    assert simple["order"] == bag["order"] == 0.5  # of each pair of reviews exactly one is right
    seeing = accuracies({"positions": "learned"}, 150)
    assert min(seeing.values()) > 0.95


@pytest.mark.slow
def test_an_appended_counter_fails_beyond_the_trained_length():
    """Lecture 003: 1, 2, … 1000 as one more input; then "a sequence with 5000 words"."""
    trained, longer, steps = 1000, 5000, 100
    rng = np.random.default_rng(0)

    def text(length):
        """Returns ids, each of which is followed by one of two others: log 2 nats per token."""
        ids = [0]
        for choice in rng.integers(0, 2, length):
            ids.append((3 * ids[-1] + 1 + choice) % 8)
        return jnp.asarray([ids])

    texts, long_text = jnp.stack([text(trained) for _ in range(8)]), text(longer)

    def losses_by_position(positions, scale):
        sizes = {"vocab_size": 8, "num_layers": 1, "d_model": 16, "num_heads": 2}
        config = models.LectureGPTConfig(
            **sizes, max_length=trained, positions=positions, tie_output=False, dropout_rate=0.0
        )
        params = models.init_params(models.create(config), jax.random.key(0))
        # Embeddings as long as the counter, so that the norm hides neither within 1,000 positions.
        params["token_embedding"]["embedding"] *= scale
        tx = optax.adam(optax.linear_schedule(1e-2, 0, steps))

        def losses(params, ids):
            model = models.create(config.with_max_length(longer))
            logits = model.apply({"params": params}, input_ids=ids[:, :-1]).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])[0]

        @jax.jit
        def step(params, state, ids):
            gradient = jax.grad(lambda p: losses(p, ids).mean())(params)
            updates, state = tx.update(gradient, state)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for i in range(steps):
            params, state = step(params, state, texts[i % 8])
        return np.asarray(jax.jit(losses)(params, long_text))

    # The mean losses of each thousand of positions.
    counted, plain = (
        losses_by_position(*given).reshape(5, trained).mean(axis=1)
        for given in (("appended_counter", 1e4), ("none", 1.0))
    )
    # Inside the trained length both have nearly learned the two successors of each token.
    assert counted[0] == pytest.approx(np.log(2), abs=0.05)
    assert plain == pytest.approx([np.log(2)] * 5, abs=0.05)
    # Beyond it the counter grows, and the norm hides the tokens.
    assert (np.diff(counted) > 0.1).all()
    assert counted[-1] > 2 * counted[0]
