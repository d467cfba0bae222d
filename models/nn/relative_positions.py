"""Relative positions, which make attention depend on the distance between query and key.

- Raffel et al. 2020, "Exploring the limits of transfer learning" (T5), section 2.1: a learned score
  bias for each head and distance bucket, shared by all layers.
- He et al. 2021, "DeBERTa: decoding-enhanced BERT with disentangled attention", section 3.1:
  distance vectors; the authors' code for version 2 combines them in logarithmic buckets.
- Press et al. 2022, "Train short, test long" (ALiBi), section 3: a bias that decreases
  linearly with the distance, with one slope per head.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from ..config import Execution
from .typing import Array, Float, Int


def relative_buckets(
    distance: Int[Array, "..."], num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "..."]:
    """Returns the bucket of each distance, key position minus query position (T5).

    Raffel et al. 2020, section 2.1: half of the buckets contain a single small distance each. The
    other buckets contain logarithmically growing ranges of distances, up to `max_distance`. Larger
    distances share the last bucket.

    Args:
      distance: key position minus query position.
      num_buckets: number of buckets. If `bidirectional`, half of the buckets are for keys after the
        query.
      max_distance: all larger distances share the last bucket.
      bidirectional: whether queries attend to later keys. If False, later keys have bucket 0.
    """
    offset = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    # Each bucket of the first half has a single distance; each bucket of the second half has a
    # range.
    exact = num_buckets // 2
    first = _first_distances(num_buckets, max_distance, exact)
    far = exact + jnp.sum(distance[..., None] >= first, axis=-1)
    return offset + jnp.where(distance < exact, distance, far)


def _first_distances(num_buckets: int, max_distance: int, exact: int) -> Int[np.ndarray, " R"]:
    """Returns the smallest distance of each bucket with a range, except for the first such bucket.

    NumPy computes these distances on the host, because on some devices the logarithm is slightly
    too small for ranges that begin at an integer. A correctly rounded float32 logarithm gives the
    same ranges as torch.
    """
    ratio = np.arange(exact, max_distance + 1, dtype=np.float32) / np.float32(exact)
    growth = np.log(ratio.astype(np.float64)).astype(np.float32)
    growth = growth / np.float32(math.log(max_distance / exact))
    growth = (growth * np.float32(num_buckets - exact)).astype(np.int32)
    return exact + np.searchsorted(growth, np.arange(1, num_buckets - exact))


def logarithmic_buckets(
    distance: Int[Array, "..."], num_buckets: int, max_distance: int
) -> Int[Array, "..."]:
    """Returns the bucket of each distance, with the distance's sign (DeBERTa version 2's code).

    Distances d up to m = `num_buckets` / 2 have one bucket each. A larger distance has the bucket m
    + ⌈log(d / m) / log((M - 1) / m) · (m - 1)⌉. All distances of at least M share a bucket. If M ≤
    m + 1, all distances of at least m share a bucket.

    Args:
      distance: distances of either sign.
      num_buckets: number of buckets in each direction.
      max_distance: M, the smallest distance of the last bucket.
    """
    # NumPy computes the table, as in `_first_distances`, so that it is the same on every device.
    middle = num_buckets // 2
    known = np.arange(max(max_distance, middle) + 1)
    last = max(max_distance - 1, middle + 1)
    ratio = np.maximum(known, middle).astype(np.float32) / np.float32(middle)
    growth = np.log(ratio.astype(np.float64)).astype(np.float32)
    growth /= np.float32(math.log(np.float32(last / middle)))
    far = middle + np.ceil(growth * np.float32(middle - 1)).astype(np.int32)
    table = jnp.asarray(np.where(known <= middle, known, far), distance.dtype)
    return jnp.sign(distance) * table[jnp.minimum(jnp.abs(distance), len(table) - 1)]


def by_distance(products: Float[Array, "... T R"]) -> Float[Array, "... T T"]:
    """Selects the product of row i for the distance j - i, for each row i and column j.

    A padded row has R + 1 elements, so reshaping shifts each row by one element more than the row
    before, and no gather is needed.

    Args:
      products: for each row, one product for each of the R = 2T - 1 distances -(T - 1) … T - 1.
    """
    *batch, length, _ = products.shape
    # […, T, 2T - 1] to […, T, 2T].
    padded = jnp.pad(products, [*[(0, 0)] * len(batch), (0, 0), (0, 1)])
    flat = padded.reshape(*batch, 2 * length * length)
    # Start at distance 0 of row 0: in rows of 2T - 1, row i then starts at its distance -i.
    flat = flat[..., length - 1 : length - 1 + length * (2 * length - 1)]
    return flat.reshape(*batch, length, 2 * length - 1)[..., :length]


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """Returns the slope of each head (Press et al. 2022, section 3).

    If N is a power of two, the slopes are 2^(-8/N), 2^(-16/N) …, 2^-8. For other N, let P be the
    largest power of two below N. As in the authors' code, the P slopes for P heads are followed by
    every second slope for 2P heads.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-4 * np.arange(1, 2 * (num_heads - lower), 2) / lower)
    return np.concatenate([slopes, between]).astype(np.float32)


def alibi(
    query_positions: Int[Array, "#B T"], key_positions: Int[Array, "#B S"], num_heads: int
) -> Float[Array, "#B N T S"]:
    """Returns the bias of each head, query and key, which is -slope · distance."""
    distance = (key_positions[:, None, :] - query_positions[:, :, None]).astype(jnp.float32)
    slopes = jnp.asarray(alibi_slopes(num_heads))
    return slopes[:, None, None] * -jnp.abs(distance)[:, None]


class RelativePositionBias(nn.Module):
    """A learned bias of the attention scores for each head and distance bucket (T5).

    Attributes:
      num_heads: number of query heads, N.
      num_buckets: number of buckets; see `relative_buckets`.
      max_distance: all larger distances share the last bucket.
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
        # The lookup gives [B, T, S, N]; scores have the heads first.
        return jnp.einsum("BTSN->BNTS", table[buckets].astype(jnp.float32))
