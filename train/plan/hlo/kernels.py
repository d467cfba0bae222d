"""The FLOPs of custom attention kernels, whose matmuls the compiled program does not show."""

import math
import re

from .parser import Computation, Instruction

MATMULS = {
    "fwd": (1, 1),  # Q Kᵀ; weights · V
    "dq": (2, 1),  # Q Kᵀ again and dQ; dO Vᵀ
    "dkv": (2, 2),  # Q Kᵀ again and dK; dO Vᵀ and dV
}
"""Matmuls in each phase of splash attention: over the size of a key, and over that of a value."""
PREFIXES = {f"splash_{heads}_{phase}": phase for heads in ("mha", "mqa") for phase in MATMULS}
"""Phase by the prefix of a kernel's name; in an mqa kernel all query heads share one key head."""
OWN = re.compile(r"(^|_)flash_(fwd|bwd)")
"""In the names of our own kernels, which state the FLOPs of the blocks that they compute."""
_STATED = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


def kernel_flops(call: Instruction, computation: Computation) -> int:
    """Returns the FLOPs of the blocks that a kernel computes; 0 for an unknown kernel."""
    if OWN.search(call.name):
        stated = _STATED.search(call.attributes)
        return 0 if stated is None else int(stated[1])
    phase = next((p for prefix, p in PREFIXES.items() if call.name.startswith(prefix)), None)
    if phase is None:
        return 0
    arrays = [computation[name].arrays[0] for name in call.operands]
    # The first three operands of a float type are queries [B, N, T, K], keys [B, N, S, K] and
    # values [B, N, S, H], without B for a single sequence. For an mqa kernel queries have one more
    # axis, the query heads that share a key head.
    queries, keys, values = [x.shape for x in arrays if x.dtype.startswith(("bf", "f"))][:3]
    *batch_and_heads, num_queries, key_dim = queries
    num_keys, value_dim = keys[-2], values[-1]
    num_pairs = math.prod(batch_and_heads) * num_queries * num_keys
    over_keys, over_values = MATMULS[phase]
    flops = 2 * num_pairs * (over_keys * key_dim + over_values * value_dim)
    # A causal mask adds one operand with two axes, the positions of queries or of keys. All other
    # operands with two axes come in pairs: the segments of queries and keys for a single sequence,
    # and its keys and values in an mqa kernel.
    is_causal = sum(len(x.shape) == 2 for x in arrays) % 2 == 1
    # The first operand is the mask of blocks.
    return round(flops * _computed_fraction(arrays[0].shape)) if is_causal else flops


def _computed_fraction(block_mask: tuple[int, ...]) -> float:
    """Returns the fraction of all blocks that a causal or banded kernel computes.

    Args:
        block_mask: Shape [N, rows, columns] of the mask of blocks. A row has the diagonal block and
          the blocks before it; the columns (or rows) of a banded mask number only the band's width.
    """
    _, *sides = block_mask
    width, num_rows = sorted(sides)
    return sum(min(row + 1, width) for row in range(num_rows)) / num_rows**2
