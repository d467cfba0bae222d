"""Attention masks: described by the model, materialized only where a backend needs them.

In every mask `True` means that the query may attend to the key.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from .typing import Array, Bool, Int

AnyArray = Array | np.ndarray
"""Arrays that a caller may pass: jax's, or numpy's outside a compiled function."""

Size = Any
"""An int; in a program that is exported with free sizes, a symbolic dimension."""

Segments = tuple[Int[Array, "B T"], Int[Array, "B S"]]
"""Numbers of queries and of keys: a query attends to the keys of its own number."""


def causal_mask(
    query_index: Int[Array, " T"], key_index: Int[Array, " S"], window: int | None = None
) -> Bool[Array, "1 1 T S"]:
    """Lets each query attend to its own key and to earlier keys.

    With `window`, only to the last `window` of these: the band of Child et al. 2019, "Generating
    long sequences with sparse transformers".
    """
    distance = query_index[:, None] - key_index[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask[None, None]


def last_keys(mask: Bool[Array, "#B 1 T S"], window: int) -> Bool[Array, "#B 1 T S"]:
    """Keeps the last `window` keys of each query: a band where a sequence's keys are scattered."""
    later = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return mask & (later <= window)


def padding_mask(
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B S"] | None,
    query_segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "#B 1 #T #S"]:
    """Hides padding, and in packed sequences the tokens of other documents.

    The queries belong to the documents `query_segment_ids`, by default to those of the keys. A
    three-dimensional `attention_mask` has an entry for each query and key.
    """
    mask = jnp.ones((1, 1, 1, 1), bool)
    if attention_mask is not None:
        mask = jnp.asarray(attention_mask != 0)
        mask = mask[:, None] if mask.ndim == 3 else mask[:, None, None, :]
    if segment_ids is not None:
        queries = segment_ids if query_segment_ids is None else query_segment_ids
        same = queries[:, :, None] == segment_ids[:, None, :]
        mask &= (same & (segment_ids != 0)[:, None, :])[:, None]
    return mask


@struct.dataclass
class AttentionMask:
    """The keys that each of T queries may attend to, among S keys.

    A model describes them by the first fields. Where a kernel computes attention, the description
    is all there is; elsewhere `materialized()` adds the array, once for all layers.
    """

    num_queries: Size = struct.field(pytree_node=False)
    num_keys: Size = struct.field(pytree_node=False)
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None = None
    """1 for the keys that all queries may attend to; or one entry for each query and key."""
    segment_ids: Int[AnyArray, "B S"] | None = None
    """The document that each key belongs to, 0 for padding."""
    query_segment_ids: Int[AnyArray, "B T"] | None = None
    """The document of each query, if the queries are not the tokens of the keys."""
    causal: bool = struct.field(pytree_node=False, default=False)
    """Whether a query attends only to its own key and to earlier ones."""
    window: int | None = struct.field(pytree_node=False, default=None)
    """If given, only to the last `window` of these, its own included."""
    start: Int[Array, ""] | int = 0
    """The index of the first query among the keys."""
    use_window: Bool[Array, ""] | None = None
    """Whether the window applies, where that differs between layers."""
    values: Bool[Array, "#B 1 #T #S"] | None = None
    """The array, once it was made."""

    @property
    def is_per_query(self) -> bool:
        """Whether the attention mask has an entry for each query and key."""
        return self.attention_mask is not None and self.attention_mask.ndim == 3

    def materialize(self) -> Bool[Array, "#B 1 #T #S"]:
        """Returns the mask as an array with an entry for every query and key."""
        if self.values is not None:
            return self.values
        mask = padding_mask(self.attention_mask, self.segment_ids, self.query_segment_ids)
        if not self.causal:
            return mask
        indices = self.start + jnp.arange(self.num_queries), jnp.arange(self.num_keys)
        if self.window is not None and self.is_per_query:
            # A query's keys are not side by side, so the window counts visible keys.
            return last_keys(causal_mask(*indices) & mask, self.window)
        return causal_mask(*indices, self.window) & mask

    def materialized(self) -> "AttentionMask":
        """Returns the mask with its array."""
        return dataclasses.replace(self, values=self.materialize())

    def segments(self) -> Segments | None:
        """Returns the mask, but for causal order, as segment ids of queries and keys.

        Requires a per-key mask and `start` 0. The allowed pairs are those of `materialize`, except
        for queries that are padding of packed sequences (0): these attend to the hidden keys, so
        that no query is left without keys.
        """
        if self.attention_mask is None and self.segment_ids is None:
            return None
        if self.segment_ids is None:
            assert self.attention_mask is not None
            keys = jnp.ones(self.attention_mask.shape, jnp.int32)
            queries = jnp.ones((keys.shape[0], self.num_queries), jnp.int32)
        else:
            keys = jnp.asarray(self.segment_ids)
            given = self.query_segment_ids
            queries = keys if given is None else jnp.asarray(given)
        if self.attention_mask is not None:
            keys = jnp.where(jnp.asarray(self.attention_mask) != 0, keys, 0)
        return queries, keys


def select_mask(
    use_window: Bool[Array, ""] | bool, windowed: AttentionMask, full: AttentionMask
) -> AttentionMask:
    """Returns the windowed or the full mask of a layer, whose index may be traced."""
    if isinstance(use_window, bool):
        return windowed if use_window else full
    if windowed.values is None:
        return dataclasses.replace(windowed, use_window=use_window)
    assert full.values is not None
    values = jnp.where(use_window, windowed.values, full.values)
    return dataclasses.replace(full, values=values)
