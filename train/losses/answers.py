"""Shared functions of the losses on sampled answers: masks, sums, log-probabilities, and groups.

A batch has the arrays `input_ids`, `labels`, `attention_mask` and `loss_mask` `[B, T]`; see `grpo`.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from ...data.common.fields import require
from ...models.nn.typing import Array, Bool, Float
from ...models.token_log_probs import TokenLogProbs, token_log_probs
from .objective import Batch, Outputs, Terms

CLIPPED = tuple(f"clip_ratio/{part}_mean" for part in ("low", "high", "region"))
"""The clipping metrics, under TRL's names."""


def answer_mask(batch: Batch) -> Bool[Array, "B *T"]:
    """Returns the mask of labels that belong to an answer, `[B, T]`, or `[B, 2, T]` for pairs."""
    # The loss mask of filler rows may have any values, but their attention mask is 0.
    return (batch["loss_mask"] != 0) & (batch["attention_mask"] != 0)


def real_rows(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each real row and 0 for each filler row."""
    return jnp.any(batch["attention_mask"] != 0, axis=-1).astype(jnp.float32)


def label_log_probs(outputs: Outputs, batch: Batch, temperature: float) -> TokenLogProbs:
    """Returns the log-probability of each label, with the logits divided by `temperature`."""
    return token_log_probs(outputs.projection, batch["labels"], temperature=temperature)


def masked_sums(values: Mapping[str, Array], mask: Array) -> Terms:
    """Returns the sum of each array over the mask; values outside the mask may be NaN."""
    return {name: jnp.sum(jnp.where(mask, value, 0.0)) for name, value in values.items()}


def sum_over_answers(values: Float[Array, "B T"], mask: Array) -> Float[Array, " B"]:
    """Returns, for each answer, the sum of `values` over its tokens."""
    return jnp.sum(jnp.where(mask != 0, values, 0.0), axis=1)


def clipped_loss(ratio: Array, advantages: Array, low: float, high: float) -> dict[str, Array]:
    """Returns -min(ρ A, clip(ρ, 1 - low, 1 + high) A), and masks of the clipped gradients.

    Args:
        ratio: ρ, the probability ratio of each token or of each answer.
        advantages: A, an array with the same number of axes as `ratio`.
        low: the largest relative decrease of ρ without clipping.
        high: the largest relative increase of ρ without clipping.
    """
    clipped = jnp.clip(ratio, 1 - low, 1 + high)
    # The gradient is 0 only if the ratio has left the range in the direction that the advantage
    # encourages.
    below = (ratio < 1 - low) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    return {
        "policy": -jnp.minimum(ratio * advantages, clipped * advantages),
        **dict(zip(CLIPPED, (below, above, below | above), strict=True)),
    }


def in_groups(rewards: Float[Array, " N"], group_size: int) -> Float[Array, "G S"]:
    """Reshapes rewards to one row for each prompt.

    Raises:
        UserError: N is not a multiple of the group size, or the group size is below 2.
    """
    require(
        group_size >= 2 and rewards.shape[0] % group_size == 0,
        f"{rewards.shape[0]} rewards cannot be divided into groups of {group_size}: give the "
        "rewards of whole groups, and at least 2 answers to each prompt",
    )
    # The answers to a prompt are consecutive, so each row of the result is one group.
    return rewards.reshape(-1, group_size)
