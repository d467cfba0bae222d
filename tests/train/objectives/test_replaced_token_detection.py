"""Replaced-token detection: both losses, what each model learns from, and whole runs."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import data, models, train
from flaxzoo.data import UserError
from flaxzoo.models.config import Execution
from flaxzoo.models.encoders.deberta.deberta import DebertaConfig
from flaxzoo.models.encoders.electra import ElectraConfig
from flaxzoo.models.heads.outputs import Projection
from flaxzoo.train.engine.sharded_step import make_init
from flaxzoo.train.engine.train_step import make_train_step
from flaxzoo.train.losses.objective import joined
from flaxzoo.train.objectives.replaced_token_detection import (
    EMBEDDINGS,
    GENERATOR,
    ReplacedTokenConfig,
    generator_config,
    sampled_tokens,
)
from flaxzoo.train.optim.ema import ema_of
from flaxzoo.train.optim.optimizer import make_optimizer

from ...support.run_folders import assert_same, everything, write_text

V, T, B, M = 16, 8, 4, 3
SIZES = {"vocab_size": V, "max_length": T, "num_layers": 1, "d_model": 16, "num_heads": 4}
VOCABULARY = data.TokenizerConfig(kind="wordpiece", vocab_size=64)
DATA = data.PretrainingData(
    source="builtin:python-docs", length=T, next_sentence=False, tokenizer=VOCABULARY
)
RNG = np.random.default_rng(0)
LENGTHS = np.array([8, 8, 5, 3])
MASK = (np.arange(T) < LENGTHS[:, None]).astype(np.int32)
WEIGHTS = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]], np.int32)
ORIGINAL = RNG.integers(3, V, (B, T)).astype(np.int32) * MASK
PLACES = np.array([[1, 4, 6], [0, 2, 7], [3, 4, 0], [2, 0, 0]], np.int32)
MASKED_IDS = ORIGINAL.copy()
MASKED_IDS[np.arange(B)[:, None].repeat(M, 1)[WEIGHTS > 0], PLACES[WEIGHTS > 0]] = 2
GIVEN = {
    "input_ids": MASKED_IDS,
    "attention_mask": MASK,
    "token_type_ids": np.zeros((B, T), np.int32),
    "masked_positions": PLACES,
    "masked_labels": np.take_along_axis(ORIGINAL, PLACES, axis=1) * WEIGHTS,
    "masked_weights": WEIGHTS,
}
BATCH = {name: jnp.asarray(x) for name, x in GIVEN.items()}


def made(config, **fields):
    """The model's `apply`, the objective, and all parameters."""
    learned = ReplacedTokenConfig(**fields)
    objective = learned.with_models(learned.build(DATA), config, Execution())
    model = models.create(config)
    params = models.init_params(model, jax.random.key(0))
    auxiliary, _ = objective.initial_models(jax.random.key(1))
    return model.apply, objective, joined(params, auxiliary)


@pytest.mark.slow
def test_both_losses_and_who_learns_from_which():
    config = ElectraConfig(**SIZES, dropout_rate=0.0)
    apply, objective, params = made(config)
    generator = models.create(generator_config(config, 0.25))
    assert (generator.config.d_model, generator.config.num_heads) == (4, 1)
    assert generator.config.d_embedding == 16
    own = params["auxiliary"][GENERATOR]
    assert not own.keys() & set(EMBEDDINGS)
    keys = models.row_keys(jax.random.key(2), B)
    run = jax.jit(lambda params, batch: objective.apply(apply, params, batch, rng=keys))
    outputs, terms = run(params, BATCH)

    # The generator reads the masks and predicts with the model's embeddings.
    shared = {name: params[name] for name in EMBEDDINGS}
    inputs = {name: BATCH[name] for name in BATCH if name not in ("masked_labels",)}
    del inputs["masked_weights"]
    logits = jax.jit(generator.apply)({"params": {**own, **shared}}, **inputs).logits
    nll = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), BATCH["masked_labels"][..., None], axis=-1
    )[..., 0]
    np.testing.assert_allclose(terms["masked_token"], jnp.sum(nll * WEIGHTS), rtol=1e-5)

    # Only masked tokens may be replaced; the loss is over all real ones.
    replaced = np.asarray(outputs.replaced)
    chosen = np.zeros((B, T))
    for row, position in zip(*np.nonzero(WEIGHTS), strict=True):
        chosen[row, PLACES[row, position]] = 1
    assert (replaced <= chosen).all()
    assert replaced.sum() > 0
    p = np.asarray(jax.nn.sigmoid(outputs.logits), np.float64)
    loss = -np.where(replaced > 0, np.log(p), np.log1p(-p))
    np.testing.assert_allclose(terms["replaced_token"], (loss * MASK).sum(), rtol=1e-5)
    counts = objective.counts(BATCH)
    assert (counts["masked_token"], counts["replaced_token"]) == (WEIGHTS.sum(), MASK.sum())

    def gradients(term):
        return jax.grad(lambda params: objective.apply(apply, params, BATCH, rng=keys)[1][term])(
            params
        )

    def learns(tree):
        return any(np.any(x != 0) for x in jax.tree.leaves(tree))

    masked, detection = gradients("masked_token"), gradients("replaced_token")
    for name in EMBEDDINGS:
        assert learns(masked[name])
        assert learns(detection[name])
    assert learns(masked["auxiliary"])
    assert not learns(detection["auxiliary"])
    assert learns(detection["layers"])
    assert not learns(masked["layers"])
    # An evaluation samples the same tokens for a batch each time.
    evaluated = jax.jit(lambda params, batch: objective.apply(apply, params, batch)[1]["replaced"])
    assert evaluated(params, BATCH) == evaluated(params, BATCH)


def test_a_sample_that_equals_the_original_counts_as_original():
    """A certain generator predicts a wrong token at the first mask of each row, and no other."""
    learned = ReplacedTokenConfig()
    objective = learned.with_models(learned.build(DATA), ElectraConfig(**SIZES), Execution())
    certain = np.array(BATCH["masked_labels"])
    certain[:, 0] = (certain[:, 0] + 1) % V
    projection = Projection(1000 * jax.nn.one_hot(certain, V), jnp.eye(V))
    scores, given = RNG.normal(size=(B, T)).astype(np.float32), {}

    def discriminator(**inputs):
        given.update(inputs)
        return SimpleNamespace(logits=jnp.asarray(scores))

    run = {
        GENERATOR: lambda **inputs: SimpleNamespace(projection=projection),
        "model": discriminator,
    }
    outputs = objective.forward(run, BATCH, models.row_keys(jax.random.key(0), B))
    first = np.arange(B), PLACES[:, 0]
    ids, replaced = ORIGINAL.copy(), np.zeros((B, T))
    ids[first], replaced[first] = certain[:, 0], 1
    np.testing.assert_array_equal(given["input_ids"], ids)
    np.testing.assert_array_equal(outputs.replaced, replaced)
    # Each of the four wrong predictions has a loss of 1,000 nats.
    terms, counts = objective.terms(outputs, BATCH), objective.counts(BATCH)
    means = {name: float(terms[name] / counts[name]) for name in objective.coefficients}
    detected = np.where(replaced, np.log1p(np.exp(-scores)), np.log1p(np.exp(scores)))
    assert means["masked_token"] == pytest.approx(4 * 1000 / WEIGHTS.sum(), rel=1e-5)
    assert means["replaced_token"] == pytest.approx((detected * MASK).sum() / MASK.sum(), rel=1e-5)
    assert objective.coefficients == {"masked_token": 1, "replaced_token": 50}


def disentangled(**settings):
    """The model, objective, optimizer and initial state of a run with disentangled embeddings."""
    config = ElectraConfig(**SIZES, dropout_rate=0.0)
    learned = ReplacedTokenConfig(embeddings="disentangled", generator_size=0.5)
    objective = learned.with_models(learned.build(DATA), config, Execution())
    model = models.create(config)
    tx = make_optimizer(train.OptimizerConfig(peak_learning_rate=1e-2, **settings), 3)
    return model, objective, tx, jax.jit(make_init(model, objective, tx))(jax.random.key(0))


@pytest.mark.slow
def test_disentangled_embeddings_are_a_sum_of_which_each_model_trains_a_part():
    """Three steps equal those of a model that stores the difference, E = stop(G) + Δ."""
    model, objective, tx, state = disentangled(weight_decay=0.1)
    for name in EMBEDDINGS:
        own, other = (x[name]["embedding"] for x in (state.params, tables_of(state)))
        np.testing.assert_array_equal(own, other)
    step = jax.jit(make_train_step(model.apply, objective, tx))

    def summed(parts):
        tables = {
            name: jax.tree.map(lambda g, d: jax.lax.stop_gradient(g) + d, generator, parts[name])
            for name, generator in parts["auxiliary"][GENERATOR].items()
            if name in EMBEDDINGS
        }
        return {**parts, **tables}

    def loss(parts, batch, keys):
        means = objective.apply(model.apply, summed(parts), batch, rng=keys)[1]
        counts = objective.counts(batch)
        return sum(c * means[n] / counts[n] for n, c in objective.coefficients.items())

    parts = joined(state.params, state.auxiliary)
    parts |= {name: jax.tree.map(jnp.zeros_like, parts[name]) for name in EMBEDDINGS}
    by_formula = jax.jit(jax.value_and_grad(loss))
    moments, key = tx.init(parts), jax.random.key(1)
    for number in range(3):
        state, metrics = step(state, BATCH, key)
        keys = models.row_keys(jax.random.fold_in(key, number), B)
        expected, gradient = by_formula(parts, BATCH, keys)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        norm = optax.tree.norm(gradient)
        np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
        updates, moments = tx.update(gradient, moments, parts)
        parts = optax.apply_updates(parts, updates)
    found = joined(state.params, state.auxiliary)
    for (path, ours), (_, wanted) in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(summed(parts)), strict=True
    ):
        np.testing.assert_allclose(ours, wanted, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    difference = state.params["token_embedding"]["embedding"]
    difference -= tables_of(state)["token_embedding"]["embedding"]
    assert np.abs(difference).max() > 1e-3


@pytest.mark.slow
def test_the_average_of_disentangled_embeddings_is_one_of_parameters():
    model, objective, tx, state = disentangled(ema_decay=0.75)
    step, expected = jax.jit(make_train_step(model.apply, objective, tx)), ema_of(state.opt_state)
    for _ in range(2):
        state, _ = step(state, BATCH, jax.random.key(1))
        found = joined(state.params, state.auxiliary)
        expected = jax.tree.map(lambda old, x: 0.75 * old + 0.25 * x, expected, found)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ema_of(state.opt_state), expected
    )


def test_followed_embeddings_begin_at_those_of_the_model():
    config = ElectraConfig(**SIZES)
    learned = ReplacedTokenConfig(embeddings="disentangled", generator_size=0.5)
    objective = learned.with_models(learned.build(DATA), config, Execution())
    params = {name: {"embedding": jnp.full((2, 2), 3.0)} for name in EMBEDDINGS}
    auxiliary = {GENERATOR: {**jax.tree.map(jnp.zeros_like, params), "layers": jnp.zeros(3)}}
    begun = objective.with_followed(auxiliary, params)[GENERATOR]
    assert all((begun[name]["embedding"] == 3).all() for name in EMBEDDINGS)
    assert (begun["layers"] == 0).all()


def tables_of(state):
    """The generator's parameters."""
    return state.auxiliary[GENERATOR]


def test_samples_follow_the_softmax():
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    hidden, kernel = jnp.ones((4000, 2, 1)), jnp.asarray(logits[:, None])
    keys = jax.random.split(jax.random.key(0), 4000)
    found = np.asarray(sampled_tokens(Projection(hidden, kernel), keys))
    expected = np.exp(logits) / np.exp(logits).sum()
    for position in range(2):
        np.testing.assert_allclose(np.bincount(found[:, position]) / 4000, expected, atol=0.03)
    assert (found[:, 0] != found[:, 1]).any()


@pytest.mark.slow
def test_the_sizes_of_generators():
    with pytest.raises(UserError, match=r"generator_size 0\.25.*BertConfig"):
        generator_config(models.BertConfig(**SIZES), 0.25)
    # Separate embeddings, and a DeBERTa, whose distances are as wide as its layers.
    config = DebertaConfig(**SIZES, head="replaced_token_detection", norm_distances=True)
    apply, objective, params = made(config, embeddings="separate", generator_size=0.5)
    own = params["auxiliary"][GENERATOR]
    assert own["token_embedding"]["embedding"].shape == (V, 16)
    assert own["distance_embedding"]["embedding"].shape == (2 * T, 8)
    _, terms = jax.jit(lambda params, batch: objective.apply(apply, params, batch))(params, BATCH)
    assert np.isfinite(terms["replaced_token"])
    with pytest.raises(UserError, match="next_sentence"):
        ReplacedTokenConfig().check(dataclasses.replace(DATA, next_sentence=True))


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_a_run_resumes_and_is_evaluated_and_exported(tmp_path):
    file = write_text(tmp_path / "text.txt")
    config = train.TrainConfig(
        model=ElectraConfig(**{**SIZES, "max_length": 16}),
        data=data.PretrainingData(
            source=f"text:{file}#block",
            validation_fraction=0.1,
            length=16,
            next_sentence=False,
            tokenizer=VOCABULARY,
        ),
        objective=ReplacedTokenConfig(),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=1),
        batch_size=8,
        steps=2,
        checkpoint_every=1,
        evaluate_every=2,
    )
    whole, killed = tmp_path / "run", tmp_path / "killed"
    result = train.train(config, whole, quiet=True)
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "2")
    (killed / "report.md").unlink()
    train.train(config, killed, quiet=True)
    assert_same(everything(killed, 2), everything(whole, 2))
    scores = train.score_run(whole, log=lambda line: None)
    assert result.validation is not None
    for name in ("loss", "masked_token", "replaced_token", "detection_accuracy"):
        assert scores[name] == pytest.approx(result.validation[name], rel=1e-5)
    model, params = models.load(whole)
    assert model.config.head == "replaced_token_detection"
    assert "auxiliary" not in params
    # The generator alone, with the tables of both.
    train.export_model(whole, tmp_path / "generator", generator=True)
    model, generator = models.load(tmp_path / "generator")
    assert (model.config.head, model.config.d_model) == ("masked_lm", 4)
    for name in ("token_embedding", "position_embedding"):
        assert_same(generator[name], params[name])
