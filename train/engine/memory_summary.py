"""What a step is for each device, in words, before it is compiled."""

import math
from typing import Any

import jax

from ..config import TrainConfig
from ..distributed.optimizer_offload import HOST
from ..state import TrainState


def footprint(config: TrainConfig, shapes: TrainState, num_parts: int, attention: str) -> str:
    """Says how large a step is, and what of it each device has.

    Args:
      config: of the run.
      shapes: of the state, each with its sharding.
      num_parts: how many devices have rows of their own.
      attention: what computes it, in words.
    """
    rows, length = config.batch_size, config.data.length
    own = rows // num_parts // config.micro_batches
    at_once = f"{own} at once" if config.micro_batches > 1 else "at once"
    params, optimizer = (bytes_per_device(x) for x in (shapes.params, shapes.opt_state))
    host = bytes_per_device(shapes.opt_state, HOST)
    beside = f" (and {host / 1e6:,.1f} MB in its host's memory)" if host else ""
    return (
        f"a step: {rows:,} rows of {length:,} tokens, {rows * length:,} tokens; each device has "
        f"{rows // num_parts:,} rows, {at_once}, {params / 1e6:,.1f} MB of parameters and "
        f"{optimizer / 1e6:,.1f} MB of optimizer state{beside}; {attention}"
    )


def bytes_per_device(shapes: Any, memory: str | None = None) -> int:
    """How much of some arrays, given by shape and sharding, lies on each device.

    Args:
      shapes: of the arrays.
      memory: another memory that the devices reach, `offload.HOST`.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
        if (x.sharding.memory_kind == HOST) == (memory == HOST)
    )
