"""AdamW with decay on matrices only, composed of optax's parts."""

from typing import Any

import jax
import optax

from .config import OptimizerConfig
from .schedules import make_schedule

# Matrices by the name of the array: biases and the scales of norms do not decay.
DECAYED = ("kernel", "embedding")


def path_name(path: tuple[Any, ...]) -> str:
    """A parameter's place in the tree as `layers/attention/query/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def decay_mask(params: Any) -> Any:
    """`True` for each parameter that decays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).rsplit("/", 1)[-1] in DECAYED, params
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clips the gradient, then AdamW (Loshchilov & Hutter 2019, algorithm 2).

    Args:
      config: hyper-parameters.
      steps: length of the run, for the schedule.
    """
    clip = config.max_gradient_norm
    return optax.chain(
        optax.identity() if clip is None else optax.clip_by_global_norm(clip),
        optax.adamw(
            make_schedule(config, steps),
            config.beta1,
            config.beta2,
            config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
