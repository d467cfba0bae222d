"""The table of tasks: for each kind of data, the objective, the heads and the metrics.

A new kind of data is a new row of `TASKS`. Everything else (run folders, the loop, checkpoints,
evaluation, prediction) is shared.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from ...data.chat.policy import PolicyData
from ...data.chat.preference_pairs import DPOData, RewardData
from ...data.chat.supervised import SupervisedData
from ...data.dataset import DataSplit
from ...data.tasks.base import DataConfig
from ...data.tasks.bert_pretraining import PretrainingData
from ...data.tasks.causal_lm import CausalLMData
from ...data.tasks.denoising import DenoisingData
from ...data.tasks.multiple_choice import MultipleChoiceData
from ...data.tasks.question_answering import QuestionAnsweringData, QuestionAnsweringExamples
from ...data.tasks.sequence_classification import (
    SequenceClassificationData,
    SequenceClassificationExamples,
)
from ...data.tasks.span_corruption import SpanCorruptionData, SpanCorruptionExamples
from ...data.tasks.token_classification import TokenClassificationData, TokenClassificationExamples
from ...data.tasks.translation import TextToTextData, TranslationData, TranslationExamples
from ..config import TrainConfig
from ..losses.eval_step import Evaluation, unigram_entropy
from ..losses.metrics import (
    answer_scores,
    classification_scores,
    entity_scores,
    missing_rouge,
    regression_scores,
    text_scores,
    translation_scores,
)
from ..losses.objective import Batch, Inputs, Objective
from ..losses.router import with_router
from . import objectives
from .policy import grpo, rloo
from .ppo import ppo
from .preferences import dpo, reward
from .supervised import supervised

Scores = Mapping[str, object]
"""Metrics by name: numbers, and for BLEU and chrF also their signatures."""
D = TypeVar("D", bound=DataConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Generic[D]):
    """Everything that training needs to know about one kind of data."""

    data: type[D]
    """The settings of the data."""
    objective: Callable[[TrainConfig, D], Objective]
    """The objective, given the configuration of the run and that of its data."""
    scores: Callable[[Evaluation, DataSplit, D], Scores]
    """The metrics of an evaluation besides the loss."""
    progress_metrics: tuple[str, ...]
    """The metrics that a line of progress shows."""
    loss_note: Callable[[TrainConfig, D], str | None] | None = None
    """A line that says how the loss differs from the metrics beside it, if it does."""
    next_command: str
    """The command that uses a finished run; {run} stands for its folder."""
    heads: Callable[[D], tuple[str, ...]] | None = None
    """The names in `HEADS` of the heads that can learn the objective; None: the one that has the
    name of the kind of data."""
    generation_metrics: Callable[[Sequence[str], Sequence[str]], Scores] | None = None
    """The metrics of generated texts, given the references and the texts."""
    missing_metrics: Callable[[], str | None] | None = None
    """A line on metrics of generated texts for which a package is missing, if one is."""
    baseline: Callable[[DataSplit], tuple[str, str, float]] | None = None
    """The value that a model of mere frequencies would reach: the metric to compare, the name of
    the baseline, its value."""

    def heads_for(self, data: D) -> tuple[str, ...]:
        """Returns the names of the heads that can learn from the data."""
        return (self.data.kind,) if self.heads is None else self.heads(data)


def task_of(data: DataConfig) -> Task[Any]:
    """Returns the row of the table to which `data` belongs."""
    return TASKS[data.kind]


def data_class(kind: str) -> type[DataConfig]:
    """Returns the class of a kind of data.

    Args:
        kind: Its name.

    Raises:
        KeyError: There is no such kind.
    """
    return TASKS[kind].data


def objective_of(config: TrainConfig, own: Objective | None = None) -> Objective:
    """Returns the objective of a run, or the caller's own, with the inputs that its model takes."""
    objective = task_of(config.data).objective(config, config.data) if own is None else own
    objective = with_router(objective, config.model)
    if config.model.num_token_types > 1:
        return objective

    # RoBERTa and DistilBERT tell the parts of a sequence apart by their separators alone.
    def inputs(batch: Batch) -> Inputs | tuple[Inputs, ...]:
        given = objective.inputs(batch)
        several = [
            {name: x for name, x in one.items() if name != "token_type_ids"}
            for one in (given if isinstance(given, tuple) else (given,))
        ]
        return tuple(several) if isinstance(given, tuple) else several[0]

    return dataclasses.replace(objective, inputs=inputs)


def score(data: DataConfig, evaluation: Evaluation, split: DataSplit) -> dict[str, Any]:
    """Returns `loss` and the metrics of this kind of data, as plain numbers."""
    return {"loss": evaluation.loss, **task_of(data).scores(evaluation, split, data)}


def _causal_scores(evaluation: Evaluation, split: DataSplit, data: CausalLMData) -> Scores:
    del data
    tokens = int(evaluation.counts["next_token"])
    return {
        "perplexity": _perplexity(evaluation.loss),
        "bits_per_byte": evaluation.loss * tokens / (math.log(2) * split.content.num_bytes),
        "tokens": tokens,
    }


def _supervised_scores(evaluation: Evaluation, split: DataSplit, data: SupervisedData) -> Scores:
    del split, data
    return {
        "perplexity": _perplexity(evaluation.loss),
        "mean_token_accuracy": evaluation.means["mean_token_accuracy"],
        "num_tokens": int(evaluation.counts["next_token"]),
    }


def _preference_scores(
    evaluation: Evaluation, split: DataSplit, data: RewardData | DPOData
) -> Scores:
    del data
    measures = {name: x for name, x in evaluation.means.items() if name != "preference"}
    return {**measures, "pairs": split.examples.num_examples}


def _reward_scores(evaluation: Evaluation, split: DataSplit, data: RewardData) -> Scores:
    rewards = evaluation.predictions["rewards"]
    extreme = {"min_reward": float(rewards.min()), "max_reward": float(rewards.max())}
    return {**_preference_scores(evaluation, split, data), **extreme}


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # e⁷¹⁰ is beyond float64


def _pretraining_scores(evaluation: Evaluation, split: DataSplit, data: PretrainingData) -> Scores:
    del split
    means, counts = evaluation.means, evaluation.counts
    counted = {"masked_tokens": int(counts["masked_token"])}
    if data.next_sentence:
        counted["pairs"] = int(counts["next_sentence"])
    return {**means, "perplexity": _perplexity(means["masked_token"]), **counted}


def _classification_scores(
    evaluation: Evaluation, split: DataSplit, data: SequenceClassificationData
) -> Scores:
    examples = cast(SequenceClassificationExamples, split.examples)
    gold, predicted = examples.gold(), examples.decode(evaluation.predictions)
    if data.target == "regression":
        return regression_scores(gold, [p["score"] for p in predicted])
    names = examples.labels
    if data.target == "binary":
        (positive,) = names
        names = (f"not {positive}", positive)
        gold = [int(label[0]) for label in cast(list[list[float]], gold)]
    if data.target == "multi_label":
        present = [[name in p["labels"] for name in names] for p in predicted]
        return classification_scores(gold, present, names)
    found = [names.index(p["label"]) for p in predicted]
    scores = classification_scores(gold, found, names)
    parts = [example.part for example in split.content]
    for part in sorted(set(filter(None, parts))):
        right = [a == b for a, b, of in zip(gold, found, parts, strict=True) if of == part]
        scores[f"accuracy_{part}"] = sum(right) / len(right)
    return scores


def _tag_scores(evaluation: Evaluation, split: DataSplit, data: TokenClassificationData) -> Scores:
    del data
    examples = cast(TokenClassificationExamples, split.examples)
    if not all(name == "O" or name[:2] in ("B-", "I-") for name in examples.labels):
        return {"token_accuracy": evaluation.means["accuracy"]}  # parts of speech, for example
    predicted = [p["tags"] for p in examples.decode(evaluation.predictions)]
    return entity_scores(examples.gold(), predicted)


def _span_scores(evaluation: Evaluation, split: DataSplit, data: QuestionAnsweringData) -> Scores:
    del data
    examples = cast(QuestionAnsweringExamples, split.examples)
    predicted = {p["id"]: p["answer"] for p in examples.decode(evaluation.predictions)}
    gold = {g["id"]: g["answers"] for g in examples.gold()}
    return answer_scores(gold, predicted)


def _choice_scores(evaluation: Evaluation, split: DataSplit, data: MultipleChoiceData) -> Scores:
    del split, data
    return {
        "accuracy": evaluation.means["accuracy"],
        "questions": int(evaluation.counts["accuracy"]),
    }


def _translation_losses(evaluation: Evaluation, split: DataSplit, data: TranslationData) -> Scores:
    del data
    means, examples = evaluation.means, cast(TranslationExamples, split.examples)
    return {
        "nll": means["nll"],
        "perplexity": _perplexity(means["nll"]),
        "accuracy": means["accuracy"],
        "tokens": int(evaluation.counts["nll"]),
        "pairs": len(examples.pairs),
    }


def _span_corruption_scores(
    evaluation: Evaluation, split: DataSplit, data: SpanCorruptionData | DenoisingData
) -> Scores:
    del data
    means, examples = evaluation.means, cast(SpanCorruptionExamples, split.examples)
    return {
        "perplexity": _perplexity(means["nll"]),
        "accuracy": means["accuracy"],
        "tokens": int(evaluation.counts["nll"]),
        "texts": examples.num_texts,
    }


def _translation_loss_note(config: TrainConfig, data: TranslationData) -> str | None:
    del data
    if config.label_smoothing == 0:
        return None
    return (
        f"loss is smoothed (--label-smoothing {config.label_smoothing:g}), as it is trained; nll "
        "is the loss without smoothing, and perplexity its exponential"
    )


def _pretraining_loss_note(config: TrainConfig, data: PretrainingData) -> str | None:
    del config
    if not data.next_sentence:
        return None
    return (
        "loss is the sum of masked_token, the loss of masked tokens, and next_sentence, that of "
        "next sentences; perplexity is the exponential of masked_token"
    )


def _entropy_baseline(metric: str) -> Callable[[DataSplit], tuple[str, str, float]]:
    name = "unigram entropy of the training text"
    return lambda split: (metric, name, unigram_entropy(split.content.token_counts))


def _policy_objective(config: TrainConfig, data: PolicyData) -> Objective:
    del config
    rollout, filled = data.rollout, data.rollout.filled()
    if rollout.algorithm == "ppo":
        objective = ppo(
            epsilon=rollout.epsilon,
            epsilon_value=rollout.epsilon_value,
            value_coefficient=rollout.value_coefficient,
            temperature=filled.temperature,
        )
    elif rollout.algorithm == "rloo":
        objective = rloo(epsilon=rollout.epsilon, temperature=filled.temperature)
    else:
        objective = grpo(
            loss=rollout.loss,
            beta=filled.beta,
            epsilon=rollout.epsilon,
            epsilon_high=rollout.epsilon_high,
            importance=rollout.importance,
            max_answer_length=data.answer_length if rollout.loss == "dr_grpo" else None,
            temperature=filled.temperature,
        )
    return dataclasses.replace(objective, keeps_initial=filled.beta > 0)


def _policy_scores(evaluation: Evaluation, split: DataSplit, data: PolicyData) -> Scores:
    del split, data
    return {**evaluation.means, "prompts": int(evaluation.counts["reward"])}


def _policy_loss_note(config: TrainConfig, data: PolicyData) -> str | None:
    del config
    note = "the validation loss is the mean reward of held-out prompts, negated"
    if not data.rollout.updates_several and data.rollout.algorithm != "ppo":
        note += "; the loss of a step is near 0 whatever the rewards, its gradient is not"
    return note


_CLASSIFICATION_OBJECTIVES = {
    "single_label": objectives.CLASSIFICATION,
    "binary": objectives.MULTI_LABEL,
    "multi_label": objectives.MULTI_LABEL,
    "regression": objectives.REGRESSION,
}

PREDICT = "predict {run} --input FILE"

_TABLE: tuple[Task[Any], ...] = (
    Task(
        data=CausalLMData,
        objective=lambda config, data: objectives.CAUSAL,
        scores=_causal_scores,
        progress_metrics=("perplexity", "bits_per_byte"),
        next_command="generate {run} --prompt TEXT",
        baseline=_entropy_baseline("loss"),
    ),
    Task(
        data=SupervisedData,
        objective=lambda config, data: supervised(),
        heads=lambda data: ("causal_lm",),
        scores=_supervised_scores,
        progress_metrics=("perplexity", "mean_token_accuracy"),
        next_command="chat {run}",
    ),
    Task(
        data=RewardData,
        objective=lambda config, data: reward(margin=data.margin, centering=data.centering),
        heads=lambda data: ("sequence_classification",),
        scores=_reward_scores,
        progress_metrics=("accuracy", "margin"),
        next_command="evaluate {run} --data SOURCE",
    ),
    Task(
        data=DPOData,
        objective=lambda config, data: dpo(
            beta=data.beta,
            loss=data.loss,
            label_smoothing=data.wrong_labels,
            frozen_reference=data.reference == "frozen",
        ),
        heads=lambda data: ("causal_lm",),
        scores=_preference_scores,
        progress_metrics=("rewards/accuracies", "rewards/margins"),
        next_command="chat {run}",
    ),
    Task(
        data=PretrainingData,
        objective=lambda config, data: (
            objectives.PRETRAINING if data.next_sentence else objectives.MASKED
        ),
        heads=lambda data: ("pretraining" if data.next_sentence else "masked_lm",),
        scores=_pretraining_scores,
        loss_note=_pretraining_loss_note,
        progress_metrics=("masked_token", "masked_accuracy", "next_sentence_accuracy"),
        next_command="fill-mask {run} 'The [MASK] is open.'",
        baseline=_entropy_baseline("masked_token"),
    ),
    Task(
        data=SequenceClassificationData,
        objective=lambda config, data: _CLASSIFICATION_OBJECTIVES[data.target],
        scores=_classification_scores,
        progress_metrics=("accuracy", "f1", "f1_macro", "matthews", "pearson"),
        next_command=PREDICT,
    ),
    Task(
        data=TokenClassificationData,
        objective=lambda config, data: objectives.TAGGING,
        scores=_tag_scores,
        progress_metrics=("f1", "token_accuracy"),
        next_command=PREDICT,
    ),
    Task(
        data=QuestionAnsweringData,
        objective=lambda config, data: objectives.SPAN,
        scores=_span_scores,
        progress_metrics=("exact_match", "f1"),
        next_command=PREDICT,
    ),
    Task(
        data=MultipleChoiceData,
        objective=lambda config, data: objectives.CLASSIFICATION,
        scores=_choice_scores,
        progress_metrics=("accuracy",),
        next_command=PREDICT,
    ),
    Task(
        data=TranslationData,
        objective=lambda config, data: objectives.translation(config.label_smoothing),
        heads=lambda data: ("seq2seq_lm",),
        scores=_translation_losses,
        loss_note=_translation_loss_note,
        progress_metrics=("nll", "perplexity", "accuracy"),
        next_command="translate {run} --input FILE",
        generation_metrics=translation_scores,
    ),
    Task(
        data=TextToTextData,
        objective=lambda config, data: objectives.translation(config.label_smoothing),
        heads=lambda data: ("seq2seq_lm",),
        scores=_translation_losses,
        loss_note=_translation_loss_note,
        progress_metrics=("nll", "perplexity", "accuracy"),
        next_command="translate {run} --input FILE",
        generation_metrics=text_scores,
        missing_metrics=missing_rouge,
    ),
    Task(
        data=SpanCorruptionData,
        objective=lambda config, data: objectives.translation(0.0),
        heads=lambda data: ("seq2seq_lm",),
        scores=_span_corruption_scores,
        progress_metrics=("perplexity", "accuracy"),
        next_command="translate {run} --input FILE",
    ),
    Task(
        data=DenoisingData,
        objective=lambda config, data: objectives.translation(0.0),
        heads=lambda data: ("seq2seq_lm",),
        scores=_span_corruption_scores,
        progress_metrics=("perplexity", "accuracy"),
        next_command="translate {run} --input FILE",
    ),
    Task(
        data=PolicyData,
        objective=_policy_objective,
        heads=lambda data: (
            ("causal_lm_with_value",) if data.rollout.algorithm == "ppo" else ("causal_lm",)
        ),
        scores=_policy_scores,
        loss_note=_policy_loss_note,
        progress_metrics=("reward", "kl", "completions/mean_length"),
        next_command="chat {run}",
    ),
)

TASKS: dict[str, Task[Any]] = {task.data.kind: task for task in _TABLE}
"""Every task, by its kind of data."""
