"""Low-precision moments: bfloat16 with stochastic rounding, and block-wise 8-bit codes.

Each step converts a moment to float32, updates it, and rounds it at random to one of the two
nearest representable numbers, so that the rounding has no bias. Rounding to nearest would lose
small changes: with beta2 0.999, a second moment changes by about a thousandth per step, and the 8
significant bits of bfloat16 cannot represent such a change.

**8 bits** (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"): a moment is
divided into blocks of 64 to 127 numbers along its last axis (32 to 256 for some sizes). Each block
has a float32 scale, which is its largest absolute value, and each number has an 8-bit code. The
paper uses a table of codes that is dense near zero; this module uses a fourth power instead. Code k
of a first moment, from -127 to 127, represents the fraction sign(k) · (|k| / 127)⁴ of the scale.
Code k of a second moment, from 0 to 255, represents the fraction ((k + 1) / 256)⁴. No code of a
second moment represents zero, because updates are divided by the square root of the moment. Codes
have the shape of the parameter and are sharded with it. A last axis of 64 · 2ⁿ numbers has 2ⁿ
blocks, so it can be divided into up to 2ⁿ shards of whole blocks. The moments of vectors, of small
parameters, and of parameters whose last axis cannot be divided into such blocks stay in float32.

The random bits depend only on the optimizer's step count, the parameter's name and the index of the
number, so they are the same on any number of devices and in a resumed run.
"""

import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...models.nn.typing import Array, Float, PyTree
from ..optimizer_config import StateDtype
from .parameters import Leaf, is_decayed, map_named

SEED = 0x5EED
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 256
SPLIT_ABOVE = 128
"""Blocks of at least this size are halved if possible."""
SMALLEST_QUANTIZED = 4096
"""Moments of smaller arrays stay in float32 (Dettmers et al. 2022, section 2)."""

MOMENTS = ("mu", "ema", "nu")
SECOND_MOMENT = "nu"


class Blocks(NamedTuple):
    """A moment in 8 bits."""

    codes: Array
    """A code for each number of the parameter: int8 for a first moment, uint8 for a second
    moment."""
    scales: Array
    """The largest absolute value of each block, float32[…, blocks]."""


def store_moments(
    tx: optax.GradientTransformation, dtype: StateDtype
) -> optax.GradientTransformation:
    """Makes an optimizer store its moments in `dtype` between steps.

    Args:
        tx: an optimizer whose state is a NamedTuple with the step `count` and the moments `mu`,
          `nu` or `ema`, which are trees with the parameters' shapes.
        dtype: "bfloat16_stochastic" or "int8"; with other dtypes, returns the optimizer unchanged.

    Returns:
        The new optimizer. In its state, each 8-bit moment is a `Blocks`.
    """
    if dtype not in ("bfloat16_stochastic", "int8"):
        return tx

    def store(state: PyTree) -> PyTree:
        key = jax.random.fold_in(jax.random.key(SEED, impl="threefry2x32"), state.count)

        def moment(name: str, x: Array, kind: str) -> Array | Blocks:
            # Draw 32 random bits for each number of a parameter, and use 16 of them for each of the
            # two moments.
            own = jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))
            bits, x = jax.random.bits(own, x.shape, jnp.uint32), x.astype(jnp.float32)
            bits = bits & 0xFFFF if kind == SECOND_MOMENT else bits >> 16
            if dtype == "bfloat16_stochastic":
                return round_stochastically(x, bits)
            return quantize(x, bits, signed=kind != SECOND_MOMENT) if is_quantized(name, x) else x

        return _with_moments(
            state, lambda kind, tree: map_named(functools.partial(moment, kind=kind), tree)
        )

    def read(state: PyTree) -> PyTree:
        def moment(x: Array | Blocks) -> Array:
            return dequantize(x) if isinstance(x, Blocks) else x.astype(jnp.float32)

        return _with_moments(
            state,
            lambda _, tree: jax.tree.map(moment, tree, is_leaf=lambda x: isinstance(x, Blocks)),
        )

    def init(params: PyTree) -> PyTree:
        state: PyTree = tx.init(params)
        # Make the zeros from shapes, because quantizing constant zeros would take long to compile.
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(store, state))
        return _with_moments(state, lambda kind, _: getattr(zeros, kind))

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        updates, state = tx.update(updates, read(state), params)
        return updates, store(state)

    return optax.GradientTransformation(init, update)


def _with_moments(state: PyTree, convert: Callable[[str, PyTree], PyTree]) -> PyTree:
    """Replaces each moment in the state of an optimizer by `convert(kind, moment)`."""
    own = state._asdict()
    return state._replace(**{kind: convert(kind, own[kind]) for kind in MOMENTS if kind in own})


def is_quantized(name: str, param: Leaf) -> bool:
    """Returns whether a parameter's moments are stored in 8 bits if the dtype is "int8"."""
    if not is_decayed(name) or param.size < SMALLEST_QUANTIZED:
        return False
    block = param.shape[-1] // num_blocks(param.shape[-1])
    return SMALLEST_BLOCK <= block <= LARGEST_BLOCK


def num_blocks(size: int) -> int:
    """Returns the number of blocks along a last axis, which is a power of 2; see `SPLIT_ABOVE`."""
    blocks = 1
    while size % (2 * blocks) == 0 and size // blocks >= SPLIT_ABOVE:
        blocks *= 2
    return blocks


def quantize(x: Float[Array, "*rows last"], bits: Array, *, signed: bool) -> Blocks:
    """Rounds each number at random to one of the two codes nearest to it.

    Args:
        x: the numbers, which must not be negative unless `signed`.
        bits: uint32 of the same shape, uniform in [0, 2¹⁶).
        signed: whether the codes have a sign and a code for zero, as for a first moment.
    """
    # [..., last] to [..., blocks, numbers of a block].
    parts = x.reshape(*x.shape[:-1], num_blocks(x.shape[-1]), -1)
    size = jnp.abs(parts)
    scales = jnp.max(size, -1)
    share = size / jnp.where(scales > 0, scales, 1)[..., None]  # in [0, 1]
    # A code represents a fourth power, so take the fourth root to find the code.
    root = jnp.sqrt(jnp.sqrt(share))
    below = jnp.clip(jnp.floor(root * 127), 0, 126) if signed else _below_without_zero(root)
    low, high = (_share(k, signed=signed) for k in (below, below + 1))
    # A number below the smallest code of a second moment becomes the smallest code, because updates
    # are divided by the square root of the moment.
    up = bits.reshape(parts.shape) < jnp.round((share - low) / (high - low) * 2**16)
    codes = below + up
    if signed:
        codes = jnp.where(parts < 0, -codes, codes)
    return Blocks(codes.reshape(x.shape).astype(jnp.int8 if signed else jnp.uint8), scales)


def dequantize(moment: Blocks) -> Float[Array, "..."]:
    """Returns the numbers that codes represent, as float32."""
    codes, scales = moment
    signed = codes.dtype == jnp.int8
    # [..., last] to [..., blocks, numbers of a block], as in `quantize`.
    parts = codes.astype(jnp.float32).reshape(*scales.shape, -1)
    return (_share(parts, signed=signed) * scales[..., None]).reshape(codes.shape)


def _below_without_zero(root: Array) -> Array:
    return jnp.clip(jnp.floor(root * 256) - 1, 0, 254)


def _share(codes: Array, *, signed: bool) -> Array:
    """Returns the fraction of the scale that each code represents."""
    if not signed:
        return jnp.square(jnp.square((codes + 1) / 256))
    return jnp.sign(codes) * jnp.square(jnp.square(codes / 127))


def round_stochastically(x: Float[Array, "*shape"], bits: Array) -> Float[Array, "*shape"]:
    """Rounds float32 to bfloat16, up or down at random, without bias.

    Args:
        x: the numbers.
        bits: uint32 of the same shape, uniform in [0, 2¹⁶).
    """
    # Add random bits to the lower 16 bits. The probability of a carry into the upper 16 bits is the
    # probability of rounding up.
    words = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((words + bits) & np.uint32(0xFFFF0000), jnp.float32)
    # Leave infinity and NaN as they are, because the addition could change them.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
