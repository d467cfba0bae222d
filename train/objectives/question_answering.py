"""Extractive question answering: predict the start and the end of the answer."""

import dataclasses
from typing import cast

import jax.numpy as jnp

from ...data.dataset import DataSplit
from ...data.tasks.question_answering import QuestionAnsweringData, QuestionAnsweringExamples
from ...models.nn.typing import Array, Float
from ..losses.cross_entropy import softmax_cross_entropy
from ..losses.eval_step import Evaluation
from ..losses.metrics import answer_scores
from ..losses.objective import ENCODER_INPUTS, Batch, Objective, Outputs, Terms, row_weights
from ..objective_config import ObjectiveConfig, Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionAnsweringConfig(ObjectiveConfig[QuestionAnsweringData]):
    """Predicts an answer span. It has no hyperparameters."""

    kind = "question_answering"
    data_kinds = (QuestionAnsweringData,)
    progress_metrics = ("exact_match", "f1")
    next_command = "predict {run} --input FILE"

    def build(self, data: QuestionAnsweringData) -> Objective:
        """Returns `SPAN`."""
        del data
        return SPAN

    def metrics(
        self, evaluation: Evaluation, split: DataSplit, data: QuestionAnsweringData
    ) -> Scores:
        """Returns exact match and F1, as SQuAD defines them."""
        del data
        examples = cast(QuestionAnsweringExamples, split.examples)
        # A long text is split into several rows, so match the answers by question id.
        predicted = {p["id"]: p["answer"] for p in examples.decode(evaluation.predictions)}
        gold = {g["id"]: g["answers"] for g in examples.gold()}
        return answer_scores(gold, predicted)


def _span_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each row that is not filler and has a known answer position, else 0."""
    return row_weights(batch) * (batch["start_positions"] >= 0)


def _span_terms(outputs: Outputs, batch: Batch) -> Terms:
    weights = _span_weights(batch)
    real = batch["attention_mask"] != 0
    terms = {}
    for name in ("start", "end"):
        # Padding cannot begin or end an answer.
        logits = jnp.where(real, getattr(outputs, f"{name}_logits"), -1e30)
        result = softmax_cross_entropy(logits, batch[f"{name}_positions"], weights)
        terms |= {name: result.loss, f"{name}_accuracy": result.correct}
    return terms


SPAN = Objective(
    coefficients={"start": 0.5, "end": 0.5},
    inputs=ENCODER_INPUTS,
    counts=lambda batch: dict.fromkeys(
        ("start", "end", "start_accuracy", "end_accuracy"), jnp.sum(_span_weights(batch))
    ),
    terms=_span_terms,
    predictions=lambda outputs: {
        "start_logits": outputs.start_logits,
        "end_logits": outputs.end_logits,
    },
)
"""Predict the start and the end of an answer (Devlin et al. 2019, section 4.2)."""
