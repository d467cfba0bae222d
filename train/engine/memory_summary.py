"""The size of a step on each device, before it is compiled."""

import math

import jax

from ...models.nn.typing import PyTree
from ..config import TrainConfig
from ..distributed.optimizer_offload import HOST
from ..state import TrainState


def memory_summary(config: TrainConfig, shapes: TrainState, num_shards: int, attention: str) -> str:
    """Describes in a line how large a step is, and each device's part of it.

    Args:
      config: the run.
      shapes: the state, as shapes with shardings.
      num_shards: the number of devices that a batch is divided over.
      attention: what computes it, for the line.
    """
    rows, length = config.batch_size, config.data.length
    own = rows // num_shards // config.micro_batches
    at_once = f"{own} at once" if config.micro_batches > 1 else "at once"
    params, optimizer, frozen = (
        bytes_per_device(x) for x in (shapes.params, shapes.opt_state, shapes.frozen)
    )
    host = bytes_per_device(shapes.opt_state, HOST)
    reference = f", {frozen / 1e6:,.1f} MB of frozen parameters" if frozen else ""
    beside = f" (and {host / 1e6:,.1f} MB in its host's memory)" if host else ""
    return (
        f"a step: {rows:,} rows of {length:,} tokens, {rows * length:,} tokens; each device has "
        f"{rows // num_shards:,} rows, {at_once}, {params / 1e6:,.1f} MB of parameters{reference} "
        f"and {optimizer / 1e6:,.1f} MB of optimizer state{beside}; {attention}"
    )


def bytes_per_device(shapes: PyTree, memory: str | None = None) -> int:
    """Returns the bytes that some arrays take on each device.

    Args:
      shapes: the arrays, as shapes with shardings.
      memory: another memory that the devices reach, `optimizer_offload.HOST`.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
        if (x.sharding.memory_kind == HOST) == (memory == HOST)
    )
