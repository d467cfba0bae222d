"""What sits on top of a body of layers."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from .attention import Cache


@struct.dataclass
class Projection:
    """Hidden states beside the vocabulary matrix they are to be multiplied with.

    Kept apart until somebody asks for `logits()`: a training loss never does,
    and takes both to a chunked cross-entropy instead, so that `[B, T, V]` is
    nowhere whole in memory.
    """

    hidden: Float[Array, "B T D"]
    kernel: Float[Array, "V D"]

    def logits(self) -> Float[Array, "B T V"]:
        """Hidden states · Wᵀ, float32."""
        return jnp.einsum(
            "BTD,VD->BTV", self.hidden, self.kernel, preferred_element_type=jnp.float32
        )


@struct.dataclass
class CausalLMOutput:
    """What a causal language model answers."""

    last_hidden_state: Float[Array, "B T D"]
    projection: Projection
    cache: Cache | None = None
    attentions: Any = None
    """Attention weights `[L, B, N, T, S]` (a tuple of L with separate layers), if asked for."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Scores of the next token, float32; computed when asked for."""
        return self.projection.logits()
