"""The objective of proximal policy optimization (PPO), and what it learns from rewards.

A model with a value head predicts at each token the reward to come. Advantages are what comes
beyond that prediction. Everything here is as in TRL 1.12, the last version with PPO.
"""

import jax
import jax.numpy as jnp

from ...data.common.errors import UserError
from ...models.nn.typing import Array, Bool, Float, Int
from ...models.token_log_probs import token_log_probs
from ..losses.objective import Batch, Objective, Outputs, Terms, select_inputs

_POLICY = "loss/policy_avg"
_VALUE = "loss/value_avg"
_OF_POLICY = (
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg"),
    "val/ratio",
)


def ppo(
    *,
    epsilon: float = 0.2,
    epsilon_value: float = 0.2,
    value_coefficient: float = 0.1,
    temperature: float = 0.7,
) -> Objective:
    """Returns the objective of proximal policy optimization (Schulman et al. 2017, equation 9).

    With ρ the ratio of the probabilities of a token under the model and under the old policy, and A
    its advantage, the loss of a token is max(-ρ A, -clip(ρ, 1 - ε, 1 + ε) A), averaged over the
    tokens of all answers. The loss of a value v, whose target is the return R and which was v_old,
    is ½ max((v - R)², (clip(v, v_old ± ε_v) - R)²), averaged over the tokens of all answers and,
    where there is room, the token after each. The model has the head `causal_lm_with_value`.

    The arrays of a batch:

    - `input_ids`, `labels`, `attention_mask`, `loss_mask` int32 `[B, T]`: as those of `grpo`;
    - `value_mask` int32 or bool `[B, T]`: 1 where a value is learned, see `ppo_targets`;
    - `advantages`, `returns` float32 `[B, T]`: of `ppo_targets`;
    - `old_log_probs` float32 `[B, T]`: log-probabilities of the labels under the old policy, in
      nats, at the same temperature;
    - `old_values` float32 `[B, T]`: the values of the old policy.

    Measures, under TRL's names: `policy/approxkl_avg` (½ of the squared log-ratio),
    `policy/clipfrac_avg`, `policy/entropy_avg`, `val/ratio`, means over the tokens of answers, and
    `val/clipfrac_avg`.

    Args:
        epsilon: ε, the largest relative change of a probability that is rewarded.
        epsilon_value: ε_v, the largest change of a value that is learned.
        value_coefficient: the weight of the loss of values.
        temperature: the divisor of the logits in sampling.

    Raises:
        UserError: a number is out of range.
    """
    for name, value in (
        ("epsilon", epsilon),
        ("epsilon_value", epsilon_value),
        ("value_coefficient", value_coefficient),
    ):
        if value < 0:
            raise UserError(f"{name} {value} must not be negative")
    if not temperature > 0:
        raise UserError(f"temperature {temperature} must be positive: 1.0 leaves logits unchanged")

    def counts(batch: Batch) -> Terms:
        tokens, values = (jnp.sum(mask).astype(jnp.float32) for mask in _masks(batch))
        return {
            _POLICY: tokens,
            _VALUE: values,
            **dict.fromkeys(_OF_POLICY, tokens),
            "val/clipfrac_avg": values,
        }

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        mask, value_mask = _masks(batch)
        found = token_log_probs(outputs.projection, batch["labels"], temperature=temperature)
        log_ratio = jnp.where(mask, found.log_prob - batch["old_log_probs"], 0.0)
        ratio, advantages = jnp.exp(log_ratio), batch["advantages"]
        plain = -advantages * ratio
        clipped = -advantages * jnp.clip(ratio, 1 - epsilon, 1 + epsilon)

        old, returns = batch["old_values"], batch["returns"]
        near = jnp.clip(outputs.values, old - epsilon_value, old + epsilon_value)
        error, near_error = jnp.square(outputs.values - returns), jnp.square(near - returns)

        of_policy = {
            _POLICY: jnp.maximum(plain, clipped),
            "policy/approxkl_avg": 0.5 * jnp.square(log_ratio),
            "policy/clipfrac_avg": clipped > plain,
            "policy/entropy_avg": found.entropy,
            "val/ratio": ratio,
        }
        of_values = {
            _VALUE: 0.5 * jnp.maximum(error, near_error),
            "val/clipfrac_avg": near_error > error,
        }
        return {
            **{name: jnp.sum(jnp.where(mask, x, 0.0)) for name, x in of_policy.items()},
            **{name: jnp.sum(jnp.where(value_mask, x, 0.0)) for name, x in of_values.items()},
        }

    return Objective(
        coefficients={_POLICY: 1.0, _VALUE: value_coefficient},
        inputs=select_inputs("input_ids", "attention_mask"),
        counts=counts,
        terms=terms,
    )


def ppo_targets(
    scores: Float[Array, " B"],
    log_probs: Float[Array, "B T"],
    values: Float[Array, "B T"],
    loss_mask: Int[Array, "B T"],
    *,
    reference_log_probs: Float[Array, "B T"] | None = None,
    beta: float = 0.05,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    whiten_rewards: bool = False,
) -> dict[str, Array]:
    """Returns what PPO learns from the scores of answers, as arrays of a batch of `ppo`.

    The reward of a token is -β log (π_old / π_ref), and the score of its answer is added at the
    token after the last one, or at the last one where there is no room. Advantages are generalized
    ones (Schulman et al. 2016, equation 16), scaled to mean 0 and variance 1 over all tokens.

    Args:
        scores: the reward of each answer.
        log_probs: log-probabilities of the labels under the old policy, in nats.
        values: its values.
        loss_mask: 1 where the label belongs to the answer; at no row's last position.
        reference_log_probs: those under the reference; None: there is no divergence.
        beta: β, the weight of the divergence.
        gamma: the discount of later rewards.
        gae_lambda: λ, the weight of later values.
        whiten_rewards: whether the rewards of tokens are scaled to variance 1 first.

    Returns:
        `advantages`, `returns`, `old_log_probs` and `old_values` float32 `[B, T]`, and `value_mask`
        int32 `[B, T]`.
    """
    mask = loss_mask != 0
    # The token after an answer's last one has a value, too: the state in which the score comes.
    after = jnp.roll(mask, 1, axis=1).at[:, 0].set(False).at[:, -1].set(False)
    value_mask = mask | after
    positions = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(value_mask, positions, -1), axis=1, keepdims=True)  # [B, 1]
    rewards = jnp.where(positions == last, scores[:, None], 0.0)
    if reference_log_probs is not None:
        rewards -= beta * jnp.where(mask, log_probs - reference_log_probs, 0.0)
    if whiten_rewards:
        rewards = jnp.where(value_mask, whitened(rewards, value_mask, shift_mean=False), 0.0)
    values = jnp.where(value_mask, values, 0.0)
    raw = generalized_advantages(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    return {
        "advantages": jnp.where(mask, whitened(raw, mask), 0.0),
        "returns": raw + values,
        "old_log_probs": log_probs,
        "old_values": values,
        "value_mask": value_mask.astype(jnp.int32),
    }


def generalized_advantages(
    rewards: Float[Array, "B T"], values: Float[Array, "B T"], *, gamma: float, gae_lambda: float
) -> Float[Array, "B T"]:
    """Returns Σ (γ λ)^k δ_(t+k) with δ_t = r_t + γ v_(t+1) - v_t (Schulman et al. 2016)."""
    following = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], axis=1)
    deltas = rewards + gamma * following - values

    def before(later: Array, delta: Array) -> tuple[Array, Array]:
        advantage = delta + gamma * gae_lambda * later
        return advantage, advantage

    _, advantages = jax.lax.scan(before, jnp.zeros_like(deltas[:, 0]), deltas.T, reverse=True)
    return advantages.T


def whitened(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], *, shift_mean: bool = True
) -> Float[Array, "B T"]:
    """Returns values with variance 1 over a mask, and with mean 0 unless `shift_mean` is false."""
    number = jnp.sum(mask)
    mean = jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(number, 1)
    squares = jnp.sum(jnp.where(mask, jnp.square(values - mean), 0.0))
    scaled = (values - mean) * jax.lax.rsqrt(squares / jnp.maximum(number - 1, 1) + 1e-8)
    return scaled if shift_mean else scaled + mean


def _masks(batch: Batch) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Returns where a label belongs to an answer, and where a value is learned."""
    real = batch["attention_mask"] != 0
    return (batch["loss_mask"] != 0) & real, (batch["value_mask"] != 0) & real
