"""Kernels that compute attention block by block, and hold no scores of all pairs of tokens.

Dao et al. 2022, "FlashAttention: fast and memory-efficient exact attention with
IO-awareness"; cuDNN has it for NVIDIA's GPUs, and as "splash attention" jax brings
it for TPUs.  What a kernel cannot serve is computed by XLA (`models.attention`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..config import Execution
from .masks import Mask, Segments, Size, Visible
from .typing import Array, Bool, Float


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What is asked of attention, as far as it is known before any numbers are."""

    num_queries: Size
    num_keys: Size
    key_dim: int
    head_dim: int
    dtype: str
    dropout_rate: float
    """Of attention weights; 0 where nothing is dropped."""
    cached: bool = False
    """Whether keys of earlier calls are read."""
    weights: bool = False
    """Whether the weights are to be answered."""
    for_each_query: bool = False
    """Whether the caller's mask has an entry for each query and key."""

    @property
    def lengths(self) -> str:
        """Of rows, in words."""
        same = self.num_queries == self.num_keys
        return f"{self.num_queries}" if same else f"{self.num_queries} and {self.num_keys}"


BLOCK = 128
"""Splash attention takes so many tokens at a time, or a multiple."""
LARGEST_BLOCKS = (512, 384, 256, BLOCK)
MOST_CUDNN_HEAD = 128
"""The largest head that cuDNN has a kernel for on GPUs before Hopper."""

Limit = tuple[Callable[[AttentionCall], bool], str]
"""What a kernel cannot do, and how it is said."""

_LIMITS: tuple[Limit, ...] = (
    (lambda c: c.cached, "keys and values are read from a cache"),
    (lambda c: c.weights, "attention weights are asked for"),
    (lambda c: c.for_each_query, "every token has a mask of its own"),
    (
        lambda c: c.dropout_rate > 0,
        "attention weights are dropped with probability {c.dropout_rate:g}",
    ),
)
LIMITS: dict[str, tuple[Limit, ...]] = {
    "cudnn": (
        *_LIMITS,
        (lambda c: c.dtype != "bfloat16", "the precision is {c.dtype} and not bfloat16"),
        (
            lambda c: c.key_dim != c.head_dim,
            "keys have size {c.key_dim} and values {c.head_dim}",
        ),
        (
            lambda c: c.head_dim % 8 != 0 or c.head_dim > MOST_CUDNN_HEAD,
            f"heads have size {{c.head_dim}}, not a multiple of 8 up to {MOST_CUDNN_HEAD}",
        ),
        (
            lambda c: c.num_queries % 2 != 0 or c.num_keys % 2 != 0,
            "rows have {c.lengths} tokens, an odd number",
        ),
    ),
    "splash": (
        *_LIMITS,
        (
            lambda c: c.num_queries % BLOCK != 0 or c.num_keys % BLOCK != 0,
            f"rows have {{c.lengths}} tokens, not a multiple of {BLOCK}",
        ),
    ),
}
"""What each kernel cannot serve: the one table of reasons."""


def refusal(kernel: str, call: AttentionCall) -> str | None:
    """Why a kernel cannot serve, or None where it can."""
    return next((why.format(c=call) for cannot, why in LIMITS[kernel] if cannot(call)), None)


def mask_for(
    visible: Visible,
    config: Any,
    execution: Execution,
    *,
    dropped: bool,
    cached: bool,
    weights: bool,
) -> Mask:
    """A mask as whoever computes attention takes it: not written out for a kernel that can serve.

    Args:
      visible: what may be seen.
      config: sizes.
      execution: names the kernel.
      dropped: whether attention weights are dropped.
      cached: whether keys of earlier calls are read.
      weights: whether the weights are to be answered.
    """
    if execution.attention in LIMITS:
        call = AttentionCall(
            *(visible.num_queries, visible.num_keys, config.key_dim, config.head_dim),
            execution.dtype,
            config.attention_dropout_rate if dropped else 0.0,
            *(cached, weights, visible.for_each_query),
        )
        if refusal(execution.attention, call) is None:
            return visible.structure()
    return visible.dense()


def cudnn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N H"],
    segments: Segments | None,
    *,
    causal: bool,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """Flash attention by cuDNN, for NVIDIA's GPUs; scores are not scaled.

    Causal order, and a window beside it, are arguments of the kernel. (A window without causal
    order would let queries see all that comes after them, and lengths of rows are right for
    padding at their end alone: neither is used.) Segments become a finite addition to the
    scores, so that a row that sees nothing has no NaN: B · T · S numbers, of which older versions
    of jax compute the gradient as well.

    Raises:
      RuntimeError, NotImplementedError, UserError: jax finds no cuDNN, or one that cannot serve
        these sizes or this device; see `LIMITS`.
    """
    mask = None
    if segments is not None:
        queries, keys = segments
        mask = (queries[:, :, None] == keys[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=1.0,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def splash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    value: Float[Array, "B S N V"],
    segments: Segments | None,
    *,
    causal: bool,
    window: int | None,
) -> Float[Array, "B T N V"]:
    """Splash attention, for TPUs; scores are not scaled. Blocks that are hidden are not computed.

    Heads of less than 128 are given as they are: the compiler lays them out in tiles of 128.
    T and S are multiples of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    (_, num_queries, num_heads, _), num_keys = query.shape, key.shape[1]
    mask = _splash_mask(num_queries, num_keys, causal, window)
    with jax.ensure_compile_time_eval():  # what is said of blocks is known before any numbers
        kernel = splash.make_splash_mha(
            mask=_every_head(mask, num_heads),
            block_sizes=_splash_blocks(num_queries, num_keys),
            head_shards=1,
            q_seq_shards=1,
        )
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    ids = None if segments is None else splash.SegmentIds(*segments)
    context: Any = jax.vmap(lambda *row: kernel(*row))(query, key, value, ids)
    return jnp.swapaxes(context, 1, 2)


def _splash_mask(num_queries: int, num_keys: int, causal: bool, window: int | None) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = num_queries, num_keys
    if window is not None:
        return masks.LocalMask(shape, (window - 1, 0), 0)
    return masks.CausalMask(shape) if causal else masks.FullMask(shape)


def _every_head(mask: Any, num_heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    return masks.MultiHeadMask([mask] * num_heads)


def _splash_blocks(num_queries: int, num_keys: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    q, kv = (next(b for b in LARGEST_BLOCKS if n % b == 0) for n in (num_queries, num_keys))
    return splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )


KERNELS: dict[str, Callable[..., Array]] = {
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}


class FusedAttention(nn.Module):
    """softmax(Q Kᵀ) V by a kernel.

    It has no parameters; it is a module so that who lays a model out over devices finds it: a
    kernel is no sum of products that a compiler could cut by itself.

    Attributes:
      kernel: one of `KERNELS`.
      causal: whether a query sees no key behind its own place.
      window: if given, only so many of the keys up to its own place.
    """

    kernel: str
    causal: bool
    window: int | None

    @nn.compact
    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S N H"],
        value: Float[Array, "B S N V"],
        segments: Segments | None,
        banded: Bool[Array, ""] | None,
    ) -> Float[Array, "B T N V"]:
        """What each query gathers.

        Args:
          query: already scaled.
          key: as long as the query's.
          value: of any size.
          segments: numbers of queries and keys, which see their own. A query that
            sees none gathers something finite, of which no gradient may be asked.
          banded: whether the window holds; by default it does.
        """
        attend = functools.partial(KERNELS[self.kernel], causal=self.causal)
        wide = functools.partial(attend, window=None)
        if self.window is None or self.window >= key.shape[1]:
            return wide(query, key, value, segments)
        band = functools.partial(attend, window=self.window)
        if banded is None:
            return band(query, key, value, segments)
        return jax.lax.cond(banded, band, wide, query, key, value, segments)
