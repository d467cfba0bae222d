"""The configuration of one reinforcement-learning update on a batch of sampled answers."""

import dataclasses

from ....data.common.fields import require
from ...config import TrainConfig
from ...objectives.online import OnlineConfig


def update_config(config: TrainConfig, objective: OnlineConfig) -> TrainConfig:
    """Returns `config` with the batch size of an update, where each update counts as a step.

    Raises:
        UserError: the number of answers per step is not a multiple of the number of mini-batches,
          or the run uses pmap.
    """
    rows, parts = config.batch_size * objective.num_generations, objective.num_mini_batches
    require(
        rows % (parts * config.micro_batches) == 0,
        f"the {rows} answers of a step are not divisible by objective.num_mini_batches {parts} "
        f"times micro_batches {config.micro_batches}: change one of them",
    )
    require(
        config.parallel == "jit",
        f"parallel must be jit for reinforcement learning, got {config.parallel}: leave it out",
    )
    # The optimizer counts updates, so convert numbers of steps to numbers of updates.
    updates = objective.num_iterations * parts
    warmup = config.optimizer.warmup_steps * updates
    stage = config.stage
    if stage is not None:
        stage = dataclasses.replace(stage, schedule_start=stage.schedule_start * updates)
    return dataclasses.replace(
        config,
        stage=stage,
        batch_size=rows // parts,
        steps=config.steps * updates,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup),
    )
