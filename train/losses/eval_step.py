"""Evaluates a data split, and returns the loss and the predictions for all rows."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ...models.adapters.lora import LoRA
from ...models.nn.typing import ArrayLike, Params
from ...models.text.bucketing import TOKENS_AT_ONCE
from .micro_batches import in_parts
from .objective import ApplyFn, Batch, Objective, Outputs, Predictions, Terms

State = TypeVar("State")
EvaluatedBatch = tuple[Terms, Terms, Predictions]
"""The sum of each term over a batch, the count of each term's items, and the predictions."""
EvaluateFn = Callable[[State, dict[str, np.ndarray]], EvaluatedBatch]
"""`evaluate_fn(model_state, batch) -> (sums, counts, predictions)`."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of a model on all rows of a data split."""

    loss: float
    """Σ coefficient · mean over the objective's terms, without regularizers."""
    means: dict[str, float]
    """The mean of each of the objective's `terms`, including terms without a coefficient."""
    counts: dict[str, float]
    """The number of items that each mean is taken over."""
    predictions: dict[str, np.ndarray]
    """The arrays `[num_rows, …]` that the objective's `predictions` returned."""


def make_evaluate_fn(
    apply_fn: ApplyFn,
    objective: Objective,
    adapter: LoRA | None = None,
    num_micro_batches: int = 1,
) -> Callable[..., tuple[Terms, Terms, Predictions]]:
    """Makes `evaluate_fn(params, batch, frozen=None) -> (sums, counts, predictions)`.

    The caller compiles this function. `frozen` has the parameters of the objective's reference
    model or of the adapter's base model. For `adapter`, see `make_train_step`. If the objective
    needs the whole batch, the model runs on `num_micro_batches` equal parts of the batch, one by
    one. For other objectives, `num_micro_batches` has no effect.
    """
    parts = num_micro_batches if objective.whole_batch else 1
    if adapter is not None:
        apply_fn = adapter.adapt(apply_fn)

    def evaluate_fn(
        params: Params, batch: Batch, frozen: Params | None = None
    ) -> tuple[Terms, Terms, Predictions]:
        if adapter is not None:
            params, frozen = adapter.combine(params, frozen)

        def run(part: Batch) -> tuple[Outputs, ...]:
            return objective.all_outputs(apply_fn, params, part, frozen=frozen)

        outputs = in_parts(run, batch, parts)
        sums = objective.sums(outputs, batch)
        # Compute the counts of the whole batch, as a train step does, so that both compute the same
        # loss.
        counts = objective.checked_counts(batch)
        objective.check_counted(sums, counts)
        return sums, counts, objective.predictions(outputs[0])

    return evaluate_fn


def evaluate(
    evaluate_fn: EvaluateFn[State],
    model_state: State,
    batches: Iterable[dict[str, np.ndarray]],
    objective: Objective,
    *,
    num_rows: int,
) -> Evaluation:
    """Runs the model on all batches, and combines the results.

    Args:
        evaluate_fn: computes the sums, the counts and the predictions of a batch on the devices.
        model_state: the first argument of `evaluate_fn`.
        batches: the batches. Together they contain every row once, possibly with filler at the end.
        objective: the objective, which combines the terms into the loss.
        num_rows: the number of rows that are not filler.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    kept: list[Predictions] = []
    for batch in batches:
        batch_sums, batch_counts, predictions = evaluate_fn(model_state, batch)
        # Add up sums and counts, so that the means do not depend on the batch size.
        for total, part in ((sums, batch_sums), (counts, batch_counts)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + float(value)
        kept.append(predictions)
    means = {name: total / max(counts[name], 1.0) for name, total in sums.items()}
    # Only the training loss includes regularizers.
    loss = sum(
        coefficient * means[name]
        for name, coefficient in objective.coefficients.items()
        if name not in objective.regularizers
    )
    return Evaluation(loss, means, counts, whole_rows(kept, num_rows))


def whole_rows(parts: Sequence[Mapping[str, ArrayLike]], num_rows: int) -> dict[str, np.ndarray]:
    """Concatenates the predictions of all batches, without filler rows."""
    names = parts[0] if parts else {}
    return {
        name: np.concatenate([np.asarray(part[name]) for part in parts])[:num_rows]
        for name in names
    }


def evaluated_at_once(objective: Objective, batch_size: int, micro_batches: int) -> int:
    """Returns the number of rows in a batch of an evaluation.

    This number is the size of a micro-batch, which is known to fit into memory. An objective that
    needs the whole batch gets as many rows as in training, because its loss depends on the number
    of examples.
    """
    return batch_size if objective.whole_batch else batch_size // micro_batches


def rows_at_once(length: int, *limits: int) -> int:
    """Returns the number of rows of `length` tokens per device and batch, at most `limits`."""
    return min(*limits, max(1, TOKENS_AT_ONCE // length))


def unigram_entropy(counts: np.ndarray) -> float:
    """Returns the unigram entropy in nats: the minimal loss of a model without context.

    Args:
        counts: how often each token occurs, int [tokens]; counts may be 0.
    """
    # Tokens that do not occur contribute 0 · log 0 = 0.
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
