"""Objectives of preferences: reward models, and direct preference optimization (DPO).

A preference is a pair of texts, the chosen one and the rejected one, for the same prompt. Both are
one example, `[B, 2, T]`, so that neither micro-batches nor devices divide a pair.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ...data.common.errors import UserError
from ...models.nn.typing import Array, Float
from ...models.token_log_probs import token_log_probs
from ..losses.objective import Batch, Inputs, Objective, Outputs, Terms

PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo"]
"""A loss of DPO; see `dpo`."""
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def _rows(x: Array) -> Array:
    """Returns `[2B, …]` of `[B, 2, …]`: the chosen row of each pair before its rejected row."""
    return x.reshape(-1, *x.shape[2:])


def _both_inputs(batch: Batch) -> Inputs:
    return {name: _rows(batch[name]) for name in _INPUTS if name in batch}


def _pair_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns the weight of each pair: 1 unless stated; 0 for filler, which is all padding."""
    real = jnp.any(batch["attention_mask"] != 0, axis=(1, 2)).astype(jnp.float32)
    return real * batch["pair_weights"] if "pair_weights" in batch else real


def reward(*, margin: float = 0.0, centering: float = 0.0) -> Objective:
    """Returns the objective of a reward model, learned from preferences.

    The loss of a pair is -log σ(r_c - r_r - margin) + centering · (r_c + r_r)², where r_c and r_r
    are the rewards of the chosen and the rejected text (Ouyang et al. 2022, equation 1; the
    margin is from Touvron et al. 2023, section 3.2.2, the centering from Eisenstein et al. 2023).
    The model has a head of sequence classification with a single label. The arrays of a batch:

    - `input_ids` int32 `[B, 2, T]`: prompt and answer, the chosen one first, padded on the right;
    - `attention_mask` int32 `[B, 2, T]`: 1 for real tokens; a causal model is read at the last;
    - `token_type_ids` int32 `[B, 2, T]` (optional, for an encoder that has segments);
    - `margin` float32 `[B]` (optional): is added to `margin`;
    - `pair_weights` float32 `[B]` (optional): the weight of each pair, such as 1 / the number of
      pairs of its prompt; the loss is the weighted mean.

    Measures: `accuracy`, the share of pairs whose chosen text has the higher reward, `margin`,
    the mean of r_c - r_r, and `mean_reward` of all texts.

    Args:
        margin: the least difference for which the loss asks.
        centering: the weight of the square, which keeps rewards near 0; TRL recommends 0.01.

    Raises:
        UserError: `centering` is negative.
    """
    if centering < 0:
        raise UserError(f"centering {centering} must not be negative: 0 leaves it out")
    names = ("preference", *(("centering",) if centering else ()))

    def counts(batch: Batch) -> Terms:
        number = jnp.sum(_pair_weights(batch))
        return dict.fromkeys((*names, "accuracy", "margin", "mean_reward"), number)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        rewards = outputs.logits[:, 0].reshape(-1, 2)  # [B, 2]
        difference = rewards[:, 0] - rewards[:, 1]
        wanted = margin + batch["margin"] if "margin" in batch else margin
        values = {
            "preference": -jax.nn.log_sigmoid(difference - wanted),
            "accuracy": (difference > 0).astype(jnp.float32),
            "margin": difference,
            "mean_reward": jnp.mean(rewards, axis=1),
        }
        if centering:
            values["centering"] = jnp.square(jnp.sum(rewards, axis=1))
        return _weighted_sums(values, _pair_weights(batch))

    coefficients = {"preference": 1.0, "centering": centering}
    return Objective(
        coefficients={name: coefficients[name] for name in names},
        inputs=_both_inputs,
        counts=counts,
        terms=terms,
        predictions=lambda outputs: {"rewards": outputs.logits[:, 0].reshape(-1, 2)},
    )


def _weighted_sums(values: Mapping[str, Array], weights: Float[Array, " B"]) -> Terms:
    """Returns Σ weight · value of each; a value without weight may be anything, also NaN."""
    return {
        name: jnp.sum(weights * jnp.where(weights > 0, value, 0.0))
        for name, value in values.items()
    }


def _log_sigmoid_loss(beta: float, label_smoothing: float) -> Callable[[Array, Array], Array]:
    def loss(difference: Array, per_token: Array) -> Array:
        del per_token
        right = jax.nn.log_sigmoid(beta * difference)
        if not label_smoothing:
            return -right
        wrong = jax.nn.log_sigmoid(-beta * difference)
        e = label_smoothing
        return (-(1 - e) * right + e * wrong) / (1 - 2 * e)

    return loss


def dpo(
    *,
    beta: float = 0.1,
    loss: PreferenceLoss = "sigmoid",
    label_smoothing: float = 0.0,
    frozen_reference: bool = False,
) -> Objective:
    """Returns the objective of direct preference optimization of a causal language model.

    With π and π_ref the probabilities of a whole answer under the model and under a frozen
    reference, and Δ = log (π / π_ref) of the chosen answer minus that of the rejected one, the
    loss of a pair is

    - `sigmoid`: -log σ(β Δ) (Rafailov et al. 2023, equation 7);
    - `robust`: [-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)] / (1 - 2ε), where a share ε of the labels is
      wrong (Chowdhury et al. 2024, equation 12);
    - `hinge`: max(0, 1 - β Δ) (Zhao et al. 2023);
    - `ipo`: (Δ̄ - 1 / 2β)², where Δ̄ divides each log (π / π_ref) by the number of tokens of its
      answer, as in TRL (Azar et al. 2024, equation 17).

    The arrays of a batch:

    - `input_ids`, `labels` int32 `[B, 2, T]`: prompt and answer, the chosen one first, padded on
      the right, and the token after each of them;
    - `attention_mask` int32 `[B, 2, T]`: 1 for real tokens;
    - `loss_mask` int32 or bool `[B, 2, T]`: 1 where the label belongs to the answer;
    - `reference_log_probs` float32 `[B, 2]`: log π_ref of each answer, in nats; not with
      `frozen_reference`;
    - `pair_weights` float32 `[B]` (optional): the weight of each pair.

    Measures, under TRL's names: `rewards/chosen`, `rewards/rejected` (β log (π / π_ref)),
    `rewards/accuracies`, `rewards/margins`, `logps/chosen`, `logps/rejected`.

    Args:
        beta: β, the strength with which the model is held near the reference; positive.
        loss: the loss of a pair.
        label_smoothing: ε of `robust`, at least 0 and below 0.5.
        frozen_reference: compute π_ref from the frozen parameters of the train state
          (`init_state(params, tx, frozen=params)`) in each step, rather than read it.

    Raises:
        UserError: β is not positive, ε is out of range or goes with another loss, or the loss has
          another name.
    """
    if not beta > 0:
        raise UserError(f"beta {beta} must be positive, for example 0.1")
    if not 0 <= label_smoothing < 0.5:
        raise UserError(f"label_smoothing {label_smoothing} must be at least 0 and below 0.5")
    if label_smoothing and loss != "robust":
        raise UserError(
            f"label_smoothing {label_smoothing} belongs to the loss 'robust', and this is {loss!r}"
        )
    losses: dict[str, Callable[[Array, Array], Array]] = {
        "sigmoid": _log_sigmoid_loss(beta, 0.0),
        "robust": _log_sigmoid_loss(beta, label_smoothing),
        "hinge": lambda difference, per_token: jax.nn.relu(1 - beta * difference),
        "ipo": lambda difference, per_token: jnp.square(per_token - 1 / (2 * beta)),
    }
    if loss not in losses:
        raise UserError(f"loss {loss!r} is unknown: choose one of {', '.join(losses)}")
    names = ("preference", *(f"rewards/{n}" for n in _REWARDS), "logps/chosen", "logps/rejected")

    def counts(batch: Batch) -> Terms:
        return dict.fromkeys(names, jnp.sum(_pair_weights(batch)))

    def terms(outputs: Outputs, batch: Batch, reference: Outputs | None = None) -> Terms:
        log_probs = answer_log_probs(outputs, batch)  # [B, 2]
        if reference is None:
            reference_log_probs = batch["reference_log_probs"]
        else:
            reference_log_probs = answer_log_probs(reference, batch)
        ratios = log_probs - reference_log_probs
        lengths = jnp.maximum(jnp.sum(_answer_mask(batch), axis=-1), 1)
        per_token = ratios / lengths
        difference = ratios[:, 0] - ratios[:, 1]
        values = {
            "preference": losses[loss](difference, per_token[:, 0] - per_token[:, 1]),
            "rewards/chosen": beta * ratios[:, 0],
            "rewards/rejected": beta * ratios[:, 1],
            "rewards/accuracies": (difference > 0).astype(jnp.float32),
            "rewards/margins": beta * difference,
            "logps/chosen": log_probs[:, 0],
            "logps/rejected": log_probs[:, 1],
        }
        return _weighted_sums(values, _pair_weights(batch))

    return Objective(
        coefficients={"preference": 1.0},
        inputs=_both_inputs,
        counts=counts,
        terms=terms,
        reference=frozen_reference,
    )


_REWARDS = ("chosen", "rejected", "accuracies", "margins")


def _answer_mask(batch: Batch) -> Array:
    return (batch["loss_mask"] != 0) & (batch["attention_mask"] != 0)  # [B, 2, T]


def answer_log_probs(outputs: Outputs, batch: Batch) -> Float[Array, "B 2"]:
    """Returns the log-probability of the answer in each row of a batch of pairs, in nats.

    Args:
        outputs: the outputs of a causal language model for the inputs of `dpo`.
        batch: a batch of `dpo`.
    """
    mask = _answer_mask(batch)
    log_prob = token_log_probs(outputs.projection, _rows(batch["labels"])).log_prob  # [2B, T]
    return jnp.sum(jnp.where(mask, log_prob.reshape(mask.shape), 0.0), axis=-1)
