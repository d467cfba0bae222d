"""Scaling of rotary frequencies for sequences longer than the training sequences.

- linear: Chen et al. 2023, "Extending context window of large language models via positional
  interpolation".
- dynamic: a base that grows with the sequence length ("NTK-aware" scaling, first described in
  forums).
- yarn: Peng et al. 2023, "YaRN: efficient context window extension of large language models".
- longrope: Ding et al. 2024, "LongRoPE: extending LLM context window beyond 2 million tokens".
- llama3: the published code of Llama 3.1 (Grattafiori et al. 2024).
"""

import dataclasses
import math
from typing import Literal

from ..data.common.fields import Checked, Positive, PositiveInt, require, require_default

ScalingKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]

_READ_BY: dict[str, tuple[ScalingKind, ...]] = {
    "low_frequency": ("llama3",),
    "high_frequency": ("llama3",),
    "attention_factor": ("yarn", "longrope"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "truncate": ("yarn",),
    "short_factors": ("longrope",),
    "long_factors": ("longrope",),
}
"""For each field, the kinds of scaling that use it. A field that is not listed is valid for every
kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling(Checked):
    """Settings that scale rotary frequencies for inputs longer than the training sequences.

    Raises:
      UserError: A field is missing, out of range, or belongs to a different kind of scaling.
    """

    kind: ScalingKind
    """linear: all frequencies are divided. dynamic: the base grows with the sequence length.
    llama3: low frequencies are divided, and high frequencies are unchanged. yarn: low frequencies
    are divided, with a linear ramp over the dimensions between low and high frequencies. longrope:
    each frequency has one divisor for short sequences and one for long sequences.
    """
    factor: Positive | None = None
    """The maximum sequence length divided by the trained length. For yarn and longrope, defaults to
    `max_length` / `original_length`.
    """
    original_length: PositiveInt | None = None
    """The trained length, in tokens. For dynamic, it defaults to `max_length`."""
    low_frequency: float = 1.0
    """llama3: frequencies that make fewer than `low_frequency` turns within `original_length`
    tokens are divided by `factor`.
    """
    high_frequency: float = 4.0
    """llama3: frequencies that make more than `high_frequency` turns within `original_length`
    tokens are unchanged."""
    attention_factor: float | None = None
    """The factor that multiplies sines and cosines. Its default is computed from `factor`."""
    beta_fast: float = 32.0
    """yarn: frequencies that make at least `beta_fast` turns within `original_length` tokens are
    unchanged."""
    beta_slow: float = 1.0
    """yarn: frequencies that make at most `beta_slow` turns within `original_length` tokens are
    divided by `factor`."""
    mscale: float | None = None
    """yarn: `mscale` and `mscale_all_dim` determine the default of `attention_factor`."""
    mscale_all_dim: float | None = None
    """yarn: see `mscale`."""
    truncate: bool = True
    """yarn: whether the ramp begins and ends at whole dimensions."""
    short_factors: tuple[float, ...] | None = None
    """longrope: the divisor of each frequency, for sequences of at most `original_length`."""
    long_factors: tuple[float, ...] | None = None
    """longrope: the divisor of each frequency, for longer sequences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A field that the chosen kind of scaling does not use has no effect, so it must have its
        # default.
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds:
                belongs = f"requires the kind {' or '.join(kinds)}, got {self.kind}"
                require_default(self, [name], belongs)
        needed = {
            "linear": ("factor",),
            "dynamic": ("factor",),
            "llama3": ("factor", "original_length"),
            "yarn": ("original_length",),
            "longrope": ("original_length", "short_factors", "long_factors"),
        }[self.kind]
        for name in needed:
            problem = f"rope_scaling of the kind {self.kind} requires {name}: give it"
            require(getattr(self, name) is not None, problem)

    def check_factors(self, rotated_dim: int) -> None:
        """Checks that each frequency of the rotated dimensions has a short and a long factor.

        Raises:
          UserError: The number of factors is wrong.
        """
        number = (rotated_dim + 1) // 2
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            require(
                factors is None or len(factors) == number,
                f"rope_scaling {name} has {len(factors or ())} numbers for {rotated_dim} "
                f"rotated dimensions: give {number}",
            )

    def of_length(self, max_length: int) -> "RotaryScaling":
        """Returns the same scaling, with the defaults that depend on `max_length` made explicit."""
        if self.kind == "dynamic":
            return dataclasses.replace(self, original_length=self.trained_length(max_length))
        if self.kind in ("yarn", "longrope"):
            return dataclasses.replace(self, factor=self.growth(max_length))
        return self

    def trained_length(self, max_length: int) -> int:
        """Returns the trained length, in tokens."""
        return self.original_length or max_length

    def growth(self, max_length: int) -> float:
        """Returns the maximum sequence length divided by the trained length."""
        return self.factor or max_length / self.trained_length(max_length)

    def amplitude(self, max_length: int) -> float:
        """Returns the factor of sines and cosines. Its square multiplies the attention scores."""
        if self.kind not in ("yarn", "longrope") or self.attention_factor is not None:
            return self.attention_factor or 1.0
        factor = self.growth(max_length)
        # If sequences are not longer than the training sequences, no correction is needed.
        if factor <= 1:
            return 1.0
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(self.trained_length(max_length)))
        if self.mscale and self.mscale_all_dim:
            grown = (0.1 * m * math.log(factor) + 1 for m in (self.mscale, self.mscale_all_dim))
            return next(grown) / next(grown)
        return 0.1 * math.log(factor) + 1
