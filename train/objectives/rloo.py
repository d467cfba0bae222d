"""REINFORCE with a leave-one-out baseline (RLOO), which compares whole answers."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ...data.chat.policy import PolicyData
from ...data.common.fields import NonNegative
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
    sum_over_answers,
)
from ..losses.objective import Batch, Objective, Outputs, Terms, select_inputs
from .grpo import GroupSize
from .online import OnlineConfig, per_token_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(OnlineConfig):
    """The settings of REINFORCE with a leave-one-out baseline, with the defaults of TRL."""

    kind = "rloo"

    num_generations: GroupSize = 2
    beta: NonNegative = 0.05

    def loss(self, data: PolicyData) -> Objective:
        """Returns `rloo`."""
        del data
        return rloo(self)

    def targets(
        self,
        rewards: Float[Array, " R"],
        loss_mask: Int[Array, "R T"],
        scored: Mapping[str, Float[Array, "R T"]],
    ) -> dict[str, Array]:
        """Returns the advantages, and the old log-probabilities if a step has several updates."""
        if self.beta:
            # Subtract the divergence from the rewards, because the loss has no term for the
            # divergence.
            divergence = scored["log_probs"] - scored["reference_log_probs"]
            rewards = rewards - self.beta * sum_over_answers(divergence, loss_mask)
        # The baseline of an answer is the mean reward of the other answers to its prompt.
        targets = {"advantages": leave_one_out_advantages(rewards, self.num_generations)}
        return targets | ({"old_log_probs": scored["log_probs"]} if self.updates_several else {})

    def batch_spec(self, data: PolicyData, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a sampled answer."""
        spec = super().batch_spec(data, num_labels, num_choices)
        return spec | (
            {"old_log_probs": per_token_spec(data.length)} if self.updates_several else {}
        )


def rloo(settings: RLOOConfig = RLOOConfig()) -> Objective:
    """Returns the loss of REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024).

    A whole answer is one action. ρ is the ratio of the probabilities of the answer under the model
    and under the old policy, and A is the advantage of the answer. The loss of an answer is -min(ρ
    A, clip(ρ, 1 - ε, 1 + ε) A), averaged over answers. The divergence from a reference is part of
    the reward; see `RLOOConfig.targets`.

    A batch has the arrays of `grpo` except `reference_log_probs`. The metrics are `entropy`, a mean
    over tokens, and `clip_ratio/region_mean`, `clip_ratio/low_mean` and `clip_ratio/high_mean`,
    which are means over answers.

    Args:
        settings: the hyperparameters.
    """
    epsilon = settings.epsilon

    def counts(batch: Batch) -> Terms:
        rows = jnp.sum(real_rows(batch))
        tokens = jnp.sum(answer_mask(batch)).astype(jnp.float32)
        return {"policy": rows, "entropy": tokens, **dict.fromkeys(CLIPPED, rows)}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        mask = answer_mask(batch)
        scores = label_log_probs(outputs, batch, settings.temperature)
        old = batch.get("old_log_probs", jax.lax.stop_gradient(scores.log_prob))
        # The log-ratio of an answer is the sum of its tokens' log-ratios.
        ratio = jnp.exp(sum_over_answers(scores.log_prob - old, mask))  # [B]
        values = clipped_loss(ratio, batch["advantages"], epsilon, epsilon)
        entropy = masked_sums({"entropy": scores.entropy}, mask)
        return {**masked_sums(values, real_rows(batch) != 0), **entropy}

    return Objective(
        coefficients={"policy": 1.0},
        inputs=select_inputs("input_ids", "attention_mask"),
        counts=counts,
        terms=terms,
    )


def leave_one_out_advantages(rewards: Float[Array, " N"], group_size: int) -> Float[Array, " N"]:
    """Returns RLOO's advantages: each reward minus the mean of the other rewards in its group.

    Args:
        rewards: the reward of each answer, ordered by group. An answer without a reward has NaN; it
          is left out of the mean and gets the advantage 0.
        group_size: the number of answers to each prompt, at least 2.

    Raises:
        UserError: N is not a multiple of the group size, or the group size is below 2.
    """
    groups = in_groups(rewards, group_size)
    # Compute the mean of the other rewards from the sum of the group.
    others = jnp.sum(~jnp.isnan(groups), axis=1, keepdims=True) - 1
    baseline = (jnp.nansum(groups, axis=1, keepdims=True) - groups) / others
    # An answer without a reward, or without another answer to compare with, gets no gradient.
    return jnp.nan_to_num((groups - baseline).reshape(-1), posinf=0.0, neginf=0.0)
