"""The loss on a text: every token predicted once."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .objectives import Batch, Objective, Terms

EvaluateFn = Callable[[Any, dict[str, np.ndarray]], tuple[Any, Any]]


def make_evaluate_fn(apply_fn: Callable[..., Any], objective: Objective) -> Callable[..., Any]:
    """Makes `evaluate_fn(params, batch) -> (sums, counts)`, to be compiled by the caller."""

    def evaluate_fn(params: Any, batch: Batch) -> tuple[Terms, Terms]:
        outputs = apply_fn({"params": params}, **objective.inputs(batch))
        return objective.terms(outputs, batch), objective.counts(batch)

    return evaluate_fn


def evaluate(
    evaluate_fn: EvaluateFn,
    model_state: Any,
    batches: Iterable[dict[str, np.ndarray]],
    objective: Objective,
    *,
    num_bytes: int,
) -> dict[str, float]:
    """Mean loss over all batches.

    Args:
      evaluate_fn: sums and counts of a batch, on the devices.
      model_state: its first argument.
      batches: the whole text, each token once.
      objective: how terms make up the loss.
      num_bytes: UTF-8 bytes of the text.

    Returns:
      `loss` in nats per token, `perplexity`, `bits_per_byte` (all nats, in
      bits, over the bytes of the text) and `tokens`, how many were predicted.
    """
    sums = dict.fromkeys(objective.coefficients, 0.0)
    counts = dict.fromkeys(objective.coefficients, 0.0)
    for batch in batches:
        batch_sums, batch_counts = evaluate_fn(model_state, batch)
        for name in sums:
            sums[name] += float(batch_sums[name])
            counts[name] += float(batch_counts[name])
    loss = sum(c * sums[name] / counts[name] for name, c in objective.coefficients.items())
    tokens = int(max(counts.values()))
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * tokens / (math.log(2) * num_bytes),
        "tokens": tokens,
    }


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy in nats of single tokens: the least loss of a model that sees no context."""
    counts = np.unique(tokens, return_counts=True)[1]
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())
