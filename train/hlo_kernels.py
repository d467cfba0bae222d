"""Work of the kernels that a compiled program calls, of which no product is in sight."""

from .hlo_program import Computation, Instruction

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
    shapes = [computation[name].arrays[0].shape for name in instruction.operands]
    (rows, heads, num_queries, key_dim), (*_, num_keys, _), (*_, head_dim) = [
        shape for shape in shapes if len(shape) == 4
    ][:3]
    pairs = rows * heads * num_queries * num_keys
    over_keys, over_values = products
    done = 2 * pairs * (over_keys * key_dim + over_values * head_dim)
    # Beside a mask of blocks, which comes first, stand the queries' places if keys behind them
    # are hidden.
    hidden = any(len(shape) == 2 for shape in shapes)
    return round(done * _computed(shapes[0])) if hidden else done


def _computed(blocks: tuple[int, ...]) -> float:
    """The part of all blocks that is computed, where a query sees what came before it.

    Args:
      blocks: how many stand along each axis; of a band those along one are only as many as it
        is wide.
    """
    _, *sides = blocks
    width, number = sorted(sides)
    return sum(min(row + 1, width) for row in range(number)) / number**2
