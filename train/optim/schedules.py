"""Learning-rate schedules, composed of optax's schedules."""

import jax.numpy as jnp
import optax

from ...data.common.fields import require
from ...models.nn.typing import Array, ArrayLike
from ..optimizer_config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int, start: int = 0) -> optax.Schedule:
    """Returns a linear warm-up from 0 to the peak, followed by the decay `config.schedule`.

    BERT uses linear decay with `final_fraction` 0. The first 10,000 of its 1,000,000 steps are
    warm-up, and then the rate decays to 0. In this module, steps are counted from 1, so the first
    step has a positive rate and the last step has the rate 0. (The original code counts from 0 and
    also decays during the warm-up, so after the warm-up its rate is 1 - warm-up / steps = 0.99 of
    the peak.)

    Warm-up-stable-decay (`wsd`) keeps the peak until the last `decay_fraction` of the run, then
    decays linearly (Hu et al. 2024, section 4; Hägele et al. 2024, section 3, with their linear
    cooldown).

    Args:
        config: the hyperparameters. Only the settings of the learning rate are used.
        steps: the number of steps of the run. At this step the decay of linear, cosine and wsd
          ends.
        start: the number of steps that precede the schedule, as in the last stage of an extended
            run. Without a warm-up, the rate is at its peak at step `start`. A run with a constant
            rate that is followed by a stage with a linear decay then has the same rates as wsd.

    Raises:
        UserError: the warm-up is not shorter than the run, or inverse_sqrt has no warm-up.
    """
    # Make a schedule for the remaining steps, and delay it.
    if start:
        before = start - (config.warmup_steps == 0)
        first_phase = make_schedule(config, steps - before)
        return lambda step: first_phase(jnp.maximum(step - before, 0))
    peak, warmup = config.peak_learning_rate, config.warmup_steps
    problem = f"optimizer.warmup_steps must be at least 0 and below {steps}, got {warmup}"
    require(0 <= warmup < steps, problem)
    # The rate reaches its peak at the last step of the warm-up or, without a warm-up, at the first
    # step.
    decay_steps = max(steps - max(warmup, 1), 1)
    final = peak * config.final_fraction
    decays = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, config.final_fraction),
        "inverse_sqrt": lambda: _inverse_sqrt(peak, warmup),
        "wsd": lambda: _stable_decay(config, decay_steps, round(config.decay_fraction * steps)),
    }
    rise = optax.linear_schedule(0.0, peak, max(warmup, 1))
    # optax counts steps from 0. At step 0 the rate is 0 and an update would have no effect, so
    # count from 1.
    schedule = optax.join_schedules([rise, decays[config.schedule]()], [warmup])
    return (lambda step: schedule(step + 1)) if warmup else schedule


def _stable_decay(config: OptimizerConfig, steps: int, decay: int) -> optax.Schedule:
    """Returns the peak for `steps - decay` steps, followed by a linear decay of `decay` steps."""
    peak, decay = config.peak_learning_rate, min(decay, steps)
    stable = optax.constant_schedule(peak)
    falls = optax.linear_schedule(peak, peak * config.final_fraction, decay)
    return optax.join_schedules([stable, falls], [steps - decay])


def _inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """Returns the schedule peak · √(warmup / step) (Vaswani et al. 2017, section 5.3)."""
    require(
        warmup >= 1,
        "the inverse_sqrt schedule needs optimizer.warmup_steps of at least 1, and a run of at "
        "least 2 steps",
    )

    def schedule(steps_after_warmup: ArrayLike) -> Array:
        return peak * jnp.sqrt(warmup / (warmup + steps_after_warmup))

    return schedule
