"""What tells one kind of training from another: one row of a table for each kind of data.

Everything else (run folders, the loop, checkpoints, evaluation, prediction) is shared.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from ...data.dataset import DataSplit
from ...data.tasks.base import DataConfig
from ...data.tasks.translation import TranslationExamples
from ...models.nn.typing import Array
from ..config import TrainConfig
from . import objectives
from .eval_step import Evaluation, unigram_entropy
from .metrics import (
    answer_scores,
    classification_scores,
    entity_scores,
    regression_scores,
    translation_scores,
)
from .objectives import Objective

Scores = dict[str, Any]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Task:
    """What training needs to know of one kind of data."""

    objective: Callable[[Any], Objective]
    """What is learned, given the run's configuration."""
    heads: Callable[[Any], tuple[str, ...]]
    """The heads (`config.head`) that can learn it, given the data's configuration."""
    scores: Callable[[Evaluation, DataSplit, Any], Scores]
    """What an evaluation reports beside the loss, given the data's configuration."""
    headline: tuple[str, ...]
    """The scores that a line of progress shows."""
    use: str
    """What a finished run is good for: a command, with {run} for its folder."""
    decoded: Callable[[Sequence[str], Sequence[str]], Scores] | None = None
    """Scores of what a finished model writes, given the references and the texts it wrote."""
    baseline: Callable[[DataSplit], tuple[str, str, float]] | None = None
    """What a model that knows only frequencies would reach: the score to compare, name, value."""


def task_of(data: DataConfig) -> Task:
    """The row of the table that `data` belongs to."""
    return TASKS[data.kind]


def objective_of(config: TrainConfig) -> Objective:
    """What a run's model learns from its kind of data."""
    objective = task_of(config.data).objective(config)
    if config.model.num_token_types > 1:
        return objective
    # RoBERTa and DistilBERT tell the parts of a row apart by their separators alone.
    return dataclasses.replace(objective, inputs=lambda batch: _one_type(objective.inputs(batch)))


def _one_type(inputs: dict[str, Array]) -> dict[str, Array]:
    return {name: x for name, x in inputs.items() if name != "token_type_ids"}


def score(data: DataConfig, evaluation: Evaluation, split: DataSplit) -> Scores:
    """`loss`, and the scores of this kind of data, as plain numbers."""
    return {"loss": evaluation.loss, **task_of(data).scores(evaluation, split, data)}


def _causal_scores(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    tokens = int(evaluation.counts["next_token"])
    return {
        "perplexity": _perplexity(evaluation.loss),
        "bits_per_byte": evaluation.loss * tokens / (math.log(2) * split.content.num_bytes),
        "tokens": tokens,
    }


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


def _pretraining_scores(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    means, counts = evaluation.means, evaluation.counts
    counted = {"masked_tokens": int(counts["masked_token"])}
    if data.next_sentence:
        counted["pairs"] = int(counts["next_sentence"])
    return {**means, "perplexity": _perplexity(means["masked_token"]), **counted}


def _classification_scores(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    rows: Any = split.examples
    gold, predicted = rows.gold(), rows.decode(evaluation.predictions)
    if data.target == "regression":
        return regression_scores(gold, [p["score"] for p in predicted])
    names = rows.labels
    if data.target == "multi_label":
        ids: Any = [[name in p["labels"] for name in names] for p in predicted]
    else:
        ids = [names.index(p["label"]) for p in predicted]
    return classification_scores(gold, ids, names)


def _tag_scores(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    rows: Any = split.examples
    if not all(name == "O" or name[:2] in ("B-", "I-") for name in rows.labels):
        return {"token_accuracy": evaluation.means["accuracy"]}  # parts of speech, say
    predicted = [p["tags"] for p in rows.decode(evaluation.predictions)]
    return entity_scores(rows.gold(), predicted)


def _span_scores(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    rows: Any = split.examples
    predicted = {p["id"]: p["answer"] for p in rows.decode(evaluation.predictions)}
    gold = {g["id"]: g["answers"] for g in rows.gold()}
    return answer_scores(gold, predicted)


def _choice_scores(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    return {
        "accuracy": evaluation.means["accuracy"],
        "questions": int(evaluation.counts["accuracy"]),
    }


def _translation_losses(evaluation: Evaluation, split: DataSplit, data: Any) -> Scores:
    means, rows = evaluation.means, cast(TranslationExamples, split.examples)
    return {
        "nll": means["nll"],
        "perplexity": _perplexity(means["nll"]),
        "accuracy": means["accuracy"],
        "tokens": int(evaluation.counts["nll"]),
        "pairs": len(rows.pairs),
    }


def _entropy(score: str) -> Callable[[DataSplit], tuple[str, str, float]]:
    name = "unigram entropy of the training text"
    return lambda split: (score, name, unigram_entropy(split.content.token_counts))


_CLASSIFICATION_OBJECTIVES = {
    "single_label": objectives.CLASSIFICATION,
    "multi_label": objectives.MULTI_LABEL,
    "regression": objectives.REGRESSION,
}

PREDICT = "predict {run} --input FILE"

TASKS: dict[str, Task] = {
    "causal_lm": Task(
        objective=lambda config: objectives.CAUSAL,
        heads=lambda data: ("causal_lm",),
        scores=_causal_scores,
        headline=("perplexity", "bits_per_byte"),
        use="generate {run} --prompt TEXT",
        baseline=_entropy("loss"),
    ),
    "pretraining": Task(
        objective=lambda config: (
            objectives.PRETRAINING if config.data.next_sentence else objectives.MASKED
        ),
        heads=lambda data: ("pretraining" if data.next_sentence else "masked_lm",),
        scores=_pretraining_scores,
        headline=("masked_token", "masked_accuracy", "next_sentence_accuracy"),
        use="fill-mask {run} 'The [MASK] is open.'",
        baseline=_entropy("masked_token"),
    ),
    "sequence_classification": Task(
        objective=lambda config: _CLASSIFICATION_OBJECTIVES[config.data.target],
        heads=lambda data: ("sequence_classification",),
        scores=_classification_scores,
        headline=("accuracy", "f1", "f1_macro", "matthews", "pearson"),
        use=PREDICT,
    ),
    "token_classification": Task(
        objective=lambda config: objectives.TAGGING,
        heads=lambda data: ("token_classification",),
        scores=_tag_scores,
        headline=("f1", "token_accuracy"),
        use=PREDICT,
    ),
    "question_answering": Task(
        objective=lambda config: objectives.SPAN,
        heads=lambda data: ("question_answering",),
        scores=_span_scores,
        headline=("exact_match", "f1"),
        use=PREDICT,
    ),
    "multiple_choice": Task(
        objective=lambda config: objectives.CLASSIFICATION,
        heads=lambda data: ("multiple_choice",),
        scores=_choice_scores,
        headline=("accuracy",),
        use=PREDICT,
    ),
    "translation": Task(
        objective=lambda config: objectives.translation(config.label_smoothing),
        heads=lambda data: ("seq2seq_lm",),
        scores=_translation_losses,
        headline=("nll", "perplexity", "accuracy"),
        use="translate {run} --input FILE",
        decoded=translation_scores,
    ),
}
