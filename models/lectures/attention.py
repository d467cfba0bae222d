"""Self-attention with options from the lectures that no published family uses.

- `attention` "simple": attention has no linear maps; the input is divided into N slices, which are
  used as queries, keys and values.
- `head_convolution`: a causal convolution over tokens follows the projections (So et al. 2021).
- `positions` "relative": a vector for each clipped distance is added to keys and values (Shaw et
  al. 2018, equations 3 and 4).
- `positions_at` "queries_keys" and "projections": position vectors are added to the inputs of the
  query and key projections, or to the projected queries, keys and values.
"""

import dataclasses
from typing import cast

import flax.linen as nn
import jax.numpy as jnp

from ..nn.attention import Attended, AttentionContext, MultiHeadAttention
from ..nn.cache import Keys
from ..nn.layers import Embedding
from ..nn.typing import Array, Float
from .head_convolution import HeadConvolution, earlier_tokens
from .options import LectureOptions
from .positions import LecturePositions


class LectureAttention(MultiHeadAttention):
    """Attention with the options that the lectures discuss.

    In cross-attention, only `attention` "simple" has an effect.
    """

    config: LectureOptions  # pyright: ignore[reportIncompatibleVariableOverride]

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: AttentionContext) -> Attended:
        """Computes attention from `x` to cached tokens and to `x`, or to the encoder's output."""
        if context.source is not None:
            return super().__call__(x, context)
        c, cache = self.config, context.cache
        positions = cast(LecturePositions, context.positions)
        # Positions are not added to the input of the value projection, but may be added to its
        # output.
        placed = positions.added(x, "queries_keys")
        heads = {
            "query": self.project("query", c.num_heads, c.key_dim, placed),
            "key": self.project("key", c.kv_heads, c.key_dim, placed),
            "value": self.project("value", c.kv_heads, c.value_dim, x),
        }
        # Convolve each projection over earlier tokens, including cached tokens.
        recent = None
        if c.head_convolution is not None:
            cached = cache is not None
            earlier = earlier_tokens(context.mask, c.head_convolution, cached=cached)
            histories = (None,) * 3 if cache is None else cache.recent
            convolved = [
                HeadConvolution(c.head_convolution, self.execution, name=f"{name}_convolution")(
                    y, earlier, history
                )
                for (name, y), history in zip(heads.items(), histories, strict=True)
            ]
            heads = dict(zip(heads, (y for y, _ in convolved), strict=True))
            recent = tuple(history for _, history in convolved)
        query, key, value = (positions.added(y, "projections") for y in heads.values())
        query = self.rotate("query_norm", query, positions)
        key = self.rotate("key_norm", key, positions)
        attended = self.attend(query, key, value, context)
        if recent is None or attended.cache is None:
            return attended
        # Store the last inputs of the convolution for the next call.
        return attended._replace(cache=dataclasses.replace(attended.cache, recent=recent))

    def project(
        self, name: str, num_heads: int, size: int, x: Float[Array, "B S D"]
    ) -> Float[Array, "B S {num_heads} {size}"]:
        """Returns the projection of `x`, or `x` itself divided into N slices."""
        if self.config.attention != "simple":
            return super().project(name, num_heads, size, x)
        return x.astype(self.execution.dtype).reshape(*x.shape[:2], num_heads, size)

    def output(self, attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Returns the output projection, or the concatenation of the N slices."""
        if self.config.attention != "simple":
            return super().output(attended)
        return attended.reshape(*attended.shape[:2], -1)

    def score_terms(
        self, query: Float[Array, "B T N H"], keys: Keys, context: AttentionContext
    ) -> Float[Array, "#B #N #T S"] | None:
        """Returns the products of queries and distance vectors (Shaw et al., equation 4)."""
        distances = _distances(context)
        if distances is None:
            return super().score_terms(query, keys, context)
        vectors = self._vectors("keys", distances.shape[-1], self.config.key_dim)
        return relative_scores(query, distances, vectors)

    def values(
        self, weights: Float[Array, "B N T S"], keys: Keys, context: AttentionContext
    ) -> Float[Array, "B T N V"]:
        """Adds the weighted sum of distance vectors (Shaw et al., equation 3)."""
        attended = super().values(weights, keys, context)
        distances = _distances(context)
        if distances is None:
            return attended
        vectors = self._vectors("values", distances.shape[-1], self.config.value_dim)
        return attended + relative_values(weights, distances, vectors)

    def _vectors(self, name: str, num_distances: int, size: int) -> Float[Array, "R {size}"]:
        e = self.execution
        table = Embedding(num_distances, size, execution=e, name=f"relative_{name}")
        return table.embedding.astype(e.dtype)


def _distances(context: AttentionContext) -> Float[Array, "#B #T S R"] | None:
    """Returns the one-hot distances between queries and keys. Cross-attention has no distances."""
    return getattr(context.positions, "distances", None)


def relative_scores(
    query: Float[Array, "B T N H"],
    distances: Float[Array, "#B #T S R"],
    vectors: Float[Array, "R H"],
) -> Float[Array, "B N T S"]:
    """Returns the float32 product of each query and the vector of its distance to each key."""
    products = jnp.einsum("BTNH,RH->BNTR", query, vectors, preferred_element_type=jnp.float32)
    # Multiply by all R vectors, then select one product per key. This avoids an array with a vector
    # per query and key.
    return jnp.einsum("BNTR,BTSR->BNTS", products, distances.astype(jnp.float32))


def relative_values(
    weights: Float[Array, "B N T S"],
    distances: Float[Array, "#B #T S R"],
    vectors: Float[Array, "R H"],
) -> Float[Array, "B T N H"]:
    """Returns, for each query, the sum of distance vectors weighted by the attention weights."""
    # Sum the weights per distance first. This avoids an array with a vector per query and key.
    by_distance = jnp.einsum("BNTS,BTSR->BNTR", weights, distances)
    return jnp.einsum("BNTR,RH->BTNH", by_distance, vectors)
