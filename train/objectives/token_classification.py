"""The classification of words, for example by part of speech or type of name."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from ...data.dataset import DataSplit
from ...data.tasks.token_classification import TokenClassificationData, TokenClassificationExamples
from ...models.nn.typing import Float
from ..losses.eval_step import Evaluation
from ..losses.metrics import entity_scores
from ..losses.objective import ENCODER_INPUTS, Array, Batch, Objective, Outputs, Predictions
from ..objective_config import ObjectiveConfig, Scores
from .classification import label_counts, label_terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenClassificationConfig(ObjectiveConfig[TokenClassificationData]):
    """Predicts a label for each word. It has no hyperparameters."""

    kind = "token_classification"
    data_kinds = (TokenClassificationData,)
    progress_metrics = ("f1", "token_accuracy")
    next_command = "predict {run} --input FILE"

    def build(self, data: TokenClassificationData) -> Objective:
        """Returns `TAGGING`."""
        del data
        return TAGGING

    def metrics(
        self, evaluation: Evaluation, split: DataSplit, data: TokenClassificationData
    ) -> Scores:
        """Returns entity scores for BIO labels, otherwise the token accuracy."""
        del data
        examples = cast(TokenClassificationExamples, split.examples)
        if not all(name == "O" or name[:2] in ("B-", "I-") for name in examples.labels):
            return {"token_accuracy": evaluation.means["accuracy"]}  # parts of speech, for example
        predicted = [p["tags"] for p in examples.decode(evaluation.predictions)]
        return entity_scores(examples.gold(), predicted)


def _tag_weights(batch: Batch) -> Float[Array, "B T"]:
    """Returns 1 for the first piece of each word, where the label is at least 0, else 0."""
    return ((batch["labels"] >= 0) & (batch["attention_mask"] != 0)).astype(jnp.float32)


def _tag_predictions(outputs: Outputs) -> Predictions:
    # Keep only the best label of each token, so that the predictions for a split stay small.
    probabilities = jax.nn.softmax(outputs.logits, axis=-1)
    return {
        "label_ids": jnp.argmax(probabilities, axis=-1),
        "probabilities": jnp.max(probabilities, axis=-1),
    }


TAGGING = Objective(
    coefficients={"label": 1.0},
    inputs=ENCODER_INPUTS,
    counts=lambda batch: label_counts(_tag_weights(batch)),
    terms=lambda outputs, batch: label_terms(
        # Labels below 0 have weight 0, but must be valid indices.
        outputs,
        jnp.maximum(batch["labels"], 0),
        _tag_weights(batch),
    ),
    predictions=_tag_predictions,
)
"""Predict a label for each word, at its first piece (Devlin et al. 2019, section 5.3)."""
