"""Direct preference optimization (DPO) of a language model."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from ...data.chat.preference_pairs import DPOData
from ...data.common.fields import Positive, Range, require
from ...data.dataset import ArraySpec, BatchSpec, DataSplit, Values
from ...models.nn.typing import Array, Float
from ...models.token_log_probs import token_log_probs
from ..losses.answers import answer_mask
from ..losses.eval_step import Evaluation
from ..losses.objective import Batch, Objective, Outputs, Terms
from ..losses.pairs import pair_inputs, pair_weights, rows_of_pairs, weighted_sums
from ..objective_config import ObjectiveConfig, OpenReference, Scores
from .reward import preference_metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(ObjectiveConfig[DPOData]):
    """The settings of direct preference optimization, with the defaults of TRL."""

    kind = "dpo"
    data_kinds = (DPOData,)
    head_names = ("causal_lm",)
    progress_metrics = ("rewards/accuracies", "rewards/margins")
    compares_with_start = True
    next_command = "chat {run}"
    needs_init_from = True

    beta: Positive = 0.1
    """Strength of the penalty for diverging from the reference model (the initial model)."""
    loss_type: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    """The loss function for a pair; see `train.dpo`."""
    label_smoothing: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """For the loss `robust`: the assumed fraction of pairs with swapped answers."""
    reference: Literal["precomputed", "frozen"] = "precomputed"
    """precomputed: the reference's log-probabilities are computed before training and cached for
    later runs. frozen: each step computes these log-probabilities from frozen parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.loss_type == "robust" or not self.label_smoothing,
            f"label_smoothing {self.label_smoothing} requires the loss type robust, got "
            f"{self.loss_type}",
        )

    def build(self, data: DPOData) -> Objective:
        """Returns `dpo`."""
        del data
        return dpo(self)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: DPOData) -> Scores:
        """Returns the means of all metrics of `dpo`, and the number of pairs."""
        del data
        return preference_metrics(evaluation, split)

    def batch_spec(self, data: DPOData, num_labels: int, num_choices: int) -> BatchSpec:
        """Describes the arrays of a pair, including any precomputed log-probabilities."""
        spec = data.batch_spec(num_labels, num_choices)
        if self.reference == "precomputed":
            spec["reference_log_probs"] = ArraySpec((2,), Values.LABEL, "float32")
        return spec

    def prepare(self, data: DPOData, open_reference: OpenReference) -> DPOData:
        """Adds the reference model to the data, if its log-probabilities are precomputed."""
        if self.reference == "frozen":
            return data
        return data.with_reference(open_reference())

    def for_evaluation(self) -> "DPOConfig":
        """Returns these settings with a precomputed reference, as an evaluation requires."""
        return dataclasses.replace(self, reference="precomputed")


def _log_sigmoid_loss(beta: float, label_smoothing: float) -> Callable[[Array, Array], Array]:
    def loss(difference: Array, per_token: Array) -> Array:
        del per_token
        right = jax.nn.log_sigmoid(beta * difference)
        if not label_smoothing:
            return -right
        wrong = jax.nn.log_sigmoid(-beta * difference)
        # The expected loss when labels are swapped at random, rescaled so that it is unbiased.
        e = label_smoothing
        return (-(1 - e) * right + e * wrong) / (1 - 2 * e)

    return loss


def dpo(settings: DPOConfig = DPOConfig()) -> Objective:
    """Returns the loss of direct preference optimization of a causal language model.

    π and π_ref are the probabilities of a whole answer under the model and under a frozen reference
    model. Δ is log (π / π_ref) of the chosen answer minus log (π / π_ref) of the rejected answer.
    The loss of a pair is

    - `sigmoid`: -log σ(β Δ) (Rafailov et al. 2023, equation 7);
    - `robust`: [-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)] / (1 - 2ε), where a fraction ε of the labels
      is wrong (Chowdhury et al. 2024, equation 12);
    - `hinge`: max(0, 1 - β Δ) (Zhao et al. 2023);
    - `ipo`: (Δ̄ - 1 / 2β)², where Δ̄ divides each log (π / π_ref) by the number of tokens of its
      answer, as in TRL (Azar et al. 2024, equation 17).

    The arrays of a batch:

    - `input_ids` int32 `[B, 2, T]`: prompt and answer, padded on the right, with the chosen answer
      first; `labels` int32 `[B, 2, T]`: the token after each input token;
    - `attention_mask` int32 `[B, 2, T]`: 1 for real tokens;
    - `loss_mask` int32 or bool `[B, 2, T]`: 1 where the label belongs to the answer;
    - `reference_log_probs` float32 `[B, 2]`: log π_ref of each answer, in nats (absent with
      `reference="frozen"`);
    - `pair_weights` float32 `[B]` (optional): the weight of each pair.

    The metrics have TRL's names: `rewards/chosen` and `rewards/rejected` (β log (π / π_ref)),
    `rewards/accuracies`, `rewards/margins`, `logps/chosen`, `logps/rejected`.

    Args:
        settings: the hyperparameters. With `reference="frozen"` each step computes π_ref from the
          frozen parameters of the train state: `init_state(params, tx, frozen=params)`.
    """
    beta = settings.beta
    # Each function maps the arrays Δ and Δ̄ [B] to the loss of each pair [B].
    losses: dict[str, Callable[[Array, Array], Array]] = {
        "sigmoid": _log_sigmoid_loss(beta, 0.0),
        "robust": _log_sigmoid_loss(beta, settings.label_smoothing),
        "hinge": lambda difference, per_token: jax.nn.relu(1 - beta * difference),
        "ipo": lambda difference, per_token: jnp.square(per_token - 1 / (2 * beta)),
    }
    names = ("preference", *(f"rewards/{n}" for n in _REWARDS), "logps/chosen", "logps/rejected")

    def counts(batch: Batch) -> Terms:
        # A pair of weight 1/3 adds a third of a pair to the count.
        return dict.fromkeys(names, jnp.sum(pair_weights(batch)))

    def terms(outputs: Outputs, batch: Batch, reference: Outputs | None = None) -> Terms:
        log_probs = answer_log_probs(outputs, batch)  # [B, 2]
        if reference is None:
            require(
                "reference_log_probs" in batch,
                "the batch has no reference_log_probs: make its examples with "
                "`DPOData.with_reference`, or choose reference frozen",
            )
            reference_log_probs = batch["reference_log_probs"]
        else:
            reference_log_probs = answer_log_probs(reference, batch)
        # log (π / π_ref) of each answer, [B, 2].
        ratios = log_probs - reference_log_probs
        # Only `ipo` divides the log-ratios by the number of tokens.
        lengths = jnp.maximum(jnp.sum(answer_mask(batch), axis=-1), 1)
        per_token = ratios / lengths
        difference = ratios[:, 0] - ratios[:, 1]
        values = {
            "preference": losses[settings.loss_type](difference, per_token[:, 0] - per_token[:, 1]),
            "rewards/chosen": beta * ratios[:, 0],
            "rewards/rejected": beta * ratios[:, 1],
            "rewards/accuracies": (difference > 0).astype(jnp.float32),
            "rewards/margins": beta * difference,
            "logps/chosen": log_probs[:, 0],
            "logps/rejected": log_probs[:, 1],
        }
        return weighted_sums(values, pair_weights(batch))

    return Objective(
        coefficients={"preference": 1.0},
        inputs=pair_inputs,
        counts=counts,
        terms=terms,
        reference=settings.reference == "frozen",
    )


_REWARDS = ("chosen", "rejected", "accuracies", "margins")


def answer_log_probs(outputs: Outputs, batch: Batch) -> Float[Array, "B 2"]:
    """Returns the log-probability in nats of each answer in a batch of pairs.

    Args:
        outputs: the outputs of a causal language model for the inputs of `dpo`.
        batch: a batch of `dpo`.
    """
    mask = answer_mask(batch)
    log_prob = token_log_probs(
        outputs.projection, rows_of_pairs(batch["labels"])
    ).log_prob  # [2B, T]
    # [2B, T] → [B, 2, T]. Log-probabilities of prompts and padding may be NaN.
    return jnp.sum(jnp.where(mask, log_prob.reshape(mask.shape), 0.0), axis=-1)
