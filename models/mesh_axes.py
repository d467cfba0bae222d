"""The axes of a device mesh, and the logical axes of arrays that each of them shards."""

from collections.abc import Sequence

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


def automatic(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of the mesh that the code being traced is not divided over by hand."""
    by_hand = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in by_hand)
