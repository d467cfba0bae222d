"""Rotary positions: queries and keys are rotated by angles proportional to their positions.

Su et al. 2021, "RoFormer", section 3.2.2. `models.rotary_scaling` defines the scalings.
"""

import math

import jax.numpy as jnp
import numpy as np
from flax import struct

from ..rotary_scaling import RotaryScaling
from .masks import AnyArray
from .typing import Array, Float, Int


@struct.dataclass
class Rotary:
    """Rotations of queries and keys by their positions, the same for every head.

    If R < H, only the first R dimensions of a head are rotated.
    """

    cos: Float[Array, "#B T R"]
    sin: Float[Array, "#B T R"]
    interleaved: bool = struct.field(pytree_node=False, default=False)
    """Whether each rotation plane consists of two neighboring dimensions (GPT-J)."""

    def identity(self) -> "Rotary":
        """Returns rotations by the angle 0, as arrays of the same shape."""
        return Rotary(jnp.ones_like(self.cos), jnp.zeros_like(self.sin), self.interleaved)

    def rotate(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Rotates each plane of dimensions (i, i + R/2), or (2i, 2i + 1), by its angle."""
        size = self.cos.shape[-1]
        part = x[..., :size].astype(jnp.float32)
        if self.interleaved:
            # […, R] to […, R / 2, 2]; (a, b) rotated by 90 degrees is (-b, a).
            pairs = part.reshape(*part.shape[:-1], -1, 2)
            turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(part.shape)
        else:
            first, second = jnp.split(part, 2, axis=-1)
            turned = jnp.concatenate([-second, first], axis=-1)  # rotated by 90 degrees
        # [B, T, R] to [B, T, 1, R]: all heads are rotated by the same angles.
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        rotated = (part * cos + turned * sin).astype(x.dtype)
        return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], -1)


def rotary_positions(
    position_ids: Int[AnyArray, "#B #T"],
    size: int,
    base: float = 10_000.0,
    *,
    scaling: RotaryScaling | None = None,
    max_length: int = 0,
    interleaved: bool = False,
) -> Rotary:
    """Returns the rotation for each position (Su et al. 2021, section 3.2.2).

    At position p, the plane (i, i + R/2) is rotated by the angle p / base^(2i/R). The paper pairs
    the dimensions (2i, 2i + 1). GPT-NeoX and every published Llama in the Hugging Face format use
    the planes (i, i + R/2). The two ways to pair dimensions differ only by a permutation of the
    dimensions of queries and keys.

    Args:
      position_ids: the position of each token.
      size: R, the number of rotated dimensions of a head. If R is odd, R + 1 dimensions are
        rotated, as in transformers, and the exponents of the wavelengths are 2i/R.
      base: the base of the wavelengths.
      scaling: the scaling of the frequencies.
      max_length: the maximum sequence length, for scalings that depend on it.
      interleaved: whether planes are (2i, 2i + 1), as in the paper and in GPT-J.
    """
    frequency = rotary_frequencies(
        position_ids, size, base, scaling=scaling, max_length=max_length
    )  # [R/2] or [B, 1, R/2]
    angle = jnp.asarray(position_ids, jnp.float32)[..., None] * frequency
    # Both dimensions of a plane turn by the same angle: [B, T, R / 2] to [B, T, R].
    if interleaved:
        angle = jnp.repeat(angle, 2, axis=-1)  # [B, T, R]
    else:
        angle = jnp.concatenate([angle, angle], axis=-1)
    amplitude = 1.0 if scaling is None else scaling.amplitude(max_length)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if amplitude != 1:
        cos, sin = cos * amplitude, sin * amplitude
    return Rotary(cos, sin, interleaved)


def rotary_frequencies(
    position_ids: Int[AnyArray, "#B #T"],
    size: int,
    base: float,
    *,
    scaling: RotaryScaling | None,
    max_length: int,
) -> Float[Array, "*rest F"]:
    """Returns each plane's angle per position: `[R/2]`, or `[B, 1, R/2]` if the rows differ.

    Some scalings depend on the length of a text. In LongRoPE, for example, texts within the trained
    length use the "short" factors. The length of a row is its last position plus 1, so that the
    result for a row depends neither on padding nor on the other rows of a batch. transformers
    instead uses the last position of the whole batch for all rows. Padding counts as well, unless
    the caller's `position_ids` leave it out.
    """
    # Divide in float32, as transformers does, because rounding differences grow with the position.
    exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequency = 1.0 / jnp.float32(base) ** exponent
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.growth(max_length)
    if scaling.kind == "llama3":
        return _llama3(frequency, scaling, max_length)
    if scaling.kind == "yarn":
        return _yarn(frequency, scaling, base, max_length)
    # The remaining kinds (longrope, dynamic) depend on the length of each row.
    length = jnp.max(jnp.asarray(position_ids), axis=-1)[:, None, None] + 1  # [B, 1, 1]
    if scaling.kind == "longrope":
        is_long = length > scaling.trained_length(max_length)
        factors = (
            jnp.asarray(x, jnp.float32) for x in (scaling.long_factors, scaling.short_factors)
        )
        long, short = (1.0 / (x * jnp.float32(base) ** exponent) for x in factors)
        return jnp.where(is_long, long, short)
    # dynamic: the base grows once a row exceeds the trained length.
    trained, factor = scaling.trained_length(max_length), scaling.growth(max_length)
    length = jnp.maximum(length, trained).astype(jnp.float32)
    growth = factor * length / trained - (factor - 1)
    return 1.0 / (base * growth ** (size / (size - 2))) ** exponent


def _llama3(
    frequency: Float[Array, " F"], scaling: RotaryScaling, max_length: int
) -> Float[Array, " F"]:
    factor = scaling.growth(max_length)
    # Count the turns of each plane over the trained length. Planes with few turns get scaled
    # frequencies, planes with many turns keep their frequencies, and planes in between get
    # interpolated frequencies.
    turns = scaling.trained_length(max_length) * frequency / (2 * math.pi)
    low, high = scaling.low_frequency, scaling.high_frequency
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    return jnp.where(turns < low, frequency / factor, jnp.where(turns > high, frequency, between))


def _yarn(
    frequency: Float[Array, " F"], scaling: RotaryScaling, base: float, max_length: int
) -> Float[Array, " F"]:
    original, size = scaling.trained_length(max_length), 2 * frequency.size
    factor = scaling.growth(max_length)

    def dimension(turns: float) -> float:
        """Returns the dimension whose plane makes `turns` turns over the trained length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    # Planes before `first` keep their frequency. The frequency of planes after `last` is divided by
    # the factor.
    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    # Avoid a division by zero, as transformers does.
    last = last if last != first else last + 0.001
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - first) / (last - first), 0, 1)
    return frequency / factor * ramp + frequency * (1 - ramp)
