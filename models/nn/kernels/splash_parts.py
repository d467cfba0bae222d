"""Splash attention to a subset of the keys on TPUs, with the interface of `blockwise`."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..fused_attention import splash_blocks
from ..masks import Segments
from ..typing import Array, Float
from .blockwise import HIDDEN, Attended, Band, Gradients, Inputs

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

LEAST_LOG_SUM = -1e37
"""For a query without visible keys, the kernel returns a log-sum-exp below this value."""


def forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    band: Band | None,
    cap: float | None,
    dropped: None = None,
) -> Attended:
    """Computes attention of all queries to all keys; see `blockwise.forward`.

    T and S are multiples of 128. The output is rounded to the type of the queries. The kernel does
    not support dropout (`fused_attention.LIMITS`).
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    assert dropped is None
    kernel = _kernel(query, key, band, cap)
    ids = None if segments is None else splash.SegmentIds(*segments)
    # The kernel processes one sequence, with heads before tokens, so vmap it over the batch.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    output, (log_sum,) = jax.vmap(lambda *row: kernel(*row))(query, key, value, ids)
    output, log_sum = jnp.swapaxes(output, 1, 2), jnp.swapaxes(log_sum, 1, 2)
    # For a query without keys, the kernel returns the average of all values or, if there is a band,
    # NaN.
    has_keys = log_sum > LEAST_LOG_SUM
    return Attended(
        jnp.where(has_keys[..., None], output.astype(jnp.float32), 0),
        jnp.where(has_keys, log_sum, HIDDEN),
    )


def backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    band: Band | None,
    cap: float | None,
    dropped: None = None,
    attended: Attended,
    gradient: Float[Array, "B T N V"],
) -> Gradients:
    """Returns the gradients that come from the weights of these keys; see `blockwise.backward`.

    Given the output and the log-sum-exp over all keys, the kernel's backward pass supports any
    subset of the keys. This backward pass is not part of jax's public API.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    assert dropped is None
    kernel = _kernel(query, key, band, cap)
    options = {name: kernel.kwargs[name] for name in _OPTIONS}

    ids = None if segments is None else splash.SegmentIds(*segments)

    def of_row(inputs: Inputs, ids: splash.SegmentIds | None, attended: Attended, gradient: Array):
        masks = kernel.dq_mask_info, kernel.dkv_mask_info
        gradients = splash._splash_attention_bwd(  # pyright: ignore[reportPrivateUsage]
            save_residuals=False,
            residual_checkpoint_name=None,
            res=(*inputs, ids, None, attended.output, attended.log_sum, *masks),
            do=gradient,
            **options,
        )
        # The first entries belong to masks, which are not used here, and the next three are the
        # gradients of queries, keys and values.
        return gradients[3:6]

    arrays = (query, key, value), attended, gradient
    inputs, attended, gradient = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), arrays)
    gradients = jax.vmap(of_row)(inputs, ids, attended, gradient)
    return Gradients(*(jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in gradients))


_OPTIONS = (
    "mask_value",
    "is_mqa",
    "block_sizes",
    "mask_function",
    "attn_logits_soft_cap",
    "interpret",
)
"""The names of the backward kernel's arguments that are not arrays."""


def _kernel(
    query: Array, key: Array, band: Band | None, cap: float | None
) -> "splash_attention_kernel.SplashAttentionKernel":
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, num_queries, num_heads, _), num_keys = query.shape, key.shape[1]
    mask = _mask(num_queries, num_keys, band)
    with jax.ensure_compile_time_eval():  # the mask of blocks is static
        return splash.make_splash_mha(
            mask=masks.MultiHeadMask([mask] * num_heads),
            block_sizes=splash_blocks(num_queries, num_keys),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=cap,
            # Also return the log-sum-exp of each query, which `merge` needs.
            save_residuals=True,
        )


def _mask(num_queries: int, num_keys: int, band: Band | None) -> "splash_attention_mask.Mask":
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = num_queries, num_keys
    if band is None:
        return masks.FullMask(shape)
    # A band without a window only masks later keys.
    if band.window is None:
        return masks.CausalMask(shape, band.offset)
    later = 0 if band.causal else band.window - 1
    return masks.LocalMask(shape, (band.window - 1, later), band.offset)
