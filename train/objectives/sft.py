"""Supervised fine-tuning (SFT): next-token prediction for the marked tokens only."""

import dataclasses

import jax.numpy as jnp

from ...data.chat.supervised import SupervisedData
from ...data.dataset import DataSplit
from ...models.nn.typing import Array, Float
from ..losses.cross_entropy import cross_entropy
from ..losses.eval_step import Evaluation
from ..losses.objective import Batch, Objective, Outputs, Terms
from ..objective_config import ObjectiveConfig, Scores, perplexity
from .causal_lm import CAUSAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(ObjectiveConfig[SupervisedData]):
    """Supervised fine-tuning. It has no hyperparameters."""

    kind = "sft"
    data_kinds = (SupervisedData,)
    head_names = ("causal_lm",)
    progress_metrics = ("perplexity", "mean_token_accuracy")
    compares_with_start = True
    next_command = "chat {run}"

    def build(self, data: SupervisedData) -> Objective:
        """Returns `supervised`."""
        del data
        return supervised()

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: SupervisedData) -> Scores:
        """Returns perplexity, accuracy, and the number of learned tokens."""
        del split, data
        return {
            "perplexity": perplexity(evaluation.loss),
            "mean_token_accuracy": evaluation.means["mean_token_accuracy"],
            "num_tokens": int(evaluation.counts["next_token"]),
        }


def supervised() -> Objective:
    """Returns the loss of supervised fine-tuning of a causal language model.

    The loss is -Σ log π(y_t | …) over the marked labels, divided by their number in the whole
    batch, in nats (Ouyang et al. 2022, section 3.5, step 1). A batch has the arrays of `CAUSAL`,
    and in addition `loss_mask`:

    - `input_ids` int32 `[B, T]`, and `labels` int32 `[B, T]`, the token after each input token;
    - `segment_ids` int32 `[B, T]`: the id of the example in a packed row, 0 for padding;
      `position_ids` int32 `[B, T]` (optional);
    - `loss_mask` int32 or bool `[B, T]`: 1 for labels to learn, such as the tokens of an answer and
      its end; 0 for prompts, padding, and the first token of a packed example.

    The metric `mean_token_accuracy` is the share of the marked labels that have the highest logit.
    """
    return Objective(
        coefficients={"next_token": 1.0},
        inputs=CAUSAL.inputs,
        counts=_counts,
        terms=_terms,
    )


def _weights(batch: Batch) -> Float[Array, "B T"]:
    # Filler rows have no segments, so all of their weights are 0.
    return ((batch["loss_mask"] != 0) & (batch["segment_ids"] != 0)).astype(jnp.float32)


def _counts(batch: Batch) -> Terms:
    num_labels = jnp.sum(_weights(batch))
    return {"next_token": num_labels, "mean_token_accuracy": num_labels}


def _terms(outputs: Outputs, batch: Batch) -> Terms:
    # Unmarked labels have weight 0.
    result = cross_entropy(outputs.projection, batch["labels"], _weights(batch))
    return {"next_token": result.loss, "mean_token_accuracy": result.correct}
