"""Positions of tokens: counted, as sinusoidal vectors, as rotations, as relative biases."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..config import Execution
from .masks import AnyArray, Size
from .typing import Array, Float, Int


def default_positions(
    start: Int[Array, ""],
    length: Size,
    attention_mask: Int[AnyArray, "B S"] | None,
    segment_ids: Int[AnyArray, "B T"] | None,
) -> Int[Array, "#B T"]:
    """Counts 0, 1, 2 … over the real tokens of each sequence, or of each packed document.

    Args:
      start: the first requested slot (not 0 when a cache is continued).
      length: number of requested slots, T.
      attention_mask: over all slots; the padding may be on either side.
      segment_ids: document of each token of a packed sequence.
    """
    index = jnp.arange(length)
    if segment_ids is not None:
        # The index of the token minus the index at which its document begins.
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if attention_mask is not None:
        positions = jnp.maximum(jnp.cumsum(attention_mask != 0, axis=1) - 1, 0)
        return jax.lax.dynamic_slice_in_dim(positions, start, length, axis=1)
    return (start + index)[None]


def sinusoidal_positions(
    length: int,
    d_model: int,
    base: float = 10_000.0,
    layout: Literal["interleaved", "halves"] = "interleaved",
) -> np.ndarray:
    """Returns the sine and cosine of every position, a table float32[length, d_model].

    Vaswani et al. 2017, section 3.5: dimension 2i holds sin(p / base^(2i/D)), dimension 2i + 1 the
    cosine. The paper's base is 10,000; 100,000 is also in use. With the layout "halves" (Marian)
    all sines come before all cosines.
    """
    frequency = base ** (-np.arange(0, d_model, 2) / d_model)
    angle = np.arange(length)[:, None] * frequency[None, :]
    waves = np.sin(angle), np.cos(angle)
    if layout == "halves":
        table = np.concatenate(waves, axis=-1)
    else:
        table = np.stack(waves, axis=-1).reshape(length, -1)
    return table[:, :d_model].astype(np.float32)


@struct.dataclass
class Rotary:
    """Rotations of queries and keys by their positions, the same for every head."""

    cos: Float[Array, "#B T H"]
    sin: Float[Array, "#B T H"]

    def rotate(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Rotates the plane of dimensions (i, i + H/2) by the angle of each position."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)  # by 90 degrees
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        return (x * cos + turned * sin).astype(x.dtype)


def rotary_positions(
    position_ids: Int[AnyArray, "#B #T"], head_dim: int, base: float = 10_000.0
) -> Rotary:
    """Returns the rotations of some positions (Su et al. 2021, "RoFormer", section 3.2.2).

    The plane (i, i + H/2) turns by p / base^(2i/H) at position p. The paper pairs the dimensions
    (2i, 2i + 1); the order here is that of GPT-NeoX and of every published Llama in Hugging Face's
    format, and differs by a permutation of the dimensions of queries and keys.
    """
    # The quotient in float32, as in transformers: another rounding shows at late positions.
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = 1.0 / jnp.float32(base) ** exponent
    angle = jnp.asarray(position_ids, jnp.float32)[..., None] * frequency
    angle = jnp.concatenate([angle, angle], axis=-1)  # [B, T, H]
    return Rotary(jnp.cos(angle), jnp.sin(angle))


def relative_buckets(
    distance: Int[Array, "..."], num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "..."]:
    """Returns the bucket of each distance, key position minus query position (T5).

    Raffel et al. 2020, section 2.1: half of the buckets hold one small distance each, the others
    logarithmically growing ranges up to `max_distance`, beyond which all share the last bucket.

    Args:
      distance: key position minus query position.
      num_buckets: number of buckets; if `bidirectional` half of them for keys after the query.
      max_distance: distance from which on all keys share a bucket.
      bidirectional: whether queries attend to later keys; otherwise these have bucket 0.
    """
    offset = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact)
    growth = growth / math.log(max_distance / exact) * (num_buckets - exact)
    far = jnp.minimum(exact + growth.astype(jnp.int32), num_buckets - 1)
    return offset + jnp.where(distance < exact, distance, far)


class RelativePositionBias(nn.Module):
    """A learned bias of attention scores for each head and bucket of distances (T5).

    Attributes:
      num_heads: number of query heads, N.
      num_buckets: number of buckets, see `relative_buckets`.
      max_distance: distance from which on all keys share a bucket.
      bidirectional: whether queries attend to later keys.
      init_std: standard deviation of the initial biases.
      execution: precision of the parameters; the biases are float32.
    """

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool
    init_std: float
    execution: Execution

    @nn.compact
    def __call__(
        self, query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"]
    ) -> Float[Array, "#B N T S"]:
        """Returns the bias of each head, query and key."""
        init = nn.initializers.normal(self.init_std)
        shape = self.num_buckets, self.num_heads
        table = self.param("embedding", init, shape, self.execution.param_dtype)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        buckets = relative_buckets(
            distance, self.num_buckets, self.max_distance, self.bidirectional
        )
        return jnp.einsum("BTSN->BNTS", table[buckets].astype(jnp.float32))
