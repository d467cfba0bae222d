"""Shared functions of preference losses, for text pairs `[B, 2, T]` with the chosen text first.

Each pair is a single example, so that it is never split over micro-batches or devices.
"""

from collections.abc import Mapping

import jax.numpy as jnp

from ...models.nn.typing import Array, Float
from .objective import ENCODER_INPUTS, Batch, Inputs, Terms


def rows_of_pairs(x: Array) -> Array:
    """Reshapes `[B, 2, …]` to `[2B, …]`; each chosen text comes right before its rejected text."""
    return x.reshape(-1, *x.shape[2:])


def pair_inputs(batch: Batch) -> Inputs:
    """Returns the model's inputs for all texts of each example: `[B, N, T]` become `[B · N, T]`."""
    return {name: rows_of_pairs(x) for name, x in ENCODER_INPUTS(batch).items()}


def pair_weights(batch: Batch) -> Float[Array, " B"]:
    """Returns the weight of each pair, which defaults to 1, and is 0 for filler pairs."""
    # A pair is filler if both of its texts consist of padding.
    real = jnp.any(batch["attention_mask"] != 0, axis=(1, 2)).astype(jnp.float32)
    return real * batch["pair_weights"] if "pair_weights" in batch else real


def weighted_sums(values: Mapping[str, Array], weights: Float[Array, " B"]) -> Terms:
    """Returns Σ weight · value for each array of values; values of weight 0 may be NaN."""
    # 0 · NaN is NaN, so a product alone would not exclude a value.
    return {
        name: jnp.sum(weights * jnp.where(weights > 0, value, 0.0))
        for name, value in values.items()
    }
