"""The Matryoshka loss: a loss on the first d dimensions of vectors, summed over several d."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from ....data.common.fields import require
from ....models.nn.typing import Array
from .vectors import Vectors


def matryoshka(
    loss: Callable[[Vectors], Array], dims: Sequence[int], weights: Sequence[float] = ()
) -> Callable[[Vectors], Array]:
    """Returns Σ_d w_d · loss(first d dimensions of the vectors, scaled to norm 1).

    Kusupati et al. 2022, "Matryoshka representation learning", equation 1.

    Args:
        loss: a function that maps vectors to the loss of each item.
        dims: the numbers of dimensions d.
        weights: w, a weight for each number of dimensions. Defaults to 1 each.

    Raises:
        UserError: when the loss is computed, the vectors have fewer dimensions than an entry of
          `dims`.
    """
    weights = weights or [1.0] * len(dims)

    def nested(vectors: Vectors) -> Array:
        width = vectors.anchors.shape[-1]
        require(
            max(dims) <= width,
            f"matryoshka_dims {max(dims)} is more than the {width} dimensions of the vectors: "
            "leave it out",
        )
        each = [w * loss(vectors.first(d)) for d, w in zip(dims, weights, strict=True)]
        return jnp.sum(jnp.stack(each), axis=0)

    return nested
