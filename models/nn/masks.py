"""Attention masks: the model describes them, and arrays are computed only if a backend needs them.

In every mask, `True` means that the query may attend to the key.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from .typing import Array, Bool, Int

AnyArray = Array | np.ndarray
"""An array that a caller may pass: a JAX array or, outside compiled functions, a NumPy array."""

Size = Any
"""An int, or a symbolic dimension in a program that is exported with symbolic sizes."""

Segments = tuple[Int[Array, "B T"], Int[Array, "B S"]]
"""Segment ids of queries and keys. A query attends to the keys with its segment id."""


def band_mask(
    query_index: Int[Array, " T"],
    key_index: Int[Array, " S"],
    window: int | None = None,
    *,
    causal: bool = True,
) -> Bool[Array, "1 1 T S"]:
    """Returns the mask for causal attention, or for attention within a two-sided window.

    With `window`, a query attends only to keys at a distance below `window`: the band of Child et
    al. 2019, "Generating long sequences with sparse transformers".
    """
    distance = query_index[:, None] - key_index[None, :]
    mask = distance >= 0 if causal else jnp.ones(distance.shape, bool)
    if window is not None:
        mask &= jnp.abs(distance) < window
    return mask[None, None]


def last_keys(mask: Bool[Array, "#B 1 T S"], window: int) -> Bool[Array, "#B 1 T S"]:
    """Masks all but the last `window` visible keys of each query, which need not be consecutive."""
    later = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return mask & (later <= window)


def is_per_query(attention_mask: AnyArray | None) -> bool:
    """Returns whether a mask has the shape `[B, T, S]`, with an entry for each query and key."""
    return attention_mask is not None and attention_mask.ndim == 3


def padding_mask(
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B S"] | None,
    query_segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "#B 1 #T #S"]:
    """Masks padding and, in packed sequences, the tokens of other documents.

    `query_segment_ids` defaults to `segment_ids`. A three-dimensional `attention_mask` has an entry
    for each query and key.
    """
    mask = jnp.ones((1, 1, 1, 1), bool)
    if attention_mask is not None:
        mask = jnp.asarray(attention_mask != 0)
        mask = mask[:, None] if mask.ndim == 3 else mask[:, None, None, :]
    if segment_ids is not None:
        queries = segment_ids if query_segment_ids is None else query_segment_ids
        same = queries[:, :, None] == segment_ids[:, None, :]
        # Padding (0) must not be a key, not even for padding queries.
        mask &= (same & (segment_ids != 0)[:, None, :])[:, None]
    return mask


@struct.dataclass
class AttentionMask:
    """The keys that each of T queries may attend to, among S keys.

    A model describes the mask with all fields except `values`. A kernel needs only this
    description. For XLA, `materialized()` computes the array `values` once for all layers.
    """

    num_queries: Size = struct.field(pytree_node=False)
    num_keys: Size = struct.field(pytree_node=False)
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None = None
    """1 for the keys that queries may attend to, per key or per query and key."""
    segment_ids: Int[AnyArray, "B S"] | None = None
    """The document of each key, or 0 for padding."""
    query_segment_ids: Int[AnyArray, "B T"] | None = None
    """The document of each query, if queries and keys are different tokens."""
    causal: bool = struct.field(pytree_node=False, default=False)
    """Whether a query attends only to keys up to its own position."""
    window: int | None = struct.field(pytree_node=False, default=None)
    """If not None, a query attends only to keys at a distance below `window`. A causal window
    contains the last `window` keys, including the query's own key. A window without causal order
    contains up to `window` - 1 keys on either side.
    """
    start: Int[Array, ""] | int = 0
    """The index of the key that has the position of the first query."""
    use_window: Bool[Array, ""] | None = None
    """Whether the window applies to this layer, if only some layers have a window."""
    values: Bool[Array, "#B 1 #T #S"] | None = None
    """The mask as an array, if it has been computed."""

    @property
    def is_per_query(self) -> bool:
        """Whether the attention mask has an entry for each query and key."""
        return is_per_query(self.attention_mask)

    @property
    def is_two_sided(self) -> bool:
        """Whether a window covers keys on both sides of the query."""
        return self.window is not None and not self.causal

    def materialize(self) -> Bool[Array, "#B 1 #T #S"]:
        """Returns the mask as an array with an entry for every query and key."""
        if self.values is not None:
            return self.values
        mask = padding_mask(self.attention_mask, self.segment_ids, self.query_segment_ids)
        if not self.causal and self.window is None:
            return mask
        indices = self.start + jnp.arange(self.num_queries), jnp.arange(self.num_keys)
        if self.causal and self.window is not None and self.is_per_query:
            # The keys of a beam are not consecutive, so the window counts visible keys.
            return last_keys(band_mask(*indices) & mask, self.window)
        return band_mask(*indices, self.window, causal=self.causal) & mask

    def materialized(self) -> "AttentionMask":
        """Returns a copy of this mask that includes its array `values`."""
        return dataclasses.replace(self, values=self.materialize())

    def segments(self) -> Segments | None:
        """Returns segment ids that describe the mask, except for causal order and the window.

        This method requires a per-key mask and `start` 0. The allowed pairs are the same as in
        `materialize`, except that padding queries of packed sequences (segment 0) attend to masked
        keys, so that every query has a key.
        """
        if self.segment_ids is not None:
            keys = jnp.asarray(self.segment_ids)
            query_ids = self.query_segment_ids
            queries = keys if query_ids is None else jnp.asarray(query_ids)
        elif self.attention_mask is not None:
            # All tokens form segment 1. Below, masked keys move to segment 0.
            keys = jnp.ones(self.attention_mask.shape, jnp.int32)
            queries = jnp.ones((keys.shape[0], self.num_queries), jnp.int32)
        else:
            return None
        if self.attention_mask is not None:
            keys = jnp.where(jnp.asarray(self.attention_mask) != 0, keys, 0)
        return queries, keys


def select_mask(
    use_window: Bool[Array, ""] | bool, windowed: AttentionMask, full: AttentionMask
) -> AttentionMask:
    """Returns the windowed or the full mask; `use_window` may be a traced value."""
    if isinstance(use_window, bool):
        return windowed if use_window else full
    # `use_window` is traced. A kernel selects its mask itself; for XLA, select the array here.
    if windowed.values is None:
        return dataclasses.replace(windowed, use_window=use_window)
    values = jnp.where(use_window, windowed.values, full.materialize())
    return dataclasses.replace(full, values=values)
