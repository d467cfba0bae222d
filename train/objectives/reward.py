"""The objective of reward models, which learn from preferences to score texts.

A preference is a pair of texts for the same prompt: a chosen text and a rejected text.
"""

import dataclasses

import jax
import jax.numpy as jnp

from ...data.chat.preference_pairs import RewardData
from ...data.common.fields import NonNegative
from ...data.dataset import DataSplit
from ..losses.eval_step import Evaluation
from ..losses.objective import Batch, Objective, Outputs, Terms
from ..losses.pairs import pair_inputs, pair_weights, weighted_sums
from ..objective_config import ObjectiveConfig, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(ObjectiveConfig[RewardData]):
    """The settings of a reward model's loss."""

    kind = "reward"
    data_kinds = (RewardData,)
    head_names = ("sequence_classification",)
    progress_metrics = ("accuracy", "margin")
    compares_with_start = True
    next_command = "evaluate {run} --data SOURCE"

    margin: float = 0.0
    """The target difference between the rewards of a pair."""
    centering: NonNegative = 0.0
    """The weight of the squared sum of both rewards, which keeps rewards near 0; TRL recommends
    0.01."""

    def build(self, data: RewardData) -> Objective:
        """Returns `reward`."""
        del data
        return reward(self)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: RewardData) -> Scores:
        """Returns the accuracy, the mean margin, and the mean, minimum and maximum reward."""
        del data
        rewards = evaluation.predictions["rewards"]
        extreme = {"min_reward": float(rewards.min()), "max_reward": float(rewards.max())}
        return {**preference_metrics(evaluation, split), **extreme}


def preference_metrics(evaluation: Evaluation, split: DataSplit) -> Scores:
    """Returns the metrics of an evaluation on preferences, and the number of pairs."""
    measures = {name: x for name, x in evaluation.means.items() if name != "preference"}
    return {**measures, "pairs": split.examples.num_examples}


def reward(settings: RewardConfig = RewardConfig()) -> Objective:
    """Returns the loss of a reward model that learns from preferences.

    The loss of a pair is -log σ(r_c - r_r - margin) + centering · (r_c + r_r)², where r_c and r_r
    are the rewards of the chosen and the rejected text (Ouyang et al. 2022, equation 1; the margin
    is from Touvron et al. 2023, section 3.2.2, and the centering from Eisenstein et al. 2023). The
    model has a sequence-classification head with a single label. The arrays of a batch:

    - `input_ids` int32 `[B, 2, T]`: prompt and answer, padded on the right, with the chosen answer
      first;
    - `attention_mask` int32 `[B, 2, T]`: 1 for real tokens; the reward of a causal model is its
      output at the last real token;
    - `token_type_ids` int32 `[B, 2, T]` (optional, for an encoder that has segments);
    - `margin` float32 `[B]` (optional): a margin for each pair, which is added to the setting
      `margin`;
    - `pair_weights` float32 `[B]` (optional): the weight of each pair, such as the inverse of the
      number of pairs with its prompt; the loss is the weighted mean.

    The metrics are `accuracy`, the share of pairs whose chosen text has the higher reward;
    `margin`, the mean of r_c - r_r; and `mean_reward`, the mean reward of all texts.

    Args:
        settings: the hyperparameters.
    """
    margin, centering = settings.margin, settings.centering
    names = ("preference", *(("centering",) if centering else ()))

    def counts(batch: Batch) -> Terms:
        total = jnp.sum(pair_weights(batch))
        return dict.fromkeys((*names, "accuracy", "margin", "mean_reward"), total)

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        # Rows 2i and 2i + 1 are the chosen and the rejected text of pair i.
        rewards = outputs.logits[:, 0].reshape(-1, 2)  # [B, 2]
        difference = rewards[:, 0] - rewards[:, 1]
        # The setting `margin` is the same for all pairs; the array adds a margin to each pair.
        margins = margin + batch["margin"] if "margin" in batch else margin
        values = {
            "preference": -jax.nn.log_sigmoid(difference - margins),
            "accuracy": (difference > 0).astype(jnp.float32),
            "margin": difference,
            "mean_reward": jnp.mean(rewards, axis=1),
        }
        if centering:
            values["centering"] = jnp.square(jnp.sum(rewards, axis=1))
        return weighted_sums(values, pair_weights(batch))

    # Leave out terms whose coefficient is 0, because the loss does not need them.
    coefficients = {"preference": 1.0, "centering": centering}
    return Objective(
        coefficients={name: coefficients[name] for name in names},
        inputs=pair_inputs,
        counts=counts,
        terms=terms,
        predictions=lambda outputs: {"rewards": outputs.logits[:, 0].reshape(-1, 2)},
    )
