"""What each query of attention may see: said once by a model, and written out where it must be.

In every mask `True` means *may be seen*.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from .typing import Array, Bool, Int

AnyArray = Array | np.ndarray
"""What a caller may give: arrays of jax, or numpy's outside a compiled function."""

Size = Any
"""An int; or, in a program that is exported with free sizes, not yet a number."""

Segments = tuple[Int[Array, "B T"], Int[Array, "B S"]]
"""Numbers of queries and of keys: a query sees the keys of its own number."""


def causal_mask(
    query_index: Int[Array, " T"], key_index: Int[Array, " S"], window: int | None = None
) -> Bool[Array, "1 1 T S"]:
    """Each query sees itself and what came before it.

    With `window`, only the last `window` of these: the band of Child et al.
    2019, "Generating long sequences with sparse transformers".
    """
    distance = query_index[:, None] - key_index[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask[None, None]


def last_seen(mask: Bool[Array, "#B 1 T S"], window: int) -> Bool[Array, "#B 1 T S"]:
    """Of what each query sees the last `window`: a band where keys do not stand side by side."""
    behind = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return mask & (behind <= window)


def visible_mask(
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B S"] | None,
    query_segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "#B 1 #T #S"]:
    """Real tokens are seen; in packed rows only by their own document, padding (0) by nobody.

    The queries are the keys' own tokens, or those of `query_segment_ids`. An `attention_mask` of
    three axes says it for each query.
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
class Structure:
    """A mask that is not written out, for kernels that never hold all pairs."""

    segments: Any
    """`Segments`; None: all keys are alike."""
    causal: bool = struct.field(pytree_node=False)
    """Whether a query sees no key behind its own place."""
    window: int | None = struct.field(pytree_node=False, default=None)
    """If given, only so many of the keys up to its own place."""
    banded: Any = None
    """Whether the window holds, Bool[""], where layers differ in it."""


Mask = Bool[Array, "#B 1 #T #S"] | Structure
"""What attention takes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Visible:
    """What T queries may see of S keys."""

    num_queries: Size
    num_keys: Size
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None
    """Which keys may be seen, by all or by each query."""
    segment_ids: Int[AnyArray, "B S"] | None
    """Which document each key belongs to, 0 for padding."""
    query_segment_ids: Int[AnyArray, "B T"] | None = None
    """The same of the queries, where they are not the keys' own tokens."""
    causal: bool = False
    """Whether a query sees only what came before it."""
    window: int | None = None
    """If given, only the last so many of what came before it, itself included."""
    start: Int[Array, ""] | int = 0
    """Which key the first query is."""

    @property
    def for_each_query(self) -> bool:
        """Whether the attention mask says it for each query."""
        return self.attention_mask is not None and self.attention_mask.ndim == 3

    def dense(self) -> Bool[Array, "#B 1 #T #S"]:
        """Written out, for every query and key."""
        mask = visible_mask(self.attention_mask, self.segment_ids, self.query_segment_ids)
        if not self.causal:
            return mask
        places = self.start + jnp.arange(self.num_queries), jnp.arange(self.num_keys)
        if self.window is not None and self.for_each_query:
            return last_seen(causal_mask(*places) & mask, self.window)
        return causal_mask(*places, self.window) & mask

    def structure(self) -> Structure:
        """Not written out; of a mask that is not one for each query, and begins at its first key.

        The same pairs but for queries that are padding: those of packed rows (0) see what else
        is hidden, so that no row is empty.
        """
        return Structure(self._segments(), self.causal, self.window)

    def _segments(self) -> Segments | None:
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


def alternate(turn: Bool[Array, ""] | bool, banded: Mask, plain: Mask) -> Mask:
    """The first of two masks of one form where it is its turn, else the second."""
    if isinstance(turn, bool):
        return banded if turn else plain
    if isinstance(banded, Structure):
        return dataclasses.replace(banded, banded=turn)
    assert not isinstance(plain, Structure)
    return jnp.where(turn, banded, plain)
