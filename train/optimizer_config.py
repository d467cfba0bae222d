"""The hyper-parameters of the optimizer; its fields are the command line's flags."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) and its learning-rate schedule."""

    peak_learning_rate: float
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0 to its peak."""
    final_fraction: float = 0.1
    """Learning rate of the last step over its peak (linear and cosine)."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices only: neither to biases nor to the scales of norms."""
    max_gradient_norm: float | None = 1.0
    """Gradients longer than this (global norm) are scaled down to it."""

    def __post_init__(self) -> None:
        for name in ("peak_learning_rate", "epsilon", "max_gradient_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optimizer.{name} {value} must be above 0 and finite")
        for name in ("weight_decay", "final_fraction"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} {getattr(self, name)} must be at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} {getattr(self, name)} must be in [0, 1)")
