"""Reward models and DPO: by hand, filler, weights; TRL is in parity."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import DPOData, Examples, TokenizerConfig, UserError
from flaxzoo.models.heads.outputs import Projection
from flaxzoo.train.losses.objective import Objective
from flaxzoo.train.runs import run_folder
from flaxzoo.train.runs.custom import Custom

DPOConfig = train.DPOConfig
V, D, T = 7, 5, 4
# log σ(x), negated, of the differences 0, 1 and 2.
BY_HAND = [0.693147, 0.313262, 0.126928]


def rewards(*pairs):
    return SimpleNamespace(logits=jnp.array(pairs, jnp.float32).reshape(-1, 1))


def pairs_mask(real, filler=0):
    mask = jnp.ones((real + filler, 2, T), jnp.int32)
    return mask.at[real:].set(0)


def test_the_loss_of_a_reward_model_by_hand():
    outputs = rewards((3.0, 3.0), (1.0, 0.0), (2.5, 0.5), (jnp.nan, jnp.nan))
    batch = {"attention_mask": pairs_mask(3, filler=1)}
    objective = train.reward()
    assert float(objective.terms(outputs, batch)["preference"]) == pytest.approx(
        sum(BY_HAND), abs=1e-6
    )
    assert set(map(float, objective.counts(batch).values())) == {3.0}  # the last is filler
    terms = objective.terms(outputs, batch)
    assert float(terms["accuracy"]) == 2  # of two equal rewards neither is higher
    assert float(terms["margin"]) == 3
    assert float(terms["mean_reward"]) == pytest.approx(5)
    np.testing.assert_array_equal(objective.predictions(outputs)["rewards"][1], [1.0, 0.0])


def test_margins_add_up_and_centering_is_a_term_of_its_own():
    batch = {"attention_mask": pairs_mask(1), "margin": jnp.array([0.5])}
    terms = train.reward(train.RewardConfig(margin=0.5, centering=0.01)).terms(
        rewards((2.0, 0.0)), batch
    )
    assert float(terms["preference"]) == pytest.approx(BY_HAND[1], abs=1e-6)
    assert float(terms["centering"]) == 4
    assert train.reward(train.RewardConfig(centering=0.01)).coefficients == {
        "preference": 1.0,
        "centering": 0.01,
    }


def test_pairs_of_a_prompt_weigh_as_much_as_the_only_pair_of_another():
    """Of three ranked answers there are three pairs, each with the weight 1/3."""
    outputs = rewards((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (2.0, 0.0))
    batch = {"attention_mask": pairs_mask(4), "pair_weights": jnp.array([1 / 3] * 3 + [1.0])}
    objective = train.reward()
    mean = objective.terms(outputs, batch)["preference"] / objective.counts(batch)["preference"]
    assert float(mean) == pytest.approx((BY_HAND[1] + BY_HAND[2]) / 2, abs=1e-6)


@pytest.fixture(scope="module")
def answers():
    """Outputs for two pairs and their log-probabilities, computed with numpy."""
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(4, T, D)), rng.normal(size=(V, D))
    labels = rng.integers(0, V, (2, 2, T))
    mask = np.array([[[0, 1, 1, 0], [0, 1, 1, 1]], [[0, 0, 1, 0], [1, 1, 0, 0]]])
    logits = hidden @ kernel.T
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    of_labels = np.take_along_axis(log_probs, labels.reshape(4, T, 1), -1)[..., 0]
    outputs = SimpleNamespace(
        projection=Projection(jnp.float32(hidden), jnp.float32(kernel), None),
    )
    batch = {
        "labels": jnp.int32(labels),
        "loss_mask": jnp.int32(mask),
        "attention_mask": pairs_mask(2),
        "reference_log_probs": jnp.array([[-3.0, -4.0], [-2.0, -1.5]]),
    }
    return outputs, batch, (of_labels.reshape(2, 2, T) * mask).sum(-1)


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [
        ("sigmoid", lambda d, _, b: np.log1p(np.exp(-b * d))),
        (
            "robust",
            lambda d, _, b: (
                (0.8 * np.log1p(np.exp(-b * d)) - 0.2 * np.log1p(np.exp(b * d))) / (1 - 0.4)
            ),
        ),
        ("hinge", lambda d, _, b: np.maximum(0, 1 - b * d)),
        ("ipo", lambda _, per_token, b: (per_token - 1 / (2 * b)) ** 2),
    ],
)
def test_each_loss_of_dpo_by_hand(answers, loss, by_hand):
    outputs, batch, log_probs = answers
    smoothing = {"label_smoothing": 0.2} if loss == "robust" else {}
    terms = train.dpo(DPOConfig(beta=0.5, loss_type=loss, **smoothing)).terms(outputs, batch)
    ratios = log_probs - np.array([[-3.0, -4.0], [-2.0, -1.5]])
    difference = ratios[:, 0] - ratios[:, 1]
    per_token = ratios / np.array([[2, 3], [1, 2]])
    expected = by_hand(difference, per_token[:, 0] - per_token[:, 1], 0.5)
    assert float(terms["preference"]) == pytest.approx(expected.sum(), rel=1e-5)
    assert float(terms["rewards/chosen"]) == pytest.approx(0.5 * ratios[:, 0].sum(), rel=1e-5)
    assert float(terms["rewards/margins"]) == pytest.approx(0.5 * difference.sum(), rel=1e-5)
    assert float(terms["rewards/accuracies"]) == (difference > 0).sum()
    assert float(terms["logps/rejected"]) == pytest.approx(log_probs[:, 1].sum(), rel=1e-5)


def test_the_model_that_is_its_own_reference_has_the_loss_of_chance(answers):
    outputs, batch, _ = answers
    objective = train.dpo(DPOConfig(reference="frozen"))
    terms = objective.terms(outputs, batch, outputs)
    assert float(terms["preference"]) / 2 == pytest.approx(np.log(2), rel=1e-6)
    assert float(terms["rewards/margins"]) == 0


def test_a_batch_without_the_reference_names_what_it_lacks(answers):
    outputs, batch, _ = answers
    batch = {name: array for name, array in batch.items() if name != "reference_log_probs"}
    with pytest.raises(UserError, match=r"reference_log_probs.*with_reference"):
        train.dpo().terms(outputs, batch)


def test_filler_may_hold_anything(answers):
    outputs, batch, _ = answers
    bad = {
        **batch,
        "attention_mask": batch["attention_mask"].at[1].set(0),
        "labels": batch["labels"].at[1].set(-1),
        "reference_log_probs": batch["reference_log_probs"].at[1].set(jnp.nan),
    }

    def loss(hidden):
        given = SimpleNamespace(projection=outputs.projection.replace(hidden=hidden))
        return train.dpo().terms(given, bad)["preference"]

    value, gradient = jax.value_and_grad(loss)(outputs.projection.hidden)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert (gradient[2:] == 0).all()
    assert float(train.dpo().counts(bad)["preference"]) == 1


def test_the_texts_of_a_pair_have_dropout_of_their_own():
    keys = jax.random.split(jax.random.key(0), 3)
    seen = []

    def apply_fn(variables, *, rng, **inputs):
        seen.append((rng, inputs["input_ids"].shape))

    batch = {"input_ids": jnp.zeros((3, 2, T), int), "attention_mask": pairs_mask(3)}
    objective: Objective = train.reward()
    objective.outputs(apply_fn, {}, batch, rng=keys)
    [(rng, shape)] = seen
    assert shape == (6, T)
    assert len({tuple(map(int, jax.random.key_data(key))) for key in rng}) == 6


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        (DPOConfig, {"beta": 0.0}, r"beta .* 0\.0"),
        (DPOConfig, {"label_smoothing": 0.1}, r"label_smoothing 0\.1"),
        (DPOConfig, {"loss_type": "robust", "label_smoothing": 0.5}, r"label_smoothing .* 0\.5"),
        (train.RewardConfig, {"centering": -1.0}, r"centering .* -1\.0"),
    ],
)
def test_a_wrong_setting_is_named(config, settings, named):
    with pytest.raises(UserError, match=named):
        config(**settings)


def test_validation_pairs_that_do_not_fit_are_refused_before_the_reference_scores(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        run_folder, "prepared_data", lambda config, log: config.data.with_reference(pytest.fail)
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    config = train.TrainConfig(
        model=models.GPTConfig(vocab_size=1, max_length=8, num_layers=1, d_model=8, num_heads=2),
        data=DPOData(
            source=Examples.of([pair]),
            validation=Examples.of([{**pair, "chosen": "b" * 20}]),
            length=8,
            tokenizer=TokenizerConfig(kind="characters"),
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=0.1),
        batch_size=1,
        steps=1,
    )
    with pytest.raises(UserError, match=r"1 pair .*data\.length"):
        run_folder.prepare_run(config, tmp_path / "run", lambda line: None, Custom())
