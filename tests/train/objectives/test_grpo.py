"""GRPO, RLOO and their advantages: by hand, filler, limits; TRL is in parity."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import train
from flaxzoo.data import UserError
from flaxzoo.models.heads.outputs import Projection

GRPOConfig = train.GRPOConfig
V, D, T, B = 7, 5, 4, 3
MASK = np.array([[0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
LENGTHS = MASK.sum(-1)


@pytest.fixture(scope="module")
def given():
    """Outputs, a batch whose old policy is another, and the ratios of both by numpy."""
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
    labels = rng.integers(0, V, (B, T))
    logits = hidden @ kernel.T
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)
    log_probs = np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    old = log_probs + rng.normal(size=(B, T)) * 0.4
    reference = log_probs + rng.normal(size=(B, T)) * 0.4
    batch = {
        "labels": jnp.int32(labels),
        "loss_mask": jnp.int32(MASK),
        "attention_mask": jnp.ones((B, T), jnp.int32),
        "advantages": jnp.array([1.0, -0.5, 2.0]),
        "old_log_probs": jnp.float32(old),
        "reference_log_probs": jnp.float32(reference),
    }
    outputs = SimpleNamespace(projection=Projection(jnp.float32(hidden), jnp.float32(kernel), None))
    return outputs, batch, np.exp(log_probs - old), reference - log_probs, entropy


def mean(objective, outputs, batch, name="policy"):
    return float(objective.terms(outputs, batch)[name] / objective.counts(batch)[name])


def test_the_ways_to_average_by_hand(given):
    outputs, batch, ratio, _, entropy = given
    advantages = np.array([1.0, -0.5, 2.0])[:, None]
    per_token = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages) * MASK
    for loss, expected in {
        "dapo": per_token.sum() / MASK.sum(),
        "bnpo": per_token.sum() / MASK.sum(),
        "grpo": (per_token.sum(-1) / LENGTHS).mean(),
    }.items():
        assert mean(train.grpo(GRPOConfig(loss_type=loss)), outputs, batch) == pytest.approx(
            expected, rel=1e-5
        )
    divided = train.grpo(GRPOConfig(loss_type="dr_grpo", max_new_tokens=10))
    assert mean(divided, outputs, batch) == pytest.approx(per_token.sum() / (B * 10), rel=1e-5)
    found = mean(train.grpo(), outputs, batch, "entropy")
    assert found == pytest.approx((entropy * MASK).sum() / MASK.sum(), rel=1e-5)


def test_tokens_whose_gradient_is_clipped_away_are_counted(given):
    outputs, batch, ratio, _, _ = given
    up = np.array([1.0, -0.5, 2.0])[:, None] > 0
    high, low = ((ratio > 1.2) & up & (MASK > 0)), ((ratio < 0.8) & ~up & (MASK > 0))
    assert high.sum() > 0 or low.sum() > 0
    objective = train.grpo()
    n = MASK.sum()
    for name, expected in (("low", low), ("high", high), ("region", low | high)):
        found = mean(objective, outputs, batch, f"clip_ratio/{name}_mean")
        assert found == pytest.approx(expected.sum() / n, abs=1e-6)

    def loss(hidden):
        own = SimpleNamespace(projection=outputs.projection.replace(hidden=hidden))
        return objective.terms(own, batch)["policy"]

    gradient = np.asarray(jax.grad(loss)(outputs.projection.hidden))
    moved = np.abs(gradient).max(-1) > 0
    np.testing.assert_array_equal(moved, (MASK > 0) & ~(low | high))


def test_the_divergence_from_the_reference_is_never_negative_and_is_added(given):
    outputs, batch, ratio, towards, _ = given
    divergence = (np.exp(towards) - towards - 1) * MASK
    assert (divergence >= 0).all()
    found = mean(train.grpo(GRPOConfig(beta=0.1)), outputs, batch, "kl")
    assert found == pytest.approx(divergence.sum() / MASK.sum(), rel=1e-4)
    plain = mean(train.grpo(), outputs, batch)
    for corrected, factor in ((True, ratio), (False, 1.0)):
        objective = train.grpo(GRPOConfig(beta=0.1, correct_kl=corrected))
        more = 0.1 * (factor * divergence).sum() / MASK.sum()
        assert mean(objective, outputs, batch) - plain == pytest.approx(more, rel=1e-3)


def test_before_the_first_update_the_loss_is_near_zero_and_its_gradient_is_not(given):
    """With group advantages, which sum to 0; the gradient is that of REINFORCE."""
    outputs, batch, *_ = given
    batch = {
        **{name: x for name, x in batch.items() if name != "old_log_probs"},
        "advantages": train.group_advantages(jnp.array([0.0, 1.0, 5.0]), 3),
        "loss_mask": jnp.ones((B, T), jnp.int32),
    }

    def loss(hidden, objective):
        own = SimpleNamespace(projection=outputs.projection.replace(hidden=hidden))
        return objective.terms(own, batch)["policy"]

    def reinforce(hidden):
        projection = outputs.projection.replace(hidden=hidden)
        log_prob = train.token_log_probs(projection, batch["labels"]).log_prob
        return -jnp.sum(batch["advantages"][:, None] * log_prob)

    hidden = outputs.projection.hidden
    for objective in (train.grpo(), train.rloo()):
        value, gradient = jax.value_and_grad(loss)(hidden, objective)
        assert abs(float(value)) < 1e-5
        np.testing.assert_allclose(gradient, jax.grad(reinforce)(hidden), atol=1e-5)


@pytest.mark.parametrize("objective", [train.grpo(), train.rloo()], ids=["grpo", "rloo"])
def test_an_answer_with_a_reward_becomes_probable(objective):
    """The policy samples a token and learns that token 3 has a reward, from the reward alone."""

    def loss(kernel, batch):
        outputs = SimpleNamespace(projection=Projection(jnp.ones((8, 1, 1)), kernel, None))
        return objective.terms(outputs, batch)["policy"] / 8

    @jax.jit
    def step(kernel, key):
        labels = jax.random.categorical(key, kernel[:, 0], shape=(8, 1))
        ones = jnp.ones((8, 1), jnp.int32)
        advantages = train.group_advantages((labels[:, 0] == 3).astype(jnp.float32), 8)
        batch = {"labels": labels, "loss_mask": ones, "attention_mask": ones}
        return kernel - 0.3 * jax.grad(loss)(kernel, {**batch, "advantages": advantages}), None

    kernel, _ = jax.lax.scan(step, jnp.zeros((V, 1)), jax.random.split(jax.random.key(0), 100))
    assert jax.nn.softmax(kernel[:, 0])[3] > 0.9  # 1/7 at the start


def test_rloo_takes_an_answer_for_one_action(given):
    outputs, batch, ratio, _, _ = given
    whole = np.prod(np.where(MASK > 0, ratio, 1.0), axis=-1)
    a = np.array([1.0, -0.5, 2.0])
    expected = -np.minimum(whole * a, np.clip(whole, 0.8, 1.2) * a).mean()
    assert mean(train.rloo(), outputs, batch) == pytest.approx(expected, rel=1e-4)


def test_filler_may_hold_anything(given):
    outputs, batch, *_ = given
    bad = {
        **batch,
        "attention_mask": batch["attention_mask"].at[2].set(0),
        "labels": batch["labels"].at[2].set(-1),
        "advantages": batch["advantages"].at[2].set(jnp.nan),
        "old_log_probs": batch["old_log_probs"].at[2].set(jnp.nan),
        "reference_log_probs": batch["reference_log_probs"].at[2].set(jnp.nan),
    }
    first = {name: x[:2] for name, x in batch.items()}
    short = SimpleNamespace(
        projection=outputs.projection.replace(hidden=outputs.projection.hidden[:2])
    )
    for objective in (train.grpo(GRPOConfig(beta=0.1, loss_type="grpo")), train.rloo()):
        assert mean(objective, outputs, bad) == pytest.approx(
            mean(objective, short, first), rel=1e-5
        )


def test_advantages_by_hand():
    rewards = jnp.array([1.0, 2.0, 3.0, 5.0, 5.0, 5.0])
    found = train.group_advantages(rewards, 3)
    np.testing.assert_allclose(found, [-0.9999, 0, 0.9999, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(
        train.group_advantages(rewards, 3, scale="none"), [-1, 0, 1, 0, 0, 0], atol=1e-6
    )
    std = float(np.std(np.asarray(rewards), ddof=1)) + 1e-4
    np.testing.assert_allclose(
        train.group_advantages(rewards, 3, scale="batch")[:3], [-1 / std, 0, 1 / std], rtol=1e-5
    )
    np.testing.assert_allclose(
        train.leave_one_out_advantages(rewards, 3), [-1.5, 0, 1.5, 0, 0, 0], atol=1e-6
    )


def test_an_answer_without_a_reward_has_no_advantage_and_no_influence():
    rewards = jnp.array([1.0, jnp.nan, 3.0, jnp.nan, jnp.nan, 4.0])
    for function in (train.group_advantages, train.leave_one_out_advantages):
        found = np.asarray(function(rewards, 3))
        alone = function(jnp.array([1.0, 3.0]), 2)
        np.testing.assert_allclose(found[[0, 2]], alone, rtol=1e-6)
        assert (found[[1, 3, 4]] == 0).all()
        assert found[5] == 0  # alone in its group, there is nothing to compare it with


def test_an_advantage_of_rloo_is_the_reward_less_its_divergence_beyond_the_others():
    settings = train.RLOOConfig(beta=0.5, num_iterations=2)
    mask = jnp.asarray([[0, 1, 1, 0], [0, 1, 0, 0]] * 2)
    log_probs = -jnp.arange(16.0).reshape(4, 4)
    # A nat for each token of an answer.
    scored = {"log_probs": log_probs, "reference_log_probs": log_probs - 1.0}
    found = settings.targets(jnp.asarray([3.0, 1.0, 0.0, jnp.nan]), mask, scored)
    # 3 - 1 against 1 - 0.5; the second group has one reward alone.
    np.testing.assert_allclose(found["advantages"], [1.5, -1.5, 0.0, 0.0])
    np.testing.assert_array_equal(found["old_log_probs"], log_probs)


def test_defaults_are_those_of_trl():
    names = ("num_generations", "temperature", "beta", "num_iterations")
    found = [
        tuple(getattr(settings, name) for name in names)
        for settings in (GRPOConfig(), train.RLOOConfig(), train.PPOConfig())
    ]
    assert found == [(8, 1.0, 0.0, 1), (2, 1.0, 0.05, 1), (1, 0.7, 0.05, 4)]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: train.grpo(GRPOConfig(loss_type="dr_grpo")), r"max_new_tokens .* None"),
        (lambda: GRPOConfig(num_generations=1), "num_generations .* 1"),
        (lambda: train.RLOOConfig(temperature=0.0), r"temperature .* 0\.0"),
        (lambda: train.PPOConfig(gamma=1.1), r"gamma .* 1\.1"),
        (lambda: train.group_advantages(jnp.ones(5), 2), "5 rewards"),
        (lambda: train.leave_one_out_advantages(jnp.ones(5), 1), "groups of 1"),
    ],
)
def test_a_wrong_setting_is_named(make, named):
    with pytest.raises(UserError, match=named):
        make()
