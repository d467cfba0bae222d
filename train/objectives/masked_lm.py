"""Masked language models: predict masked tokens and, for BERT, next sentences."""

import dataclasses

import jax.numpy as jnp

from ...data.dataset import DataSplit
from ...data.tasks.bert_pretraining import PretrainingData
from ..losses.cross_entropy import cross_entropy, softmax_cross_entropy
from ..losses.eval_step import Evaluation
from ..losses.objective import Batch, Objective, Outputs, Terms, row_weights, select_inputs
from ..objective_config import ObjectiveConfig, Scores, entropy_baseline, perplexity


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLMConfig(ObjectiveConfig[PretrainingData]):
    """Masked tokens, and next sentences if the data have pairs; it has no hyperparameters."""

    kind = "masked_lm"
    data_kinds = (PretrainingData,)
    progress_metrics = ("masked_token", "masked_accuracy", "next_sentence_accuracy")
    next_command = "fill-mask {run} 'The [MASK] is open.'"

    def build(self, data: PretrainingData) -> Objective:
        """Returns `PRETRAINING` for pairs of sentences, else `MASKED`."""
        return PRETRAINING if data.next_sentence else MASKED

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: PretrainingData) -> Scores:
        """Returns all means, perplexity, and the numbers of masked tokens and of pairs."""
        del split
        # Perplexity is of the masked tokens alone, without the loss of next sentences.
        means, counts = evaluation.means, evaluation.counts
        counted = {"masked_tokens": int(counts["masked_token"])}
        if data.next_sentence:
            counted["pairs"] = int(counts["next_sentence"])
        return {**means, "perplexity": perplexity(means["masked_token"]), **counted}

    def heads(self, data: PretrainingData) -> tuple[str, ...]:
        """Returns the head with or without the next-sentence classifier."""
        return ("pretraining" if data.next_sentence else "masked_lm",)

    def loss_note(self, data: PretrainingData) -> str | None:
        """Returns a line on the two losses, if there are two."""
        if not data.next_sentence:
            return None
        return (
            "loss is the sum of masked_token, the loss of masked tokens, and next_sentence, that "
            "of next sentences; perplexity is the exponential of masked_token"
        )

    def baseline(self, split: DataSplit) -> tuple[str, str, float]:
        """Returns the entropy of single tokens."""
        return entropy_baseline("masked_token", split)


def _masked_counts(batch: Batch) -> Terms:
    # Unused slots for masked tokens have weight 0.
    count = jnp.sum(batch["masked_weights"]).astype(jnp.float32)
    return {"masked_token": count, "masked_accuracy": count}


def _masked_terms(outputs: Outputs, batch: Batch) -> Terms:
    weights = batch["masked_weights"].astype(jnp.float32)
    result = cross_entropy(outputs.projection, batch["masked_labels"], weights)
    return {"masked_token": result.loss, "masked_accuracy": result.correct}


def _pretraining_counts(batch: Batch) -> Terms:
    number = jnp.sum(row_weights(batch))
    next_sentence = {"next_sentence": number, "next_sentence_accuracy": number}
    return {**_masked_counts(batch), **next_sentence}


def _pretraining_terms(outputs: Outputs, batch: Batch) -> Terms:
    result = softmax_cross_entropy(
        outputs.seq_relationship_logits, batch["next_sentence_label"], row_weights(batch)
    )
    next_sentence = {"next_sentence": result.loss, "next_sentence_accuracy": result.correct}
    return {**_masked_terms(outputs, batch), **next_sentence}


MASKED = Objective(
    coefficients={"masked_token": 1.0},
    inputs=select_inputs("input_ids", "attention_mask", "token_type_ids", "masked_positions"),
    counts=_masked_counts,
    terms=_masked_terms,
)
"""Predict the masked tokens (Devlin et al. 2019, section 3.1, task 1; Liu et al. 2019)."""

PRETRAINING = Objective(
    coefficients={"masked_token": 1.0, "next_sentence": 1.0},
    inputs=MASKED.inputs,
    counts=_pretraining_counts,
    terms=_pretraining_terms,
    predictions=lambda outputs: {"seq_relationship_logits": outputs.seq_relationship_logits},
)
"""Masked tokens and next sentences (Devlin et al. 2019, section 3.1, tasks 1 and 2)."""
