"""The axes of a device mesh, and the logical axes that they shard."""

import math
from collections.abc import Iterable, Sequence

import jax

BATCH_AXES = ("data", "fsdp", "expert")
"""The mesh axes that shard the sequences of a batch."""
CONTEXT = "context"
"""The mesh axis that shards the tokens of a sequence."""
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
"""For each logical axis, the mesh axes that shard it. A mesh axis that already shards an earlier
dimension of the same parameter is skipped."""


def num_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: Iterable[str]) -> int:
    """Returns the number of shards of an array that is sharded over `axes`."""
    return math.prod(mesh.shape[axis] for axis in axes)


def automatic(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the mesh axes that are not manual (`jax.shard_map`) in the code being traced."""
    by_hand = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in by_hand)
