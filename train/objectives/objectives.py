"""The objectives of pretraining and fine-tuning."""

import dataclasses

import jax
import jax.numpy as jnp

from ...models.nn.typing import Array, Float, Int
from ..losses.cross_entropy import (
    cross_entropy,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
)
from ..losses.objective import Batch, Objective, Outputs, Predictions, Terms, select_inputs


def _packed_weights(segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns 1 for each token of a packed sequence, 0 for padding."""
    return (segment_ids != 0).astype(jnp.float32)


CAUSAL = Objective(
    coefficients={"next_token": 1.0},
    inputs=select_inputs("input_ids", "segment_ids", "position_ids"),
    counts=lambda batch: {"next_token": jnp.sum(_packed_weights(batch["segment_ids"]))},
    terms=lambda outputs, batch: {
        "next_token": cross_entropy(
            outputs.projection, batch["labels"], _packed_weights(batch["segment_ids"])
        ).loss
    },
)
"""Predict each next token of a document (Radford et al. 2018, equation 1)."""


def translation(label_smoothing: float) -> Objective:
    """Returns the objective of each next token of a translation (Vaswani et al. 2017, section 5.4).

    The term of the loss is smoothed; the plain loss, `nll`, and the accuracy are measures.
    """

    def counts(batch: Batch) -> Terms:
        number = jnp.sum(_packed_weights(batch["decoder_segment_ids"]))
        return {"target_token": number, "nll": number, "accuracy": number}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        weights = _packed_weights(batch["decoder_segment_ids"])
        result = cross_entropy(outputs.projection, batch["labels"], weights, label_smoothing)
        return {"target_token": result.loss, "nll": result.nll, "accuracy": result.correct}

    return Objective(
        coefficients={"target_token": 1.0},
        inputs=select_inputs(
            "input_ids",
            "segment_ids",
            "position_ids",
            "decoder_input_ids",
            "decoder_segment_ids",
            "decoder_position_ids",
        ),
        counts=counts,
        terms=terms,
    )


def _row_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each row (in multiple choice each question) that is not filler, else 0."""
    mask = batch["attention_mask"]
    return mask.reshape(mask.shape[0], -1)[:, 0].astype(jnp.float32)


def _masked_counts(batch: Batch) -> Terms:
    count = jnp.sum(batch["masked_weights"]).astype(jnp.float32)
    return {"masked_token": count, "masked_accuracy": count}


def _masked_terms(outputs: Outputs, batch: Batch) -> Terms:
    weights = batch["masked_weights"].astype(jnp.float32)
    result = cross_entropy(outputs.projection, batch["masked_labels"], weights)
    return {"masked_token": result.loss, "masked_accuracy": result.correct}


def _pretraining_counts(batch: Batch) -> Terms:
    number = jnp.sum(_row_weights(batch))
    next_sentence = {"next_sentence": number, "next_sentence_accuracy": number}
    return {**_masked_counts(batch), **next_sentence}


def _pretraining_terms(outputs: Outputs, batch: Batch) -> Terms:
    result = softmax_cross_entropy(
        outputs.seq_relationship_logits, batch["next_sentence_label"], _row_weights(batch)
    )
    next_sentence = {"next_sentence": result.loss, "next_sentence_accuracy": result.correct}
    return {**_masked_terms(outputs, batch), **next_sentence}


_ENCODER_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

MASKED = Objective(
    coefficients={"masked_token": 1.0},
    inputs=select_inputs(*_ENCODER_INPUTS, "masked_positions"),
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


def _label_terms(outputs: Outputs, labels: Array, weights: Array) -> Terms:
    result = softmax_cross_entropy(outputs.logits, labels, weights)
    return {"label": result.loss, "accuracy": result.correct}


def _label_counts(weights: Array) -> Terms:
    return dict.fromkeys(("label", "accuracy"), jnp.sum(weights))


CLASSIFICATION = Objective(
    coefficients={"label": 1.0},
    inputs=select_inputs(*_ENCODER_INPUTS),
    counts=lambda batch: _label_counts(_row_weights(batch)),
    terms=lambda outputs, batch: _label_terms(outputs, batch["labels"], _row_weights(batch)),
    predictions=lambda outputs: {"logits": outputs.logits},
)
"""One of several labels for a text, or one of several choices (Devlin et al. 2019, 4.1, 4.4)."""

MULTI_LABEL = dataclasses.replace(
    CLASSIFICATION,
    counts=lambda batch: {"label": jnp.sum(_row_weights(batch))},
    terms=lambda outputs, batch: {
        "label": sigmoid_cross_entropy(outputs.logits, batch["labels"], _row_weights(batch))
    },
)
"""Any number of labels for a sequence, each by its own sigmoid; of a binary target one."""

REGRESSION = dataclasses.replace(
    CLASSIFICATION,
    coefficients={"squared_error": 1.0},
    counts=lambda batch: {"squared_error": jnp.sum(_row_weights(batch))},
    terms=lambda outputs, batch: {
        "squared_error": squared_error(outputs.logits[..., 0], batch["labels"], _row_weights(batch))
    },
)
"""A number for a sequence, by squared error."""


def _tag_weights(batch: Batch) -> Float[Array, "B T"]:
    """Returns 1 for each first piece of a word, whose label is at least 0, else 0."""
    return ((batch["labels"] >= 0) & (batch["attention_mask"] != 0)).astype(jnp.float32)


def _tag_predictions(outputs: Outputs) -> Predictions:
    probabilities = jax.nn.softmax(outputs.logits, axis=-1)
    return {
        "label_ids": jnp.argmax(probabilities, axis=-1),
        "probabilities": jnp.max(probabilities, axis=-1),
    }


TAGGING = Objective(
    coefficients={"label": 1.0},
    inputs=CLASSIFICATION.inputs,
    counts=lambda batch: _label_counts(_tag_weights(batch)),
    terms=lambda outputs, batch: _label_terms(
        outputs, jnp.maximum(batch["labels"], 0), _tag_weights(batch)
    ),
    predictions=_tag_predictions,
)
"""A label for each word, at its first piece (Devlin et al. 2019, section 5.3)."""


def _span_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns 1 for each row that is not filler and whose answer has a known place, else 0."""
    return _row_weights(batch) * (batch["start_positions"] >= 0)


def _span_terms(outputs: Outputs, batch: Batch) -> Terms:
    weights = _span_weights(batch)
    seen = batch["attention_mask"] != 0
    terms = {}
    for name in ("start", "end"):
        logits = jnp.where(seen, getattr(outputs, f"{name}_logits"), -1e30)
        result = softmax_cross_entropy(logits, batch[f"{name}_positions"], weights)
        terms |= {name: result.loss, f"{name}_accuracy": result.correct}
    return terms


SPAN = Objective(
    coefficients={"start": 0.5, "end": 0.5},
    inputs=CLASSIFICATION.inputs,
    counts=lambda batch: dict.fromkeys(
        ("start", "end", "start_accuracy", "end_accuracy"), jnp.sum(_span_weights(batch))
    ),
    terms=_span_terms,
    predictions=lambda outputs: {
        "start_logits": outputs.start_logits,
        "end_logits": outputs.end_logits,
    },
)
"""Where an answer begins and ends (Devlin et al. 2019, section 4.2)."""
