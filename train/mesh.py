"""The mesh of devices: its axes, their sizes, and what is sharded over each."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax

BATCH_AXES = ("data", "fsdp", "expert")
"""The sequences of a batch are sharded over all of them."""
CONTEXT = "context"
"""The tokens of a sequence are sharded over it."""
MESH_AXIS_NAMES = (*BATCH_AXES, CONTEXT, "tensor")

MESH_AXES: dict[str | None, tuple[str, ...]] = {
    "model": ("fsdp", "expert"),
    "vocabulary": ("tensor",),
    "heads": ("tensor",),
    "feed_forward": ("tensor",),
    "experts": ("expert",),
    "layers": (),
    None: (),
}
"""The axes of the mesh that each logical axis is sharded over, except for those over which an
earlier dimension of the same parameter is sharded."""

Parallel = Literal["jit", "pmap"]
"""jit: any mesh. pmap: data parallelism over the devices of one process."""
Gather = Literal["auto", "step", "layer"]
"""When parameters that are sharded over `fsdp` are gathered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis of the mesh; -1 takes all remaining devices."""

    data: int = -1
    """Copies of the model, each with its part of the batch; -1: all remaining devices."""
    fsdp: int = 1
    """Shards of the parameters and the optimizer state, each with its part of the batch."""
    expert: int = 1
    """Shards of the experts of a mixture, each with its part of the batch; the other parameters
    are sharded over it as over `fsdp`."""
    context: int = 1
    """Shards of the tokens of each sequence."""
    tensor: int = 1
    """Shards of the heads, the feed-forward layers and the vocabulary."""


def automatic(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of the mesh that the code being traced is not divided over by hand."""
    by_hand = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in by_hand)
