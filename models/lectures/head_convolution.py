"""The convolution over tokens that follows the projections in attention (So et al. 2021, "Primer").

Each head's queries, keys and values are convolved over the preceding tokens: if w are the taps of a
head and channel, out_t = w₀ x_t + w₁ x_{t−1} + w₂ x_{t−2} for width 3. The convolution reads zeros
in place of padding and of tokens of other documents. The taps are initialized to (1, 0, 0), the
identity.

The paper's code instead initializes the taps to 0.5 for the token itself and 0.5 / 3 for the other
tokens.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from ...data.common.fields import require
from ..config import Execution
from ..nn.masks import AttentionMask
from ..nn.typing import Array, Bool, Float


@struct.dataclass
class EarlierTokens:
    """The earlier tokens that a convolution may read. They are the same for all layers."""

    real: Bool[Array, "B T"] | None
    """For each token, whether later tokens may read it. If None, later tokens may read all
    tokens."""
    readable: Bool[Array, "#B T w"] | None
    """For each token, whether it may read the tokens at the distances 1, 2, … w before it. If None,
    each token may read all real tokens.
    """
    are_beams: bool = struct.field(pytree_node=False)
    """Whether the T tokens continue T beams with separate histories. If False, they continue one
    sequence."""


def earlier_tokens(mask: AttentionMask, width: int, *, cached: bool) -> EarlierTokens:
    """Returns the earlier tokens that a convolution may read.

    Args:
      mask: the keys that each token may attend to. This mask is not materialized.
      width: the number of taps.
      cached: whether the tokens continue a cache. If True and the mask is per query, the tokens are
        beams.
    """
    if mask.is_per_query and cached:
        return EarlierTokens(None, None, are_beams=True)
    length, lags = mask.num_queries, range(1, width)
    real = readable = None
    if mask.is_per_query:
        # The `lag`-th diagonal below the main diagonal shows whether each token attends to the
        # token `lag` positions before it.
        visible = jnp.asarray(mask.attention_mask) != 0  # [B, T, T]
        diagonals = [jnp.diagonal(visible, -lag, axis1=1, axis2=2) for lag in lags]  # [B, T - lag]
        readable = jnp.stack([_last(x, length) for x in diagonals], axis=-1)
    elif mask.attention_mask is not None:
        slots = jnp.asarray(mask.attention_mask) != 0  # [B, S]
        real = jax.lax.dynamic_slice_in_dim(slots, mask.start, length, axis=1)
    if mask.segment_ids is not None:
        ids = jnp.asarray(mask.segment_ids)  # [B, T]
        # Documents of a packed sequence must not read each other.
        same = [_last(ids[:, lag:] == ids[:, : max(0, length - lag)], length) for lag in lags]
        same_head = jnp.stack(same, axis=-1)
        readable = same_head if readable is None else readable & same_head
    return EarlierTokens(real, readable, are_beams=False)


def _last(x: Bool[Array, "B n"], length: int) -> Bool[Array, "B {length}"]:
    """Pads an array on the left with False, to `length` columns."""
    return jnp.pad(x, ((0, 0), (length - x.shape[1], 0)))


class HeadConvolution(nn.Module):
    """A causal convolution over tokens with separate taps for each head and channel.

    Attributes:
      width: the number of taps.
      execution: precision.
    """

    width: int
    execution: Execution

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T N H"],
        earlier: EarlierTokens,
        history: Float[Array, "B M w N H"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B M w N H"] | None]:
        """Returns the convolved projections, and the history for the next call.

        Args:
          x: projections of T tokens.
          earlier: the earlier tokens that the convolution may read.
          history: the convolution's inputs for the last w = width - 1 tokens of each of M beams (M
            is 1 unless `earlier.are_beams`), oldest first; zeros before the first token.

        Raises:
          UserError: a mask per query is combined with a cache that has no history of its beams.
        """
        e, before = self.execution, self.width - 1

        def first(_: Array, shape: tuple[int, ...]) -> Array:
            return jnp.zeros(shape, e.param_dtype).at[0].set(1)

        # Initially the identity: 1 for the token itself, 0 for earlier tokens.
        taps = self.param("taps", first, (self.width, *x.shape[2:])).astype(x.dtype)
        y = taps[0] * x
        if before == 0:
            return y, history
        # Each token continues a different beam: read only the history of its beam.
        if earlier.are_beams:
            assert history is not None
            require(
                history.shape[1] == x.shape[1],
                f"a mask [B, T, S] with T = {x.shape[1]} continues a cache of "
                f"{history.shape[1]} beams: the convolution of heads needs the history of "
                "each beam (models.nn.cache.with_beams)",
            )
            y += jnp.einsum("wNH,BTwNH->BTNH", taps[:0:-1], history)
            return y, jnp.concatenate([history, x[:, :, None]], axis=2)[:, :, 1:]
        if earlier.real is not None:
            x = jnp.where(earlier.real[..., None, None], x, 0)
        # Prepend the history (or zeros), and add up the sequence shifted by each lag.
        start = jnp.zeros_like(x[:, :1]).repeat(before, 1) if history is None else history[:, 0]
        padded = jnp.concatenate([start, x], axis=1)  # [B, w + T, N, H]
        for lag in range(1, self.width):
            shifted = padded[:, before - lag : padded.shape[1] - lag]
            if earlier.readable is not None:
                shifted = jnp.where(earlier.readable[..., lag - 1, None, None], shifted, 0)
            y += taps[lag] * shifted
        return y, None if history is None else padded[:, None, -before:]
