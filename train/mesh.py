"""The configuration of the device mesh, and options for how a train step uses the mesh."""

import dataclasses
from typing import Annotated, Literal

from ..data.common.fields import Checked, Range

Parallel = Literal["jit", "pmap"]
"""jit: supports any mesh. pmap: data parallelism over the devices of one process."""
Gather = Literal["auto", "step", "layer"]
"""Determines when parameters that are sharded over `fsdp` are all-gathered; see `TrainConfig`."""

Devices = Annotated[int, Range(least=-1)]
"""A number of devices; -1: all remaining devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Checked):
    """Number of devices along each axis of the mesh; -1 takes all remaining devices."""

    data: Devices = -1
    """Number of copies of the model. Each batch is divided over them. -1: all remaining devices, or
    1 if another size is -1."""
    fsdp: Devices = 1
    """Number of shards of the parameters and the optimizer state. The batch is also divided over
    them."""
    expert: Devices = 1
    """Number of shards of the experts in a mixture of experts. The batch is also divided over them.
    All other parameters are sharded over this axis as they are over `fsdp`."""
    context: Devices = 1
    """Number of shards of the tokens of each sequence."""
    tensor: Devices = 1
    """Number of shards of the heads, the feed-forward layers and the vocabulary."""
