"""Text classification with one label, several labels or a number per text, and multiple choice."""

import dataclasses
from typing import cast

import jax.numpy as jnp

from ...data.dataset import DataSplit
from ...data.tasks.multiple_choice import MultipleChoiceData
from ...data.tasks.sequence_classification import (
    SequenceClassificationData,
    SequenceClassificationExamples,
)
from ...models.nn.typing import Array
from ..losses.cross_entropy import sigmoid_cross_entropy, softmax_cross_entropy, squared_error
from ..losses.eval_step import Evaluation
from ..losses.metrics import classification_scores, regression_scores
from ..losses.objective import ENCODER_INPUTS, Objective, Outputs, Terms, row_weights
from ..objective_config import ObjectiveConfig, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(ObjectiveConfig[SequenceClassificationData]):
    """Text classification. The data determine the kind of labels.

    It has no hyperparameters.
    """

    kind = "classification"
    data_kinds = (SequenceClassificationData,)
    progress_metrics = ("accuracy", "f1", "f1_macro", "matthews", "pearson")
    next_command = "predict {run} --input FILE"

    def build(self, data: SequenceClassificationData) -> Objective:
        """Returns the loss for the kind of labels."""
        # A binary target is a single label, which is 0 or 1.
        return {
            "single_label": CLASSIFICATION,
            "binary": MULTI_LABEL,
            "multi_label": MULTI_LABEL,
            "regression": REGRESSION,
        }[data.target]

    def metrics(
        self, evaluation: Evaluation, split: DataSplit, data: SequenceClassificationData
    ) -> Scores:
        """Returns GLUE's metrics for the kind of labels."""
        return _classification_scores(evaluation, split, data.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoiceConfig(ObjectiveConfig[MultipleChoiceData]):
    """Chooses one of several answers to a question. It has no hyperparameters."""

    kind = "multiple_choice"
    data_kinds = (MultipleChoiceData,)
    progress_metrics = ("accuracy",)
    next_command = "predict {run} --input FILE"

    def build(self, data: MultipleChoiceData) -> Objective:
        """Returns `CLASSIFICATION`, whose labels are the choices."""
        del data
        return CLASSIFICATION

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: MultipleChoiceData) -> Scores:
        """Returns the accuracy and the number of questions."""
        del split, data
        questions = int(evaluation.counts["accuracy"])
        return {"accuracy": evaluation.means["accuracy"], "questions": questions}


def _classification_scores(evaluation: Evaluation, split: DataSplit, target: str) -> Scores:
    examples = cast(SequenceClassificationExamples, split.examples)
    gold, predicted = examples.gold(), examples.decode(evaluation.predictions)
    if target == "regression":
        return regression_scores(gold, [p["score"] for p in predicted])
    # The predictions are names of labels, but the scores need indices of labels.
    names = examples.labels
    # A binary target is scored as two classes; the second class is positive.
    if target == "binary":
        (positive,) = names
        names = (f"not {positive}", positive)
        gold = [int(label[0]) for label in cast(list[list[float]], gold)]
    if target == "multi_label":
        present = [[name in p["labels"] for name in names] for p in predicted]
        return classification_scores(gold, present, names)
    indices = [names.index(p["label"]) for p in predicted]
    scores = classification_scores(gold, indices, names)
    # Some test sets have several parts, such as matched and mismatched. Compute the accuracy of
    # each part.
    parts = [example.part for example in split.content]
    for part in sorted(set(filter(None, parts))):
        right = [a == b for a, b, of in zip(gold, indices, parts, strict=True) if of == part]
        scores[f"accuracy_{part}"] = sum(right) / len(right)
    return scores


def label_terms(outputs: Outputs, labels: Array, weights: Array) -> Terms:
    """Returns the sum of the loss and the number of correct labels."""
    result = softmax_cross_entropy(outputs.logits, labels, weights)
    return {"label": result.loss, "accuracy": result.correct}


def label_counts(weights: Array) -> Terms:
    """Returns the number of labels for each term of `label_terms`."""
    return dict.fromkeys(("label", "accuracy"), jnp.sum(weights))


CLASSIFICATION = Objective(
    coefficients={"label": 1.0},
    inputs=ENCODER_INPUTS,
    counts=lambda batch: label_counts(row_weights(batch)),
    terms=lambda outputs, batch: label_terms(outputs, batch["labels"], row_weights(batch)),
    predictions=lambda outputs: {"logits": outputs.logits},
)
"""Predict one of several labels or choices (Devlin et al. 2019, sections 4.1 and 4.4)."""

MULTI_LABEL = dataclasses.replace(
    CLASSIFICATION,
    counts=lambda batch: {"label": jnp.sum(row_weights(batch))},
    terms=lambda outputs, batch: {
        "label": sigmoid_cross_entropy(outputs.logits, batch["labels"], row_weights(batch))
    },
)
"""Predict any number of labels for each sequence, each with a separate sigmoid. A binary target has
one label."""

REGRESSION = dataclasses.replace(
    CLASSIFICATION,
    coefficients={"squared_error": 1.0},
    counts=lambda batch: {"squared_error": jnp.sum(row_weights(batch))},
    terms=lambda outputs, batch: {
        "squared_error": squared_error(outputs.logits[..., 0], batch["labels"], row_weights(batch))
    },
)
"""Predict a number for each sequence, with the squared error as the loss."""
