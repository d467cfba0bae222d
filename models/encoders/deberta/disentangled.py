"""Disentangled attention, whose scores have separate terms for content and distance (DeBERTa).

He et al. 2021, "DeBERTa: decoding-enhanced BERT with disentangled attention", section 3.1,
equation 4. The score of query i and key j is

    (q_i · k_j + q_i · k(i - j) + k_j · q(i - j)) / √(3H),

where k(d) and q(d) are projections of the vector of distance d. All layers share one table of these
distance vectors. In version 2, large distances are grouped into logarithmic buckets, and each
bucket has one vector.

Unlike the authors' code, this implementation applies no dropout to the distance vectors. Each
sequence has a separate dropout mask, so each layer would project the vectors once for each
sequence.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from ....data.common.fields import Range, require, require_default
from ...config import Execution, Size
from ...nn.attention import Attended, AttentionContext, MultiHeadAttention
from ...nn.cache import Cache, Keys
from ...nn.layers import Embedding, LayerNorm, Linear
from ...nn.masks import AnyArray
from ...nn.masks import Size as Length
from ...nn.positions import Positions, make_positions
from ...nn.relative_positions import by_distance, logarithmic_buckets
from ...nn.typing import Array, Float, Int
from ..encoder import EncoderConfig

PROJECTIONS = {"c2p": "key", "p2c": "query"}
"""For each term of the scores, the name of the linear map that projects the distance vectors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisentangledConfig(EncoderConfig):
    """An encoder with disentangled attention, and its head.

    Raises:
      UserError: a size is out of range, options contradict each other, or the head needs labels and
        has none.
    """

    position_options: ClassVar = {"position_base": (), "position_layout": ()}

    positions: Literal["none", "learned"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Absolute positions in addition to distances. learned: learned position vectors are added to
    the embeddings."""
    distance_terms: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    """The terms of the scores that depend on distances. c2p: the product of the query's content and
    the distance. p2c: the product of the distance and the key's content. The scores are divided by
    √(3H) with both terms, and by √(2H) with one term."""
    position_distance: Size | None = None
    """The distance M; all distances of at least M share one vector. If None, M is `max_length`."""
    position_buckets: Annotated[int, Range(least=2, most=2**27)] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of distance buckets in each direction, S: one bucket for each distance up to S / 2,
    and wider buckets for distances up to M. If None, each distance up to M has its own vector.
    """
    share_projections: bool = False
    """Whether a layer projects distances and tokens with the same matrices (version 3)."""
    norm_distances: bool = False
    """Whether the distance vectors are normalized (versions 2 and 3)."""
    key_bias: bool = True
    """Whether the key projections have biases. False in version 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"distance_terms {', '.join(self.distance_terms)} are not all different"
        require(len(set(self.distance_terms)) == len(self.distance_terms), problem)
        if not self.distance_terms:
            names = "position_distance", "position_buckets", "share_projections", "norm_distances"
            require_default(self, names, "requires distance_terms, got none")

    @property
    def farthest(self) -> int:
        """The distance M; all distances of at least M share one vector."""
        return self.position_distance or self.max_length

    @property
    def scores_by_distance(self) -> bool:
        """Whether attention scores depend on the distance between query and key."""
        return bool(self.distance_terms)

    def with_max_length(self, max_length: int) -> "DisentangledConfig":
        """Returns the configuration of the same model with a different `max_length`."""
        changed = cast(DisentangledConfig, super().with_max_length(max_length))
        fixed = self.farthest if self.distance_terms else None
        return dataclasses.replace(changed, position_distance=fixed)

    def score_scale(self, layer: int | jax.Array) -> float:
        """Returns the attention scale, 1 / √(H · number of terms)."""
        del layer
        return ((1 + len(self.distance_terms)) * self.key_dim) ** -0.5


@struct.dataclass
class DistancePositions(Positions):
    """The positions of a batch, with the distance vectors."""

    distances: Float[Array, "R D"] | None = None
    """The vector of each distance. A distance is a query position minus a key position, from
    -(T - 1) to T - 1, so R = 2T - 1."""
    projected: dict[str, Float[Array, "R N H"]] = struct.field(default_factory=dict)
    """The projections of these vectors for each term, set within a layer."""


def make_distance_positions(
    config: DisentangledConfig,
    execution: Execution,
    position_ids: Int[AnyArray, "#B #T"],
    length: Length,
    *,
    cache: Cache | None,
    causal: bool,
) -> DistancePositions:
    """Returns the positions of tokens; see `make_positions` for the arguments.

    Distances are differences between token indices in a row, as in the authors' code. A document of
    a packed row is contiguous, so its distances are the same as without packing.
    """
    c, e = config, execution
    shared = make_positions(c, e, position_ids, length, cache=cache, causal=causal)
    if not c.distance_terms:
        return DistancePositions(**vars(shared))
    rows = c.position_buckets or c.farthest
    table = Embedding(2 * rows, c.d_model, execution=e, name="distance_embedding").embedding
    if c.norm_distances:
        table = LayerNorm(c, e, name="distance_norm")(table)
    # A distance is a query position minus a key position, from -(T - 1) to T - 1. It selects a row
    # of the table.
    distance = jnp.arange(1 - length, length)
    if c.position_buckets is not None:
        distance = logarithmic_buckets(distance, c.position_buckets, c.farthest)
    # Distance 0 is in the middle of the table, and far distances share the first or the last row.
    row = jnp.clip(distance + rows, 0, 2 * rows - 1)
    return DistancePositions(**vars(shared), distances=table.astype(e.dtype)[row])


class DisentangledAttention(MultiHeadAttention):
    """Attention whose scores depend on the content of tokens and on their distances."""

    config: DisentangledConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: AttentionContext) -> Attended:
        """Attends from each token of `x` to all tokens of `x`."""
        c = self.config
        maps = {name: self._map(name) for name in ("query", "key", "value")}
        positions = cast(DistancePositions, context.positions)
        # Project the distance vectors as keys (c2p) and queries (p2c): [R, D] to [R, N, H].
        projected: dict[str, Array] = {}
        for term in c.distance_terms:
            name, vectors = PROJECTIONS[term], positions.distances
            assert vectors is not None
            project = maps[name] if c.share_projections else self._map(f"position_{name}")
            projected[term] = project(vectors)
        positions = dataclasses.replace(positions, projected=projected)
        query, key, value = (project(x) for project in maps.values())
        return self.attend(query, key, value, dataclasses.replace(context, positions=positions))

    def _map(self, name: str) -> Linear:
        c = self.config
        bias = c.key_bias or not name.endswith("key")
        return Linear((c.num_heads, c.key_dim), c.init_std, 1, bias, self.execution, name=name)

    def score_terms(
        self, query: Float[Array, "B T N H"], keys: Keys, context: AttentionContext
    ) -> Float[Array, "B N T T"] | None:
        """Returns the terms of the scores that depend on distances, in float32."""
        # Each distance in the row has a vector, so `by_distance` only needs to shift the products.
        vectors = cast(DistancePositions, context.positions).projected
        terms: list[Array] = []
        if "c2p" in vectors:
            backwards = vectors["c2p"][::-1]  # ordered by key minus query position
            products = jnp.einsum(
                "BTNH,RNH->BNTR", query, backwards, preferred_element_type=jnp.float32
            )
            # [B, N, T, R] to [B, N, T, T]: query i with the vector of the distance to key j.
            terms.append(by_distance(products))
        if "p2c" in vectors:
            scaled = vectors["p2c"] * self.config.score_scale(context.layer)
            scaled = scaled.astype(keys.key.dtype)
            products = jnp.einsum(
                "BNHS,RNH->BNSR", keys.key, scaled, preferred_element_type=jnp.float32
            )
            # In these products row j belongs to key j, so swap the axes: [B, N, S, T] to [B, N, T,
            # S].
            terms.append(jnp.swapaxes(by_distance(products), -1, -2))
        return sum(terms[1:], terms[0]) if terms else None
