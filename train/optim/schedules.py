"""Learning-rate schedules, composed of optax's."""

import jax.numpy as jnp
import optax

from ...data.common.errors import UserError
from ...models.nn.typing import Array, ArrayLike
from ..optimizer_config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a linear warm-up from 0 to the peak, then the decay that `config.schedule` names.

    BERT's is linear with `final_fraction` 0: up for 10,000 of 1,000,000 steps,
    then down to 0. Here step i, counted from 1, has the rate of i, and so the
    first step has one and the last has none. (The original code counts from 0,
    and falls as if it had from the first step on: it begins its decay at
    1 - warm-up / steps, 0.99 of the peak.)

    Args:
        config: peak, warm-up and kind.
        steps: length of the run, the last step of linear and cosine decay.

    Raises:
        UserError: the warm-up is as long as the run, or inverse_sqrt has none.
    """
    peak, warmup = config.peak_learning_rate, config.warmup_steps
    if not 0 <= warmup < steps:
        raise UserError(f"optimizer.warmup_steps {warmup} must be at least 0 and below {steps}")
    # Without a warm-up the first step has the peak; with one, its last step has.
    decay_steps = max(steps - max(warmup, 1), 1)
    final = peak * config.final_fraction
    decays = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, config.final_fraction),
        "inverse_sqrt": lambda: _inverse_sqrt(peak, warmup),
    }
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
    # The first update would do nothing at a rate of 0: step i takes the rate of i + 1.
    schedule = optax.join_schedules([rise, decays[config.schedule]()], [warmup])
    return (lambda step: schedule(step + 1)) if warmup else schedule


def _inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """Returns a rate of peak · √(warmup / step) (Vaswani et al. 2017, section 5.3)."""
    if warmup < 1:
        raise UserError(
            "the inverse_sqrt schedule needs optimizer.warmup_steps of at least 1, and a run of at "
            "least 2 steps"
        )

    def schedule(steps_after_warmup: ArrayLike) -> Array:
        return peak * jnp.sqrt(warmup / (warmup + steps_after_warmup))

    return schedule
