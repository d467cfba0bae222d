"""Training objectives, each a record of pure functions.

The loss of an objective is Σ coefficient · sum / count over its terms, each
term by its own count.  Counts come from the batch alone, before it is cut into
micro-batches or spread over devices; so whole, accumulated and sharded steps
agree, while a mean of means would differ.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ...models.nn.layers import fold_in
from ...models.nn.typing import Array, Float, Int, Params
from .losses import (
    cross_entropy,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    squared_error,
)

Batch = Mapping[str, Array]
Terms = dict[str, Float[Array, ""]]
Predictions = dict[str, Array]
Outputs = Any
"""A model's outputs, a dataclass of its head."""
ApplyFn = Callable[..., Outputs]
"""`apply_fn({"params": params}, **inputs)` returns a model's outputs; with `rng`, under dropout."""


Inputs = dict[str, Array]
"""A model's keyword arguments, arrays `[B, …]`."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The functions that make a loss of a batch."""

    coefficients: Mapping[str, float]
    """The weight of each term in the loss."""
    inputs: Callable[[Batch], "Inputs | tuple[Inputs, ...]"]
    """The model's keyword arguments. A tuple of them lets the model run once with each, under
    other dropout; the outputs are then a tuple, too. An example may have several rows, one after
    the other, as the texts of a pair have; each row has dropout of its own."""
    counts: Callable[[Batch], Terms]
    """The number of items that each term, and each measure beside the terms, averages over."""
    terms: Callable[..., Terms]
    """`terms(outputs, batch)`, the sum of each over its items, from the model's outputs; with
    `reference`, `terms(outputs, batch, reference_outputs)`."""
    predictions: Callable[[Outputs], Predictions] = lambda outputs: {}
    """The arrays `[B, …]` that an evaluation keeps of the outputs for a batch."""
    reference: bool = False
    """Whether `terms` also gets the outputs of the frozen parameters for the same batch, such as
    those of a reference policy: computed without dropout, and without gradient."""
    keeps_initial: bool = False
    """Whether the state keeps the initial parameters as its frozen ones for others than `terms`:
    for the reference of a policy, of which a rollout reads the log-probabilities once."""
    regularizers: tuple[str, ...] = ()
    """The terms that only training adds to the loss: the loss of an evaluation is without them."""
    whole_batch: bool = False
    """Whether the terms of an example depend on the other examples of its batch, as those of
    in-batch negatives do. Such a batch cannot be processed in micro-batches or under pmap."""

    def outputs(
        self, apply_fn: ApplyFn, params: Params, batch: Batch, *, rng: Array | None = None
    ) -> Outputs:
        """Returns the model's outputs for a batch; a tuple of them if `inputs` returns a tuple.

        Args:
            apply_fn: the model's.
            params: its parameters.
            batch: the batch, or a part of it.
            rng: keys `[B]` for dropout; None for none.
        """
        inputs = self.inputs(batch)

        def run(inputs: Inputs, rng: Array | None) -> Outputs:
            dropout = {} if rng is None else {"rng": _keys_of_rows(rng, inputs)}
            return apply_fn({"params": params}, **dropout, **inputs)

        if isinstance(inputs, tuple):
            return tuple(run(once, fold_in(rng, number)) for number, once in enumerate(inputs))
        return run(inputs, rng)

    def apply(
        self,
        apply_fn: ApplyFn,
        params: Params,
        batch: Batch,
        *,
        frozen: Params | None = None,
        rng: Array | None = None,
    ) -> tuple[Outputs, Terms]:
        """Returns the model's outputs for a batch, and the terms.

        Args:
            apply_fn: the model's.
            params: its parameters.
            batch: the batch, or a part of it.
            frozen: the parameters of the reference.
            rng: keys `[B]` for dropout; None for none.

        Raises:
            UserError: `terms` returned something else than a scalar for each coefficient.
            ValueError: the objective has a `reference`, and there are no frozen parameters.
        """
        outputs = self.outputs(apply_fn, params, batch, rng=rng)
        if not self.reference:
            return outputs, self.checked(self.terms(outputs, batch), "terms")
        if frozen is None:
            raise ValueError(
                "the objective has a reference, and the state has no frozen parameters: give them "
                "to init_state(params, tx, frozen=…)"
            )
        reference = self.outputs(apply_fn, jax.lax.stop_gradient(frozen), batch)
        terms = self.terms(outputs, batch, jax.lax.stop_gradient(reference))
        return outputs, self.checked(terms, "terms")

    def checked(self, values: Any, function: str) -> Terms:
        """Returns what `terms` or `counts` returned, after checking that it suits `coefficients`.

        Args:
            values: what it returned.
            function: its name.

        Raises:
            UserError: it is no dict of scalars, or lacks a term of `coefficients`.
        """
        if not isinstance(values, Mapping):
            raise UserError(
                f"{function} of the objective returned {type(values).__name__}: return a dict of a "
                "scalar for each term"
            )
        for name, value in values.items():
            numeric = isinstance(value, jax.Array | np.ndarray | np.generic | int | float)
            if not numeric or np.shape(value) != ():
                found = f"the shape {np.shape(value)}" if numeric else f"the type {type(value)}"
                raise UserError(
                    f"{function}[{name!r}] of the objective has {found}: return a scalar, such as "
                    "the sum over the examples"
                )
        for name in self.coefficients:
            if name not in values:
                raise UserError(
                    f"{function} of the objective returned {', '.join(values) or 'nothing'} and "
                    f"no {name!r}, which has a coefficient: return it, or leave it out of "
                    "coefficients"
                )
        return dict(values)

    def check_counted(self, sums: Terms, counts: Terms) -> None:
        """Checks that each sum of `terms` has a count.

        Raises:
            UserError: one has none.
        """
        for name in sums:
            if name not in counts:
                raise UserError(
                    f"terms of the objective returned {name!r}, which counts did not: return from "
                    "counts how many items it averages over, or leave it out of terms"
                )


def _keys_of_rows(keys: Array, inputs: Inputs) -> Array:
    """Returns a key for each row of the inputs, given one for each example `[B]`."""
    rows = next(iter(inputs.values())).shape[0]
    if rows == keys.shape[0]:
        return keys
    of_each = [fold_in(keys, number) for number in range(rows // keys.shape[0])]
    return jnp.stack(of_each, axis=1).reshape(rows)


def select_inputs(*names: str) -> Callable[[Batch], Inputs]:
    """Returns a function that selects the inputs among `names` that a batch has."""
    return lambda batch: {name: batch[name] for name in names if name in batch}


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
