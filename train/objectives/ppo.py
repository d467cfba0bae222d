"""Proximal policy optimization (PPO), with a learned value function.

At each token, a value head predicts the sum of future rewards. The advantage of a token measures
how much better the rewards are than predicted. All formulas are the same as in TRL 1.12, the last
version of TRL that has PPO.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ...data.chat.policy import PolicyData
from ...data.common.fields import Fraction, NonNegative, Positive, PositiveInt
from ...data.dataset import ArraySpec, BatchSpec, Values
from ...models.nn.typing import Array, Bool, Float, Int
from ..losses.answers import answer_mask, label_log_probs, masked_sums, sum_over_answers
from ..losses.objective import Batch, Objective, Outputs, Terms, select_inputs
from .online import OnlineConfig, per_token_spec

_POLICY = "loss/policy_avg"
_VALUE = "loss/value_avg"
_OF_POLICY = (
    *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg"),
    "val/ratio",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(OnlineConfig):
    """The settings of proximal policy optimization, with the defaults of TRL."""

    kind = "ppo"
    learns_values = True
    head_names = ("causal_lm_with_value",)

    num_generations: PositiveInt = 1
    temperature: Positive = 0.7
    num_iterations: PositiveInt = 4
    beta: NonNegative = 0.05
    value_coefficient: NonNegative = 0.1
    """Weight of the squared error of predicted values in the loss."""
    epsilon_value: NonNegative = 0.2
    """Clipping range of the value loss: the largest change of a predicted value before the loss is
    clipped."""
    gamma: Fraction = 1.0
    """Discount factor of later rewards, γ."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation. It determines the weight of errors in later values."""
    whiten_rewards: bool = False
    """Whether the rewards of tokens are scaled to variance 1 before advantages are computed."""

    @property
    def needs_log_probs(self) -> bool:
        """True, because the loss needs log-probabilities and values of the sampling policy."""
        return True

    def loss(self, data: PolicyData) -> Objective:
        """Returns `ppo`."""
        del data
        return ppo(self)

    def targets(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
    ) -> dict[str, Array]:
        """Returns the result of `ppo_targets`, where an answer without a reward has the score 0."""
        return ppo_targets(
            jnp.nan_to_num(rewards),
            scored["log_probs"],
            scored["values"],
            loss_mask,
            reference_log_probs=scored.get("reference_log_probs"),
            settings=self,
        )

    def rollout_metrics(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
        *,
        ended: Bool[Array, " R"],
    ) -> dict[str, Array]:
        """Returns the metrics that only PPO reports, mostly means over answers."""
        scores, log_probs = jnp.nanmean(rewards), scored["log_probs"]
        metrics = {
            "objective/scores": scores,
            # The negative log-probability of an answer is an estimate of the entropy from one
            # sample.
            "objective/entropy": jnp.mean(sum_over_answers(-log_probs, loss_mask)),
            "val/num_eos_tokens": jnp.sum(ended).astype(jnp.float32),
        }
        if "reference_log_probs" not in scored:
            return metrics
        # TRL sums over the tokens of an answer before it averages over answers.
        divergence = log_probs - scored["reference_log_probs"]
        kl = jnp.mean(sum_over_answers(divergence, loss_mask))
        return {
            **metrics,
            "objective/kl": kl,
            "objective/non_score_reward": -self.beta * kl,
            "objective/rlhf_reward": scores - self.beta * kl,
        }

    def batch_spec(self, data: PolicyData, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a sampled answer."""
        names = ("advantages", "returns", "old_log_probs", "old_values")
        return {
            **super().batch_spec(data, num_labels, num_choices),
            **dict.fromkeys(names, per_token_spec(data.length)),
            "value_mask": ArraySpec((data.length,), Values.MASK),
        }


def ppo(settings: PPOConfig = PPOConfig()) -> Objective:
    """Returns the loss of proximal policy optimization (Schulman et al. 2017, equation 9).

    ρ is the ratio of the probabilities of a token under the model and under the old policy, and A
    is the advantage of the token. The loss of the policy is max(-ρ A, -clip(ρ, 1 - ε, 1 + ε) A),
    averaged over the tokens of all answers. v is the predicted value of a token, v_old is the value
    that the old policy predicted, and R is the return. The loss of the value is ½ max((v - R)²,
    (clip(v, v_old ± ε_v) - R)²), averaged over the tokens of all answers and, for each answer that
    does not fill its row, over the token that follows it. The model has the head
    `causal_lm_with_value`.

    The arrays of a batch:

    - `input_ids`, `labels`, `attention_mask`, `loss_mask` int32 `[B, T]`: as in `grpo`;
    - `value_mask` int32 or bool `[B, T]`: 1 for tokens whose value is learned; see
      `ppo_targets`;
    - `advantages`, `returns` float32 `[B, T]`: computed by `ppo_targets`;
    - `old_log_probs` float32 `[B, T]`: log-probabilities of the labels under the old policy, in
      nats, at the same temperature;
    - `old_values` float32 `[B, T]`: the values of the old policy.

    The metrics have TRL's names: `policy/approxkl_avg` (½ of the squared log-ratio),
    `policy/clipfrac_avg`, `policy/entropy_avg`, `val/ratio`, `val/clipfrac_avg`. All metrics except
    `val/clipfrac_avg` are means over the tokens of answers.

    Args:
        settings: the hyperparameters.
    """
    epsilon, epsilon_value = settings.epsilon, settings.epsilon_value

    def counts(batch: Batch) -> Terms:
        # The policy is trained only on the tokens of answers, but the values are also trained on
        # the token after each answer.
        tokens, values = (jnp.sum(mask).astype(jnp.float32) for mask in _masks(batch))
        return {
            _POLICY: tokens,
            _VALUE: values,
            **dict.fromkeys(_OF_POLICY, tokens),
            "val/clipfrac_avg": values,
        }

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        mask, value_mask = _masks(batch)
        # The clipped policy loss of each token.
        scores = label_log_probs(outputs, batch, settings.temperature)
        log_ratio = jnp.where(mask, scores.log_prob - batch["old_log_probs"], 0.0)
        ratio, advantages = jnp.exp(log_ratio), batch["advantages"]
        plain = -advantages * ratio
        clipped = -advantages * jnp.clip(ratio, 1 - epsilon, 1 + epsilon)

        # The clipped value loss: a value that has already moved far towards its return gets no
        # gradient.
        old, returns = batch["old_values"], batch["returns"]
        near = jnp.clip(outputs.values, old - epsilon_value, old + epsilon_value)
        error, near_error = jnp.square(outputs.values - returns), jnp.square(near - returns)

        # The policy terms and the value terms have different masks.
        of_policy = {
            _POLICY: jnp.maximum(plain, clipped),
            "policy/approxkl_avg": 0.5 * jnp.square(log_ratio),
            "policy/clipfrac_avg": clipped > plain,
            "policy/entropy_avg": scores.entropy,
            "val/ratio": ratio,
        }
        of_values = {
            _VALUE: 0.5 * jnp.maximum(error, near_error),
            "val/clipfrac_avg": near_error > error,
        }
        return {**masked_sums(of_policy, mask), **masked_sums(of_values, value_mask)}

    return Objective(
        coefficients={_POLICY: 1.0, _VALUE: settings.value_coefficient},
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
    settings: PPOConfig = PPOConfig(),
) -> dict[str, Array]:
    """Computes the arrays of a batch of `ppo` from the scores of answers.

    The reward of a token is -β log (π_old / π_ref). The answer's score is added at the token after
    the answer, or at its last token if the row is full. Generalized advantages (Schulman et al.
    2016, equation 16) are scaled to mean 0 and variance 1 over all tokens.

    Args:
        scores: the reward of each answer.
        log_probs: log-probabilities of the labels under the old policy, in nats.
        values: the values of the old policy.
        loss_mask: 1 where the label belongs to the answer; 0 at the last position of each row.
        reference_log_probs: log-probabilities under the reference. If None, the rewards do not
          include the divergence.
        settings: β, γ, λ, and whether token rewards are first scaled to variance 1.

    Returns:
        `advantages`, `returns`, `old_log_probs` and `old_values` float32 `[B, T]`, and `value_mask`
        int32 `[B, T]`.
    """
    mask = loss_mask != 0
    # The token after an answer also has a value, because it receives the score.
    after = jnp.roll(mask, 1, axis=1).at[:, 0].set(False).at[:, -1].set(False)
    value_mask = mask | after
    positions = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(value_mask, positions, -1), axis=1, keepdims=True)  # [B, 1]
    # The token rewards are the score, at the last position that has a value, minus the divergence
    # at each token.
    rewards = jnp.where(positions == last, scores[:, None], 0.0)
    if reference_log_probs is not None:
        rewards -= settings.beta * jnp.where(mask, log_probs - reference_log_probs, 0.0)
    if settings.whiten_rewards:
        rewards = jnp.where(value_mask, whitened(rewards, value_mask, shift_mean=False), 0.0)
    # Set the values after an answer to 0, so that they do not contribute to its returns.
    values = jnp.where(value_mask, values, 0.0)
    raw = generalized_advantages(
        rewards, values, gamma=settings.gamma, gae_lambda=settings.gae_lambda
    )
    # Scale only the advantages; the returns keep the scale of the rewards.
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
    # The value after the last token is 0.
    following = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], axis=1)
    # δ is the error of each value as a prediction of the next reward plus the next value.
    deltas = rewards + gamma * following - values

    def before(later: Array, delta: Array) -> tuple[Array, Array]:
        advantage = delta + gamma * gae_lambda * later
        return advantage, advantage

    # Scan over the tokens from the last to the first, as arrays [T, B].
    _, advantages = jax.lax.scan(before, jnp.zeros_like(deltas[:, 0]), deltas.T, reverse=True)
    return advantages.T


def whitened(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], *, shift_mean: bool = True
) -> Float[Array, "B T"]:
    """Scales values to variance 1 over a mask, and to mean 0 if `shift_mean`."""
    count = jnp.sum(mask)
    mean = jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(count, 1)
    squares = jnp.sum(jnp.where(mask, jnp.square(values - mean), 0.0))
    # Divide by n - 1, for the unbiased variance.
    scaled = (values - mean) * jax.lax.rsqrt(squares / jnp.maximum(count - 1, 1) + 1e-8)
    return scaled if shift_mean else scaled + mean


def _masks(batch: Batch) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Returns two masks: the labels of answers, and the tokens whose value is learned."""
    real = batch["attention_mask"] != 0
    return answer_mask(batch), (batch["value_mask"] != 0) & real
