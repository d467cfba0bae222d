"""Group relative policy optimization (GRPO), which compares the answers to each prompt.

A batch consists of answers that were sampled from the old policy, which is an earlier state of the
model. The advantage of an answer is its reward minus the mean reward for its prompt.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from ...data.chat.policy import PolicyData
from ...data.common.fields import NonNegative, Range, require
from ...data.dataset import BatchSpec
from ...models.nn.typing import Array, Float, Int
from ..losses.answers import (
    CLIPPED,
    answer_mask,
    clipped_loss,
    in_groups,
    label_log_probs,
    masked_sums,
    real_rows,
)
from ..losses.objective import Batch, Objective, Outputs, Terms, select_inputs
from .online import OnlineConfig, per_token_spec

GroupSize = Annotated[int, Range(least=2)]
"""The number of answers to each prompt, for an objective that compares these answers."""
Scale = Literal["group", "batch", "none"]
"""The divisor of the advantages: the standard deviation of the group or of the batch, or none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(OnlineConfig):
    """The settings of group relative policy optimization, with the defaults of TRL."""

    kind = "grpo"

    num_generations: GroupSize = 8
    beta: NonNegative = 0.0
    epsilon_high: NonNegative | None = None
    """Largest relative increase of a probability before the loss is clipped; defaults to
    `epsilon`."""
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo"] = "dapo"
    """How token losses are averaged. dapo and bnpo: over all tokens of the batch. grpo: over the
    tokens of each answer, and then over answers. dr_grpo: the sum of the token losses is divided by
    the number of answers times max_new_tokens."""
    scale_rewards: Scale = "group"
    """The divisor of the centered rewards: the standard deviation of the group or of the batch, or
    none."""
    importance: Literal["token", "sequence"] = "token"
    """Whether a probability ratio is computed for each token or for each whole answer (GSPO)."""
    correct_kl: bool = True
    """Whether to multiply the estimate of the divergence by the probability ratio. The estimate is
    then an expectation under the model instead of the sampling policy."""

    def loss(self, data: PolicyData) -> Objective:
        """Returns `grpo`, with `max_new_tokens` set to the maximum length of answers."""
        return grpo(dataclasses.replace(self, max_new_tokens=self.answer_length(data)))

    def targets(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
    ) -> dict[str, Array]:
        """Returns the advantages, and the log-probabilities that the loss needs."""
        del loss_mask
        targets = {
            "advantages": group_advantages(rewards, self.num_generations, scale=self.scale_rewards)
        }
        # If each step has a single update, the sampling policy is the model itself.
        if self.updates_several:
            targets["old_log_probs"] = scored["log_probs"]
        if self.beta:
            targets["reference_log_probs"] = scored["reference_log_probs"]
        return targets

    def batch_spec(self, data: PolicyData, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a sampled answer."""
        spec = super().batch_spec(data, num_labels, num_choices)
        if self.updates_several:
            spec["old_log_probs"] = per_token_spec(data.length)
        if self.beta:
            spec["reference_log_probs"] = per_token_spec(data.length)
        return spec


def grpo(settings: GRPOConfig = GRPOConfig()) -> Objective:
    """Returns the loss of group relative policy optimization (Shao et al. 2024, equation 3).

    ρ is the ratio of the probabilities of a token under the model and under the old policy. A is
    the advantage of the answer. k = π_ref/π - log (π_ref/π) - 1 estimates the divergence from a
    reference (equation 4). The loss of a token is

        -min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A) + β ρ k.

    `loss_type` determines the mean over tokens. `dapo` and `bnpo` average over all tokens of the
    batch (Yu et al. 2025, equation 8); both are the same here, because the mean does not depend on
    micro-batches and devices. `grpo` averages over the tokens of each answer, and then over answers
    (Shao et al. 2024). `dr_grpo` divides the sum by the number of answers times `max_new_tokens`
    (Liu et al. 2025). With `importance="sequence"` ρ is the exponential of the mean log-ratio of an
    answer's tokens (GSPO, Zheng et al. 2025, equation 7). Without `correct_kl`, the term β ρ k
    lacks the factor ρ. Before the first update after sampling, ρ is 1, so the loss is near 0 for
    any rewards, but its gradient is not.

    The arrays of a batch:

    - `input_ids` int32 `[B, T]`: prompt and answer, padded on the right; `labels` int32 `[B, T]`:
      the token after each input token;
    - `attention_mask` int32 `[B, T]`: 1 for real tokens;
    - `loss_mask` int32 or bool `[B, T]`: 1 if the policy wrote the label as a token of the answer
      or as its end token; 0 if a tool wrote it;
    - `advantages` float32 `[B]`; see `group_advantages`;
    - `old_log_probs` float32 `[B, T]` (optional): log-probabilities of the labels under the old
      policy, in nats, at the same temperature. Without this array, the model itself is the old
      policy, so ρ = 1;
    - `reference_log_probs` float32 `[B, T]`: log-probabilities under the reference; required if β
      is above 0.

    The metrics are `entropy`, `kl` (if β is above 0), `clip_ratio/region_mean` (the share of tokens
    whose gradient is clipped to 0), `clip_ratio/low_mean` and `clip_ratio/high_mean`. All metrics
    are means over the tokens of answers.

    Args:
        settings: the hyperparameters.

    Raises:
        UserError: the loss type is `dr_grpo`, and its divisor `max_new_tokens` is None.
    """
    beta, loss_type, longest = settings.beta, settings.loss_type, settings.max_new_tokens
    low, high = settings.epsilon, settings.epsilon_high
    require(
        loss_type != "dr_grpo" or longest is not None,
        "max_new_tokens must be a number, got None. The loss type dr_grpo divides by this number.",
    )
    measures = ("entropy", *(("kl",) if beta else ()), *CLIPPED)

    def counts(batch: Batch) -> Terms:
        tokens = jnp.sum(answer_mask(batch)).astype(jnp.float32)
        rows = jnp.sum(real_rows(batch))
        # The count that divides the policy term depends on `loss_type`.
        divisor = {"grpo": rows, "dr_grpo": rows * (longest or 1)}.get(loss_type, tokens)
        return {"policy": divisor, **dict.fromkeys(measures, tokens)}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        mask = answer_mask(batch)  # [B, T]
        lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)  # [B, 1]
        scores = label_log_probs(outputs, batch, settings.temperature)
        log_probs = scores.log_prob
        # Without old log-probabilities, ρ has the value 1, but it still has a gradient.
        old = batch.get("old_log_probs", jax.lax.stop_gradient(log_probs))
        log_ratio = jnp.where(mask, log_probs - old, 0.0)
        if settings.importance == "sequence":
            log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True) / lengths  # [B, 1]
        ratio = jnp.exp(log_ratio)
        # [B] to [B, 1]: all tokens of an answer have the same advantage.
        advantages = batch["advantages"][:, None]
        # One ratio per token [B, T], or per answer [B, 1].
        values = clipped_loss(ratio, advantages, low, low if high is None else high)
        values["entropy"] = scores.entropy
        if beta:
            # The "k3" estimate of the divergence, which is never negative.
            towards = jnp.where(mask, batch["reference_log_probs"] - log_probs, 0.0)
            divergence = jnp.exp(towards) - towards - 1
            values["kl"] = divergence
            values["policy"] += beta * (ratio * divergence if settings.correct_kl else divergence)
        # Average over the tokens of each answer first; `counts` averages over answers.
        if loss_type == "grpo":
            values["policy"] /= lengths
        return masked_sums(values, mask)

    return Objective(
        coefficients={"policy": 1.0},
        inputs=select_inputs("input_ids", "attention_mask"),
        counts=counts,
        terms=terms,
    )


def group_advantages(
    rewards: Float[Array, " N"], group_size: int, *, scale: Scale = "group"
) -> Float[Array, " N"]:
    """Returns GRPO's advantages of answers (Shao et al. 2024, section 4.1.2).

    A group consists of the answers to the same prompt. The advantage of an answer is its reward
    minus the mean reward of its group, divided by a standard deviation (with n - 1 degrees of
    freedom, plus 1e-4).

    Args:
        rewards: the reward of each answer, ordered by group. An answer without a reward has NaN; it
          is left out of the mean and gets the advantage 0.
        group_size: the number of answers to each prompt, at least 2.
        scale: the divisor: the standard deviation of the group or of the whole batch, or none.

    Raises:
        UserError: N is not a multiple of the group size, or the group size is below 2.
    """
    groups = in_groups(rewards, group_size)
    centered = groups - jnp.nanmean(groups, axis=1, keepdims=True)
    if scale == "group":
        centered /= jnp.nanstd(groups, axis=1, ddof=1, keepdims=True) + 1e-4
    elif scale == "batch":
        centered /= jnp.nanstd(rewards, ddof=1) + 1e-4
    # Groups without enough rewards have NaN or infinite values. Replace these by 0, so that they
    # get no gradient.
    return jnp.nan_to_num(centered.reshape(-1), posinf=0.0, neginf=0.0)
