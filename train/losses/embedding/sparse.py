"""The regularizer of sparse vectors."""

import jax.numpy as jnp

from ....models.nn.typing import Array, Bool, Float


def flops(vectors: Float[Array, "N V"], real: Bool[Array, " N"]) -> Float[Array, ""]:
    """Returns Σ_v (mean_n w_nv)², which estimates the multiplications needed to compare two texts.

    Paria et al. 2020, "Minimizing FLOPs to learn efficient sparse representations", equation 4. The
    sum is small if texts have few positive weights, and if these weights are for different tokens
    in different texts.

    Args:
        vectors: w, the nonnegative weights of each text.
        real: whether each text is real.
    """
    num_texts = jnp.maximum(jnp.sum(real), 1)
    # The mean weight of each token over the real texts, [V].
    means = jnp.sum(jnp.where(real[:, None], vectors, 0.0), axis=0) / num_texts
    return jnp.sum(jnp.square(means))
