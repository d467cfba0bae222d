"""Objectives of reinforcement learning on sampled answers: GRPO and RLOO, and their advantages.

A batch holds answers that an earlier state of the model, the old policy, sampled, each with its
advantage: by how much its reward exceeds what is usual for its prompt.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ...data.common.errors import UserError
from ...models.nn.typing import Array, Bool, Float
from ...models.token_log_probs import TokenLogProbs, token_log_probs
from ..losses.objective import Batch, Objective, Outputs, Terms, select_inputs

PolicyLoss = Literal["dapo", "grpo", "bnpo", "dr_grpo"]
"""A way to average over tokens; see `grpo`."""
Scale = Literal["group", "batch", "none"]
"""The divisor of `group_advantages`: a standard deviation, or none."""


def grpo(
    *,
    loss: PolicyLoss = "dapo",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    importance: Literal["token", "sequence"] = "token",
    max_answer_length: int | None = None,
    temperature: float = 1.0,
    correct_kl: bool = True,
) -> Objective:
    """Returns the objective of group relative policy optimization (Shao et al. 2024, equation 3).

    With ρ the ratio of the probabilities of a token under the model and under the old policy, A
    the advantage of its answer, and k = π_ref/π - log (π_ref/π) - 1 the estimate of the divergence
    from a reference (equation 4), the loss of a token is

        -min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A) + β ρ k.

    `loss` says how tokens are averaged: `dapo` and `bnpo` over all tokens of the batch (Yu et al.
    2025, equation 8; micro-batches and devices do not matter, so both are the same here), `grpo`
    over the tokens of each answer and then over answers (Shao et al. 2024), `dr_grpo` divides the
    sum by the number of answers times `max_answer_length` (Liu et al. 2025). Before the first
    update after sampling ρ is 1 and the loss near 0 whatever the rewards, but its gradient is not.

    The arrays of a batch:

    - `input_ids`, `labels` int32 `[B, T]`: prompt and answer, padded on the right, and the token
      after each of them;
    - `attention_mask` int32 `[B, T]`: 1 for real tokens;
    - `loss_mask` int32 or bool `[B, T]`: 1 where the label belongs to the answer, its end
      included, and was written by the policy, not by a tool;
    - `advantages` float32 `[B]`; see `group_advantages`;
    - `old_log_probs` float32 `[B, T]` (optional): log-probabilities of the labels under the old
      policy, in nats, at the same temperature. Without them the model is its own old policy: ρ = 1;
    - `reference_log_probs` float32 `[B, T]`: those under the reference, if β is above 0.

    Measures: `entropy`, `kl` (if β is above 0), `clip_ratio/region_mean`, the share of tokens whose
    gradient the clipping takes away, with `clip_ratio/low_mean` and `clip_ratio/high_mean`; all are
    means over the tokens of answers.

    Args:
        loss: how tokens are averaged.
        beta: β, the weight of the divergence from the reference.
        epsilon: ε, the largest relative decrease of a probability that is rewarded.
        epsilon_high: the largest increase; None: ε.
        importance: `token`: a ratio for each token; `sequence`: for each answer the exponential of
          the mean log-ratio of its tokens (GSPO, Zheng et al. 2025, equation 7).
        max_answer_length: the number of tokens by which `dr_grpo` divides.
        temperature: the divisor of the logits in sampling.
        correct_kl: whether k has the factor ρ, which makes it the divergence from the reference at
          tokens that the old policy sampled, as is TRL's default.

    Raises:
        UserError: a number is out of range, `loss` has another name, or `max_answer_length` is
          missing, or given without `dr_grpo`.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    for name, value in (("beta", beta), ("epsilon", epsilon), ("epsilon_high", high)):
        if value < 0:
            raise UserError(f"{name} {value} must not be negative")
    _check_temperature(temperature)
    losses = ("dapo", "grpo", "bnpo", "dr_grpo")
    if loss not in losses:
        raise UserError(f"loss {loss!r} is unknown: choose one of {', '.join(losses)}")
    if importance not in ("token", "sequence"):
        raise UserError(f"importance {importance!r} is unknown: choose 'token' or 'sequence'")
    if (loss == "dr_grpo") != (max_answer_length is not None):
        raise UserError(
            "max_answer_length belongs to the loss 'dr_grpo', which divides by it: give both or "
            "neither"
        )
    measures = ("entropy", *(("kl",) if beta else ()), *_CLIPPED)

    def counts(batch: Batch) -> Terms:
        tokens = jnp.sum(_mask(batch)).astype(jnp.float32)
        rows = jnp.sum(_real_rows(batch))
        number = {"grpo": rows, "dr_grpo": rows * (max_answer_length or 1)}.get(loss, tokens)
        return {"policy": number, **dict.fromkeys(measures, tokens)}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        mask = _mask(batch)  # [B, T]
        lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)  # [B, 1]
        found = _token_log_probs(outputs, batch, temperature)
        log_probs = found.log_prob
        old = batch.get("old_log_probs", jax.lax.stop_gradient(log_probs))
        log_ratio = jnp.where(mask, log_probs - old, 0.0)
        if importance == "sequence":
            log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True) / lengths  # [B, 1]
        ratio = jnp.exp(log_ratio)
        advantages = batch["advantages"][:, None]
        clipped = jnp.clip(ratio, 1 - epsilon, 1 + high)
        per_token = jnp.broadcast_to(
            -jnp.minimum(ratio * advantages, clipped * advantages), mask.shape
        )
        low = (ratio < 1 - epsilon) & (advantages < 0)
        above = (ratio > 1 + high) & (advantages > 0)
        values = {
            "entropy": found.entropy,
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": above,
            "clip_ratio/region_mean": low | above,
        }
        if beta:
            towards = jnp.where(mask, batch["reference_log_probs"] - log_probs, 0.0)
            divergence = jnp.exp(towards) - towards - 1
            values["kl"] = divergence
            per_token += beta * (ratio * divergence if correct_kl else divergence)
        if loss == "grpo":
            per_token /= lengths
        return _masked_sums({"policy": per_token, **values}, mask)

    return Objective(
        coefficients={"policy": 1.0},
        inputs=select_inputs("input_ids", "attention_mask"),
        counts=counts,
        terms=terms,
    )


_CLIPPED = tuple(f"clip_ratio/{part}_mean" for part in ("low", "high", "region"))


def rloo(*, epsilon: float = 0.2, temperature: float = 1.0) -> Objective:
    """Returns the objective of REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024).

    An answer is one action: with ρ the ratio of the probabilities of the whole answer under the
    model and under the old policy, and A its advantage, the loss of an answer is
    -min(ρ A, clip(ρ, 1 - ε, 1 + ε) A), averaged over answers. The divergence from a reference is
    part of the reward; see `leave_one_out_advantages`.

    The arrays of a batch are those of `grpo`; there are no `reference_log_probs`. Measures:
    `entropy`, a mean over tokens; `clip_ratio/region_mean`, `…/low_mean` and `…/high_mean`, means
    over answers.

    Args:
        epsilon: ε, the largest relative change of a probability that is rewarded.
        temperature: the divisor of the logits in sampling.

    Raises:
        UserError: a number is out of range.
    """
    if epsilon < 0:
        raise UserError(f"epsilon {epsilon} must not be negative")
    _check_temperature(temperature)

    def counts(batch: Batch) -> Terms:
        rows = jnp.sum(_real_rows(batch))
        tokens = jnp.sum(_mask(batch)).astype(jnp.float32)
        return {"policy": rows, "entropy": tokens, **dict.fromkeys(_CLIPPED, rows)}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        mask = _mask(batch)
        found = _token_log_probs(outputs, batch, temperature)
        old = batch.get("old_log_probs", jax.lax.stop_gradient(found.log_prob))
        ratio = jnp.exp(jnp.sum(jnp.where(mask, found.log_prob - old, 0.0), axis=-1))  # [B]
        advantages = batch["advantages"]
        clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
        low = (ratio < 1 - epsilon) & (advantages < 0)
        above = (ratio > 1 + epsilon) & (advantages > 0)
        values = {
            "policy": -jnp.minimum(ratio * advantages, clipped * advantages),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": above,
            "clip_ratio/region_mean": low | above,
        }
        entropy = _masked_sums({"entropy": found.entropy}, mask)
        return {**_masked_sums(values, _real_rows(batch) != 0), **entropy}

    return Objective(
        coefficients={"policy": 1.0},
        inputs=select_inputs("input_ids", "attention_mask"),
        counts=counts,
        terms=terms,
    )


def group_advantages(
    rewards: Float[Array, " N"], group_size: int, *, scale: Scale = "group"
) -> Float[Array, " N"]:
    """Returns GRPO's advantages of the answers to each prompt (Shao et al. 2024, section 4.1.2).

    The advantage of an answer is its reward minus the mean of its group, the answers to the same
    prompt, divided by a standard deviation (of n - 1 degrees of freedom, plus 1e-4).

    Args:
        rewards: the rewards, group by group. An answer without a reward is NaN: it is left out, and
          its advantage is 0.
        group_size: the number of answers to each prompt, at least 2.
        scale: whose standard deviation divides: the group's, that of the whole batch, or none.

    Raises:
        UserError: N is no multiple of the group size, or the latter is below 2.
    """
    groups = _groups(rewards, group_size)
    centered = groups - jnp.nanmean(groups, axis=1, keepdims=True)
    if scale == "group":
        centered /= jnp.nanstd(groups, axis=1, ddof=1, keepdims=True) + 1e-4
    elif scale == "batch":
        centered /= jnp.nanstd(rewards, ddof=1) + 1e-4
    elif scale != "none":
        raise UserError(f"scale {scale!r} is unknown: choose 'group', 'batch' or 'none'")
    return jnp.nan_to_num(centered.reshape(-1), posinf=0.0, neginf=0.0)


def leave_one_out_advantages(
    rewards: Float[Array, " N"], group_size: int, *, divergence: Float[Array, " N"] | float = 0.0
) -> Float[Array, " N"]:
    """Returns RLOO's advantages: a reward minus the mean of the others of its group.

    Args:
        rewards: the rewards, group by group. An answer without a reward is NaN: it is left out, and
          its advantage is 0.
        group_size: the number of answers to each prompt, at least 2.
        divergence: what is subtracted from each reward first: β Σ log (π_old / π_ref) over the
          tokens of the answer.

    Raises:
        UserError: N is no multiple of the group size, or the latter is below 2.
    """
    groups = _groups(rewards - divergence, group_size)
    others = jnp.sum(~jnp.isnan(groups), axis=1, keepdims=True) - 1
    baseline = (jnp.nansum(groups, axis=1, keepdims=True) - groups) / others
    return jnp.nan_to_num((groups - baseline).reshape(-1), posinf=0.0, neginf=0.0)


def _groups(rewards: Array, group_size: int) -> Array:
    """Returns rewards `[groups, group_size]`."""
    if group_size < 2 or rewards.shape[0] % group_size:
        raise UserError(
            f"{rewards.shape[0]} rewards do not make groups of {group_size}: give a multiple of "
            "the number of answers to each prompt, which is at least 2"
        )
    return rewards.reshape(-1, group_size)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise UserError(f"temperature {temperature} must be positive: 1.0 leaves logits unchanged")


def _mask(batch: Batch) -> Bool[Array, "B T"]:
    """Returns where a label belongs to an answer."""
    return (batch["loss_mask"] != 0) & (batch["attention_mask"] != 0)


def _real_rows(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each row that is not filler, else 0."""
    return jnp.any(batch["attention_mask"] != 0, axis=-1).astype(jnp.float32)


def _token_log_probs(outputs: Outputs, batch: Batch, temperature: float) -> TokenLogProbs:
    return token_log_probs(outputs.projection, batch["labels"], temperature=temperature)


def _masked_sums(values: Mapping[str, Array], mask: Array) -> Terms:
    """Returns the sum of each value where the mask is true; elsewhere it may be NaN."""
    return {name: jnp.sum(jnp.where(mask, value, 0.0)) for name, value in values.items()}
