"""Learning-rate schedules, composed of optax's."""

import jax.numpy as jnp
import optax

from ...data.common.fields import require
from ...models.nn.typing import Array, ArrayLike
from ..optimizer_config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a linear warm-up from 0 to the peak, followed by the decay `config.schedule`.

    BERT uses linear decay with `final_fraction` 0: 10,000 of 1,000,000 steps of warm-up, then decay
    to 0. Here step i, counted from 1, has the rate of i, so the first step has a positive rate and
    the last has rate 0. (The original code counts from 0 and decays from step 0 on, so its decay
    starts at 1 - warm-up / steps, 0.99 of the peak.)

    Args:
        config: peak, warm-up and kind.
        steps: length of the run, the last step of linear and cosine decay.

    Raises:
        UserError: the warm-up is not shorter than the run, or inverse_sqrt has no warm-up.
    """
    peak, warmup = config.peak_learning_rate, config.warmup_steps
    require(
        0 <= warmup < steps,
        f"optimizer.warmup_steps must be at least 0 and below {steps}, got {warmup}",
    )
    # The peak is at the last step of the warm-up, or without a warm-up at the first step.
    decay_steps = max(steps - max(warmup, 1), 1)
    final = peak * config.final_fraction
    decays = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, config.final_fraction),
        "inverse_sqrt": lambda: _inverse_sqrt(peak, warmup),
    }
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
    # optax counts from 0, and an update at rate 0 would do nothing, so shift by one.
    schedule = optax.join_schedules([rise, decays[config.schedule]()], [warmup])
    return (lambda step: schedule(step + 1)) if warmup else schedule


def _inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """Returns a rate of peak · √(warmup / step) (Vaswani et al. 2017, section 5.3)."""
    require(
        warmup >= 1,
        "the inverse_sqrt schedule needs optimizer.warmup_steps of at least 1, and a run of at "
        "least 2 steps",
    )

    def schedule(steps_after_warmup: ArrayLike) -> Array:
        return peak * jnp.sqrt(warmup / (warmup + steps_after_warmup))

    return schedule
