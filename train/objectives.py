"""What is learned: a record of pure functions per objective.

The loss of an objective is Σ coefficient · sum / count over its terms, each
term by its own count.  Counts come from the batch alone, before it is cut into
micro-batches or spread over devices; so whole, accumulated and sharded steps
agree, where averaging averages would not.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .losses import cross_entropy

Batch = Mapping[str, Array]
Terms = dict[str, Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """How a batch becomes a loss."""

    coefficients: Mapping[str, float]
    """The weight of each term in the loss."""
    inputs: Callable[[Batch], dict[str, Array]]
    """The model's keyword arguments."""
    counts: Callable[[Batch], Terms]
    """How many items each term averages over."""
    terms: Callable[[Any, Batch], Terms]
    """The sum of each term over its items, from the model's output."""


def _causal_inputs(batch: Batch) -> dict[str, Array]:
    return {name: batch[name] for name in ("input_ids", "segment_ids", "position_ids")}


def _causal_weights(batch: Batch) -> Float[Array, "B T"]:
    return (batch["segment_ids"] != 0).astype(jnp.float32)


def _causal_terms(outputs: Any, batch: Batch) -> Terms:
    loss = cross_entropy(outputs.projection, batch["labels"], _causal_weights(batch))
    return {"next_token": loss}


CAUSAL = Objective(
    coefficients={"next_token": 1.0},
    inputs=_causal_inputs,
    counts=lambda batch: {"next_token": jnp.sum(_causal_weights(batch))},
    terms=_causal_terms,
)
"""Predict each next token of a document (Radford et al. 2018, equation 1)."""
