"""Counts the FLOPs of custom attention kernels, whose matmuls the compiled program hides."""

import math
import re

from .parser import Computation, Instruction, operands

MATMULS = {
    "fwd": (1, 1),  # Q Kᵀ; weights · V
    "dq": (2, 1),  # Q Kᵀ again and dQ; dO Vᵀ
    "dkv": (2, 2),  # Q Kᵀ again and dK; dO Vᵀ and dV
    "bwd": (3, 2),  # Q Kᵀ again, dQ and dK; dO Vᵀ and dV
}
"""Maps each phase of attention to the number of matmuls that have the size of keys, and the number
of matmuls that have the size of values."""
_SPLASH = re.compile(r"splash_(?:mha|mqa)_(fwd|dq|dkv)")
"""Matches names of splash attention's kernels. In an mqa kernel, all query heads share one key
head.
"""
OWN = re.compile(r"(^|_)flash_(fwd|bwd)")
"""Matches names of flaxzoo's TPU kernels, which state the FLOPs of the blocks that they compute."""
_STATED = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_TRITON = re.compile(r'name = "flash_triton_(fwd|dq|dkv)(_causal)?(?:_window_(\d+))?"')
"""Matches flaxzoo's GPU kernels."""
_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
_CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?"?(\d+)')


def kernel_flops(call: Instruction, computation: Computation) -> int:
    """Returns the FLOPs of an attention kernel, or 0 for an unknown kernel.

    For TPU kernels, the computed blocks are counted; for GPU kernels, the visible pairs of tokens.
    """
    if OWN.search(call.name):
        return int(call.find(_STATED, "0"))
    if triton := _TRITON.search(call.attributes):
        causal, window = triton[2] is not None, int(triton[3] or 0)
        return _gpu_flops(call, computation, triton[1], causal=causal, window=window)
    if cudnn := _CUDNN.search(call.attributes):
        window = int(call.find(_CUDNN_WINDOW, "0"))
        causal = window > 0 or '"mask_type": "CAUSAL"' in call.attributes
        phase = "bwd" if cudnn[1] else "fwd"
        return _gpu_flops(call, computation, phase, causal=causal, window=window)
    splash = _SPLASH.match(call.name)
    return 0 if splash is None else _splash_flops(call, computation, splash[1])


def _gpu_flops(
    call: Instruction, computation: Computation, phase: str, *, causal: bool, window: int
) -> int:
    """Returns a kernel's FLOPs for queries [B, T, N, H], keys [B, S, K, H], values [B, S, K, V].

    With a window of 0, attention is not limited to a window.
    """
    queries, keys, values = operands(call, computation)[:3]
    batch, num_queries, heads, key_dim = queries.shape
    num_keys, value_dim = keys.shape[1], values.shape[-1]
    num_pairs = num_queries * num_keys
    if causal:
        seen = min(window or num_keys, num_keys)
        # Query i sees i + 1 keys until the window is full, then `seen` keys.
        first = min(seen, num_queries)
        num_pairs = first * (first + 1) // 2 + (num_queries - first) * seen
    over_keys, over_values = MATMULS[phase]
    return 2 * batch * heads * num_pairs * (over_keys * key_dim + over_values * value_dim)


def _splash_flops(call: Instruction, computation: Computation, phase: str) -> int:
    arrays = [x.arrays[0] for x in operands(call, computation)]
    # The first three operands of a float type are queries [B, N, T, K], keys [B, N, S, K] and
    # values [B, N, S, H], without B for a single sequence. For an mqa kernel, queries have an
    # additional axis for the query heads that share a key head.
    queries, keys, values = [x.shape for x in arrays if x.dtype.startswith(("bf", "f"))][:3]
    *batch_and_heads, num_queries, key_dim = queries
    num_keys, value_dim = keys[-2], values[-1]
    num_pairs = math.prod(batch_and_heads) * num_queries * num_keys
    over_keys, over_values = MATMULS[phase]
    flops = 2 * num_pairs * (over_keys * key_dim + over_values * value_dim)
    # A causal mask adds one operand with two axes, which contains the positions of queries or of
    # keys. All other operands with two axes come in pairs: the segments of queries and of keys for
    # a single sequence, and the keys and values of a single sequence in an mqa kernel.
    is_causal = sum(len(x.shape) == 2 for x in arrays) % 2 == 1
    # The first operand is the block mask.
    return round(flops * _computed_fraction(arrays[0].shape)) if is_causal else flops


def _computed_fraction(block_mask: tuple[int, ...]) -> float:
    """Returns the fraction of all blocks that a causal or banded kernel computes.

    Args:
        block_mask: Shape [N, rows, columns] of the block mask. A row contains the diagonal block
          and the blocks before it. In a banded mask, the number of columns (or rows) is the width
          of the band.
    """
    # Row r of the attention matrix has r + 1 blocks, but at most the width of the band.
    _, *sides = block_mask
    width, num_rows = sorted(sides)
    return sum(min(row + 1, width) for row in range(num_rows)) / num_rows**2
