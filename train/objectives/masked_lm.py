"""Masked language modeling: predict masked tokens, and the relation between two segments."""

import dataclasses
import functools

import jax.numpy as jnp

from ...data.dataset import DataSplit
from ...data.tasks.bert_pretraining import PretrainingData
from ..losses.cross_entropy import cross_entropy, softmax_cross_entropy
from ..losses.eval_step import Evaluation
from ..losses.objective import Batch, Objective, Outputs, Terms, row_weights, select_inputs
from ..objective_config import ObjectiveConfig, Scores, entropy_baseline, perplexity


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(ObjectiveConfig[PretrainingData]):
    """Predicts masked tokens and, for pairs of segments, the next sentence or the order."""

    kind = "masked_lm"
    data_kinds = (PretrainingData,)
    progress_metrics = (
        *("masked_token", "masked_accuracy"),
        *("next_sentence_accuracy", "sentence_order_accuracy"),
    )
    next_command = "fill-mask {run} 'The [MASK] is open.'"

    def build(self, data: PretrainingData) -> Objective:
        """Returns the objective for pairs of segments if the data have pairs, else `MASKED`."""
        of_pairs = PRETRAINING if data.pair_label == "next" else SENTENCE_ORDER
        return of_pairs if data.next_sentence else MASKED

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: PretrainingData) -> Scores:
        """Returns the means, the perplexity, and the numbers of masked tokens and of pairs."""
        del split
        # The perplexity is computed only from the loss of masked tokens, without the loss of pairs.
        means, counts = evaluation.means, evaluation.counts
        counted = {"masked_tokens": int(counts["masked_token"])}
        if data.next_sentence:
            counted["pairs"] = int(counts[PAIR_TERMS[data.pair_label]])
        return {**means, "perplexity": perplexity(means["masked_token"]), **counted}

    def heads(self, data: PretrainingData) -> tuple[str, ...]:
        """Returns the name of the head, which depends on whether the data have pairs."""
        return ("pretraining" if data.next_sentence else "masked_lm",)

    def loss_note(self, data: PretrainingData) -> str | None:
        """Returns a line about the two terms of the loss if the data have pairs, else None."""
        if not data.next_sentence:
            return None
        term = PAIR_TERMS[data.pair_label]
        return (
            f"loss is the sum of masked_token, the loss of masked tokens, and {term}, the "
            f"loss of {term.replace('_', ' ')}s; perplexity is the exponential of masked_token"
        )

    def baseline(self, split: DataSplit) -> tuple[str, str, float]:
        """Returns the unigram entropy as the baseline of `masked_token`."""
        return entropy_baseline("masked_token", split)


def masked_counts(batch: Batch) -> Terms:
    """Returns the number of masked tokens."""
    # Unused slots for masked tokens have weight 0.
    count = jnp.sum(batch["masked_weights"]).astype(jnp.float32)
    return {"masked_token": count, "masked_accuracy": count}


def masked_terms(outputs: Outputs, batch: Batch) -> Terms:
    """Returns the loss of masked tokens, and the number of correctly predicted tokens."""
    weights = batch["masked_weights"].astype(jnp.float32)
    result = cross_entropy(outputs.projection, batch["masked_labels"], weights)
    return {"masked_token": result.loss, "masked_accuracy": result.correct}


def _pair_counts(batch: Batch, *, term: str) -> Terms:
    num_pairs = jnp.sum(row_weights(batch))
    return {**masked_counts(batch), term: num_pairs, f"{term}_accuracy": num_pairs}


def _pair_terms(outputs: Outputs, batch: Batch, *, term: str) -> Terms:
    result = softmax_cross_entropy(
        outputs.seq_relationship_logits, batch["next_sentence_label"], row_weights(batch)
    )
    of_pairs = {term: result.loss, f"{term}_accuracy": result.correct}
    return {**masked_terms(outputs, batch), **of_pairs}


MASKED = Objective(
    coefficients={"masked_token": 1.0},
    inputs=select_inputs(
        "input_ids", "attention_mask", "token_type_ids", "segment_ids", "masked_positions"
    ),
    counts=masked_counts,
    terms=masked_terms,
)
"""Predict the masked tokens (Devlin et al. 2019, section 3.1, task 1; Liu et al. 2019)."""

PAIR_TERMS = {"next": "next_sentence", "order": "sentence_order"}
"""Maps the meaning of a segment pair's label to the name of its loss term. next: whether the second
segment follows the first in the text. order: whether the segments are in the original order."""


def _of_pairs(term: str) -> Objective:
    """Makes the objective with two terms: one for masked tokens, one for the label of a pair."""
    return Objective(
        coefficients={"masked_token": 1.0, term: 1.0},
        inputs=MASKED.inputs,
        counts=functools.partial(_pair_counts, term=term),
        terms=functools.partial(_pair_terms, term=term),
        predictions=lambda outputs: {"seq_relationship_logits": outputs.seq_relationship_logits},
    )


PRETRAINING = _of_pairs("next_sentence")
"""Predict masked tokens and next sentences (Devlin et al. 2019, section 3.1, tasks 1 and 2)."""
SENTENCE_ORDER = _of_pairs("sentence_order")
"""Predict masked tokens and the order of two segments (Lan et al. 2020, "ALBERT", section 3.1)."""
