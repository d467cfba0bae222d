"""Kernels that compute attention block by block, without materializing all scores.

Dao et al. 2022, "FlashAttention: fast and memory-efficient exact attention with IO-awareness".
On NVIDIA's GPUs, cuDNN implements flash attention; on TPUs, jax's "splash attention" is used. Three
kernels of this package also support dropout of the attention weights: flash attention for TPUs
(`kernels/flash.py`) and for NVIDIA's GPUs (`kernels/flash_triton.py`), and blockwise attention in
plain XLA (`kernels/blockwise.py`). All kernels support fewer key/value heads than query heads. XLA
computes the calls that no kernel supports (`attention.py`).
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .dropout import GROUP, HeadKeys
from .kernels import KERNEL_RESIDUALS
from .kernels.blockwise import (
    LARGEST_BLOCK,
    SMALLEST_BLOCK,
    block_size,
    blockwise_attention,
)
from .masks import Segments, Size
from .typing import Array, Bool, Float

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The static properties of an attention call. They determine which kernels support the call."""

    num_queries: Size
    num_keys: Size
    key_dim: int
    head_dim: int
    dtype: str
    dropout_rate: float
    """Dropout rate of the attention weights; 0 outside training."""
    cached: bool = False
    """Whether the call reads keys and values of earlier calls from a cache."""
    weights: bool = False
    """Whether the call returns the attention weights."""
    is_per_query: bool = False
    """Whether the caller's mask has an entry for each query and key."""
    biased: bool = False
    """Whether biases are added to the scores."""
    capped: bool = False
    """Whether scores are capped."""
    two_sided: bool = False
    """Whether a window covers keys on both sides of the query."""

    @property
    def lengths(self) -> str:
        """The number of queries and the number of keys, as text for error messages."""
        same = self.num_queries == self.num_keys
        return f"{self.num_queries}" if same else f"{self.num_queries} and {self.num_keys}"


BLOCK = 128
"""The TPU kernels process tokens in blocks whose size is a multiple of this number."""
LARGEST_BLOCKS = (512, 384, 256, BLOCK)
MAX_CUDNN_HEAD_DIM = 128
"""The largest head size that cuDNN supports on GPUs before Hopper."""
TRITON_BLOCK = 64
"""The Triton kernel processes tokens in blocks of this size or twice this size."""
TRITON_HEAD_DIMS = (16, 32, 64, 128)
"""The head sizes that the Triton kernel supports. Triton's tiles require powers of two, and larger
heads do not fit into registers."""
MAX_FLASH_QUERIES = 8192
"""The maximum number of queries for flash attention on TPUs, whose backward pass keeps the
gradients of all queries of a head in on-chip memory."""

FLASH_MEMORY = 53 << 18
"""Upper limit of `flash_bytes`, 13.25 MiB. A kernel has 16 MiB of on-chip memory, and the compiler
needs a part of this memory. Above the limit, the compiler rejected some shapes for TPU v4.
"""


def flash_bytes(call: AttentionCall) -> int:
    """Returns the approximate on-chip memory, in bytes, of flash attention's backward pass.

    Args:
      call: the call, with lengths that are multiples of `BLOCK`.
    """
    size, sizes = jnp.dtype(call.dtype).itemsize, call.key_dim + call.head_dim
    block_q, block_k = (
        next(b for b in LARGEST_BLOCKS if int(n) % b == 0)
        for n in (call.num_queries, call.num_keys)
    )
    # Blocks that are copied from or to main memory are double-buffered.
    buffers = 2 * size * block_q * (sizes + call.head_dim)  # queries, output and its gradient
    buffers += 4 * size * block_k * sizes  # keys and values, and their gradients
    # The sums of the gradients of keys and values, in float32.
    sums = 4 * block_k * sizes
    tiles = block_q * block_k * (4 + 4 + 2 * size)  # scores, weights and their gradients
    # The gradients of all queries of a head: the float32 sums, and the double-buffered result.
    of_queries = int(call.num_queries) * call.key_dim * (4 + 2 * size)
    return buffers + sums + tiles + of_queries


Limit = tuple[Callable[[AttentionCall], bool], str]
"""A condition under which a kernel does not support a call, and the reason for the error
message."""

_LIMITS: tuple[Limit, ...] = (
    (lambda c: c.cached, "keys and values are read from a cache"),
    (lambda c: c.weights, "attention weights are requested"),
    (lambda c: c.is_per_query, "the mask has an entry for each query and key"),
    (lambda c: c.biased, "positions add biases to the scores"),
)
_DROPPED: Limit = (
    lambda c: c.dropout_rate > 0,
    "attention weights are dropped with probability {c.dropout_rate:g}",
)
_CAPPED: Limit = (lambda c: c.capped, "scores are capped")
_TWO_SIDED: Limit = (lambda c: c.two_sided, "windows have two sides")
_BLOCKS: Limit = (
    lambda c: c.num_queries % BLOCK != 0 or c.num_keys % BLOCK != 0,
    f"rows have {{c.lengths}} tokens, not a multiple of {BLOCK}",
)
_BFLOAT16: Limit = (
    lambda c: c.dtype != "bfloat16",
    "the precision is {c.dtype} and not bfloat16",
)
LIMITS: dict[str, tuple[Limit, ...]] = {
    "cudnn": (
        *_LIMITS,
        _DROPPED,
        _CAPPED,
        _TWO_SIDED,
        _BFLOAT16,
        (
            lambda c: c.key_dim != c.head_dim,
            "keys have size {c.key_dim} and values {c.head_dim}",
        ),
        (
            lambda c: c.head_dim % 8 != 0 or c.head_dim > MAX_CUDNN_HEAD_DIM,
            f"heads have size {{c.head_dim}}, not a multiple of 8 up to {MAX_CUDNN_HEAD_DIM}",
        ),
        (
            lambda c: c.num_queries % 2 != 0 or c.num_keys % 2 != 0,
            "rows have {c.lengths} tokens, an odd number",
        ),
    ),
    "splash": (*_LIMITS, _DROPPED, _BLOCKS),
    "flash": (
        *_LIMITS,
        _CAPPED,
        _TWO_SIDED,
        _BLOCKS,
        (
            lambda c: c.num_queries > MAX_FLASH_QUERIES,
            f"rows have {{c.lengths}} tokens, more than {MAX_FLASH_QUERIES}",
        ),
        (
            lambda c: flash_bytes(c) > FLASH_MEMORY,
            "rows have {c.lengths} tokens, and with heads of size {c.key_dim} in {c.dtype} they "
            "do not fit the memory on the chip",
        ),
    ),
    "triton": (
        *_LIMITS,
        _CAPPED,
        _TWO_SIDED,
        _BFLOAT16,
        (
            lambda c: not {c.key_dim, c.head_dim} <= set(TRITON_HEAD_DIMS),
            "heads have size {c.key_dim} and values {c.head_dim}, not one of "
            f"{', '.join(map(str, TRITON_HEAD_DIMS))}",
        ),
        (
            lambda c: c.num_queries % TRITON_BLOCK != 0 or c.num_keys % TRITON_BLOCK != 0,
            f"rows have {{c.lengths}} tokens, not a multiple of {TRITON_BLOCK}",
        ),
    ),
    "blocks": (
        *_LIMITS,
        (
            lambda c: block_size(c.num_queries) is None or block_size(c.num_keys) is None,
            "rows have {c.lengths} tokens, which no block of "
            f"{SMALLEST_BLOCK} to {LARGEST_BLOCK} tokens divides",
        ),
        (
            lambda c: block_size(c.num_keys, dropping=c.dropout_rate > 0) is None,
            "rows have {c.lengths} tokens, and no block of a multiple of "
            f"{GROUP} keys divides them, which dropout of the weights requires",
        ),
    ),
}
"""For each kernel, the conditions under which the kernel does not support a call, with reasons."""


def refusal(kernel: str, call: AttentionCall) -> str | None:
    """Returns the reason why a kernel does not support a call, or None for a supported call."""
    return next((why.format(c=call) for cannot, why in LIMITS[kernel] if cannot(call)), None)


def cudnn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    segments: Segments | None,
    *,
    causal: bool,
    window: int | None,
    cap: float | None,
) -> Float[Array, "B T N H"]:
    """Computes flash attention with cuDNN on NVIDIA GPUs; scores are not scaled and not capped.

    Causal order and a window are passed to cuDNN as arguments. (Two features of cuDNN are not used:
    a window without causal order, which would let queries attend to all later keys, and sequence
    lengths, which describe only padding at the end.) Segments are converted to a finite bias that
    is added to the scores, so that a query without visible keys does not give NaN. The bias has
    B · T · S elements, and older versions of jax also compute its gradient.

    Raises:
      RuntimeError, NotImplementedError, UserError: jax finds no cuDNN, or cuDNN does not support
        these sizes or this device; see `LIMITS`.
    """
    assert cap is None
    mask = None
    if segments is not None:
        queries, keys = segments
        # [B, 1, T, S]: cuDNN reads one mask for all heads.
        mask = (queries[:, :, None] == keys[:, None, :])[:, None]
    # cuDNN's window counts the keys before the query, without the query's own key.
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
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    causal: bool,
    window: int | None,
    cap: float | None,
) -> Float[Array, "B T N V"]:
    """Computes splash attention on TPUs; scores are not scaled.

    Fully masked blocks are skipped. Heads smaller than 128 are not padded here, because the
    compiler stores them in tiles of 128. T and S are multiples of 128.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    # Queries [B, T, N, H], keys [B, S, K, H]; a key head serves N / K query heads.
    (_, num_queries, num_heads, _), num_keys = query.shape, key.shape[1]
    mask = _splash_mask(num_queries, num_keys, causal, window)
    with jax.ensure_compile_time_eval():  # the mask of blocks is static
        kernel = splash.make_splash_mha(
            mask=masks.MultiHeadMask([mask] * num_heads),
            block_sizes=splash_blocks(num_queries, num_keys),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=cap,
            residual_checkpoint_name=KERNEL_RESIDUALS,
        )
    # The kernel processes one sequence, with heads before tokens, so vmap it over the batch.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    ids = None if segments is None else splash.SegmentIds(*segments)
    context = jax.vmap(lambda *row: kernel(*row))(query, key, value, ids)
    return jnp.swapaxes(jnp.asarray(context), 1, 2)


def _splash_mask(
    num_queries: int, num_keys: int, causal: bool, window: int | None
) -> "splash_attention_mask.Mask":
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = num_queries, num_keys
    # The window includes the query's own key. In causal order, it includes no later keys.
    if window is not None:
        return masks.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
    return masks.CausalMask(shape) if causal else masks.FullMask(shape)


def splash_blocks(num_queries: int, num_keys: int) -> "splash_attention_kernel.BlockSizes":
    """Returns the sizes of splash attention's blocks in each pass."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    # Use the largest blocks that divide the sequence: larger blocks need fewer passes over HBM.
    q, kv = (next(b for b in LARGEST_BLOCKS if n % b == 0) for n in (num_queries, num_keys))
    return splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )


def _flash_attention(module: str, *arrays: Any, cap: float | None, **options: Any) -> Array:
    """Computes flash attention with a module in `kernels`; scores are not scaled or capped.

    With the option `keys`, weights are dropped with probability `rate`; attention with XLA drops
    the same weights.
    """
    assert cap is None
    # Import here, because a machine may lack the kernel's compiler.
    kernel = importlib.import_module(f".kernels.{module}", __package__)
    return kernel.flash_attention(*arrays, **options)


KERNELS: dict[str, Callable[..., Array]] = {
    "blocks": blockwise_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
    "flash": functools.partial(_flash_attention, "flash"),  # for TPUs
    "triton": functools.partial(_flash_attention, "flash_triton"),  # for NVIDIA's GPUs
}


class FusedAttention(nn.Module):
    """Computes softmax(Q Kᵀ) V with a kernel.

    The module has no parameters. Because the kernel is wrapped in a module, distributed training
    can find and shard it; the compiler cannot partition a kernel.

    Attributes:
      kernel: one of `KERNELS`.
      causal: whether a query attends only to keys up to its own position.
      window: if not None, a query attends only to keys at a distance below `window`.
      cap: if not None, scores s become cap · tanh(s / cap).
      dropout_rate: probability that a weight is dropped, if a call has dropout keys.
    """

    kernel: str
    causal: bool
    window: int | None
    cap: float | None = None
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        *,
        segments: Segments | None,
        use_window: Bool[Array, ""] | None,
        keys: HeadKeys | None = None,
    ) -> Float[Array, "B T N V"]:
        """Returns the weighted sum of the values for each query.

        Args:
          query: the queries, which are already scaled.
          key: the keys, with the head size of the queries; K divides N.
          value: values of any size.
          segments: segment ids of queries and keys. A query attends to the keys with its segment
            id. If a query has no such keys, its output is finite, but its gradient must not be
            used.
          use_window: whether the window applies to this layer. If None, it does.
          keys: dropout keys for each head of each sequence. If None, dropout is off.
        """
        # cuDNN and splash attention have no argument for dropout.
        kernel = KERNELS[self.kernel]
        if keys is not None:
            kernel = functools.partial(kernel, keys=keys, rate=self.dropout_rate)
        return self.attend(kernel, query, key, value, segments=segments, use_window=use_window)

    def attend(
        self,
        kernel: Callable[..., Array],
        *arrays: Float[Array, "B _ _ _"],
        segments: Segments | None,
        use_window: Bool[Array, ""] | None,
    ) -> Float[Array, "B T N V"]:
        """Returns the output of a kernel for windowed or full attention.

        Args:
          kernel: a function like the entries of `KERNELS`. Training with a sharded `context` axis
            passes a different function.
          *arrays: queries, keys and values, as in `__call__`.
          segments: as in `__call__`.
          use_window: as in `__call__`.
        """
        query, key, value = arrays
        attend = functools.partial(kernel, causal=self.causal, cap=self.cap)
        full = functools.partial(attend, window=None)
        # A window that covers the whole sequence masks no keys: leave it out, because the kernel is
        # then faster.
        if self.window is None or self.window >= key.shape[1]:
            return full(query, key, value, segments)
        windowed = functools.partial(attend, window=self.window)
        if use_window is None:
            return windowed(query, key, value, segments)
        # Scanned layers share one program, so whether the window applies is a traced value.
        return jax.lax.cond(use_window, windowed, full, query, key, value, segments)
