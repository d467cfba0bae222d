"""Work of the kernels that a compiled program calls, of which no product is in sight."""

import math

from .parser import Computation, Instruction

PRODUCTS = {
    "splash_mha_fwd": (1, 1),  # Q Kᵀ; its weights with V
    "splash_mha_dq": (2, 1),  # Q Kᵀ again, dQ; dO Vᵀ
    "splash_mha_dkv": (2, 2),  # Q Kᵀ again, dK; dO Vᵀ, dV
}
"""Products of a kernel, by the beginning of its name: over the size of a key, and of a value."""


def kernel_flops(instruction: Instruction, computation: Computation) -> int:
    """2 · m · n · k of the products in a call of a kernel, in those blocks that it computes."""
    products = next((p for name, p in PRODUCTS.items() if instruction.name.startswith(name)), None)
    if products is None:
        return 0
    arrays = [computation[name].arrays[0] for name in instruction.operands]
    # Queries, keys and values stand before other numbers; of one row alone they have no axis of
    # rows.
    (*rows_and_heads, num_queries, key_dim), (*_, num_keys, _), (*_, head_dim) = [
        x.shape for x in arrays if x.dtype.startswith(("bf", "f"))
    ][:3]
    pairs = math.prod(rows_and_heads) * num_queries * num_keys
    over_keys, over_values = products
    done = 2 * pairs * (over_keys * key_dim + over_values * head_dim)
    # Beside a mask of blocks, which comes first, stand the places of queries or keys if keys
    # behind a query are hidden; of one row alone both sides' segments have two axes as well.
    hidden = sum(len(x.shape) == 2 for x in arrays) % 2 == 1
    return round(done * _computed(arrays[0].shape)) if hidden else done


def _computed(blocks: tuple[int, ...]) -> float:
    """The part of all blocks that is computed, where a query sees what came before it.

    Args:
      blocks: how many stand along each axis; of a band those along one are only as many as it
        is wide.
    """
    _, *sides = blocks
    width, number = sorted(sides)
    return sum(min(row + 1, width) for row in range(number)) / number**2
