"""What a training step takes and gives back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ..models.nn.typing import Array, Key


@struct.dataclass
class TrainState:
    """Everything that changes from step to step: its arrays, or their shapes or shardings."""

    step: Any
    """How many steps were taken, int32[]."""
    params: Any
    opt_state: Any


Metrics = dict[str, Array]
StepFn = Callable[[TrainState, dict[str, Array], Key[Array, ""]], tuple[TrainState, Metrics]]


def init_state(params: Any, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def count_parameters(params: Any) -> int:
    """How many numbers `params` (arrays or their shapes) hold."""
    return sum(x.size for x in jax.tree.leaves(params))
