"""The configuration of an update of reinforcement learning, whose batch is sampled answers."""

import dataclasses

from ...data.chat.policy import PolicyData
from ...data.common.errors import RunError
from ...data.dataset import ArraySpec, BatchSpec, Values
from ..config import TrainConfig


def update_config(config: TrainConfig, data: PolicyData) -> TrainConfig:
    """Returns the configuration of an update: its batch of answers, and the number of updates.

    Raises:
        RunError: the answers of a step are not a multiple of the mini-batches, or the run is to
          use pmap.
    """
    rollout, filled = data.rollout, data.rollout.filled()
    rows, parts = config.batch_size * filled.num_generations, rollout.num_mini_batches
    if rows % (parts * config.micro_batches):
        raise RunError(
            f"the {rows} answers of a step do not divide into data.rollout.num_mini_batches "
            f"{parts} of micro_batches {config.micro_batches}: change one of them"
        )
    if config.parallel == "pmap":
        raise RunError("reinforcement learning needs parallel jit, not pmap: leave it out")
    updates = filled.num_iterations * parts
    warmup = config.optimizer.warmup_steps * updates
    return dataclasses.replace(
        config,
        batch_size=rows // parts,
        steps=config.steps * updates,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup),
    )


def update_spec(data: PolicyData) -> BatchSpec:
    """Returns the arrays of a row of an update, as `objectives.policy` and `.ppo` state them."""
    row, number = (data.length,), ArraySpec((), Values.LABEL, "float32")
    tokens, mask = ArraySpec(row, Values.TARGET_TOKEN), ArraySpec(row, Values.MASK)
    each = ArraySpec(row, Values.LABEL, "float32")
    rollout = data.rollout
    arrays = {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": mask,
        "loss_mask": mask,
        "advantages": number,
    }
    if rollout.algorithm == "ppo":
        names = ("advantages", "returns", "old_log_probs", "old_values")
        return {**arrays, **dict.fromkeys(names, each), "value_mask": mask}
    if rollout.updates_several:
        arrays["old_log_probs"] = each
    if rollout.algorithm == "grpo" and rollout.filled().beta:
        arrays["reference_log_probs"] = each
    return arrays
