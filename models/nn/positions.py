"""Positions of tokens: position ids, added vectors, rotations and relative distances.

Position embeddings are learned (`learned`). Position encodings are computed (`sinusoidal`,
`rotary`, `counter`, `binary`) or given by hand (`table`). Relative positions depend on the distance
between two tokens (`relative`, `buckets`, `alibi`). `make_positions` provides every kind for every
family. Vectors are added at the place `positions_at`; rotations and relative positions enter
attention.

Positions enter self-attention only; cross-attention sees positions only through the vectors added
to its inputs.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..config import MOST_BITS, Execution, PositionPlace, TransformerConfig
from .cache import Cache, Keys
from .layers import Embedding, embedding_lookup
from .masks import AnyArray, Size
from .relative_positions import RelativePositionBias, alibi, clipped_distances
from .rotary import Rotary, rotary_positions
from .typing import Array, Bool, Float, Int


def default_positions(
    start: Int[Array, ""],
    length: Size,
    attention_mask: Int[AnyArray, "B S"] | None,
    segment_ids: Int[AnyArray, "B T"] | None,
) -> Int[Array, "#B T"]:
    """Counts 0, 1, 2 … over the real tokens of each sequence, or of each packed document.

    Args:
      start: the first requested slot (above 0 if a cache is continued).
      length: number of requested slots, T.
      attention_mask: over all slots. Padding may be on either side.
      segment_ids: document of each token of a packed sequence.
    """
    index = jnp.arange(length)
    if segment_ids is not None:
        # Subtract the start of its document from the index of each token.
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if attention_mask is not None:
        # Count real tokens over all slots, and select the slots of this call.
        positions = jnp.maximum(jnp.cumsum(attention_mask != 0, axis=1) - 1, 0)
        return jax.lax.dynamic_slice_in_dim(positions, start, length, axis=1)
    return (start + index)[None]


def sinusoidal_positions(
    length: int,
    d_model: int,
    base: float = 10_000.0,
    layout: Literal["interleaved", "halves", "per_dimension"] = "interleaved",
) -> np.ndarray:
    """Returns the sine and cosine of every position, a table float32[length, d_model].

    Vaswani et al. 2017, section 3.5: dimension 2i holds sin(p / base^(2i/D)), dimension 2i + 1 the
    cosine. The paper's base is 10,000; 100,000 is also in use. With the layout "halves" (Marian)
    all sines come before all cosines. With "per_dimension" every dimension has its own wavelength:
    dimension i holds the sine, or if i is odd the cosine, of p / base^(i/D).
    """
    if layout == "per_dimension":
        dimension = np.arange(d_model)
        angle = np.arange(length)[:, None] * base ** (-dimension / d_model)
        return np.where(dimension % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)
    frequency = base ** (-np.arange(0, d_model, 2) / d_model)
    angle = np.arange(length)[:, None] * frequency[None, :]
    waves = np.sin(angle), np.cos(angle)
    if layout == "halves":
        table = np.concatenate(waves, axis=-1)
    else:
        table = np.stack(waves, axis=-1).reshape(length, -1)
    return table[:, :d_model].astype(np.float32)


def binary_positions(length: int, bits: int) -> np.ndarray:
    """Returns the binary digits of 0, 1, 2 …, a table float32[length, bits] of zeros and ones.

    The least significant digit is last: `binary_positions(16, 4)[5]` is
    `[0, 1, 0, 1]`.
    """
    number = np.arange(length)[:, None]
    return (number >> np.arange(bits)[::-1] & 1).astype(np.float32)


def position_vectors(config: TransformerConfig, length: int) -> np.ndarray:
    """Returns the vectors of the first positions, a table float32[length, D].

    Args:
      config: a configuration with additive positions that are not learned.
      length: number of positions.
    """
    width = config.position_dim
    if config.positions == "sinusoidal":
        base, layout = config.position_base, config.position_layout
        return sinusoidal_positions(length, width, base, layout)
    if config.positions == "table":
        return np.asarray(config.position_table, np.float32).reshape(-1, width)[:length]
    if config.positions == "counter":
        dimensions = np.arange(1, length + 1, dtype=np.float32)[:, None]
    else:
        assert config.positions == "binary"
        dimensions = binary_positions(length, min(width, MOST_BITS))
    # Counter and binary digits occupy the last dimensions; the others are 0.
    return np.pad(dimensions, ((0, 0), (width - dimensions.shape[1], 0)))


@struct.dataclass
class Positions:
    """The positions of the tokens, in the form that the layers of a stack use."""

    vectors: Float[Array, "#B #T D"] | None = None
    """The vector of each position, Π."""
    place: PositionPlace = struct.field(pytree_node=False, default="input")
    """Where the vectors are added."""
    rotary: Rotary | None = None
    """Rotations of queries and keys."""
    windowed_rotary: Rotary | None = None
    """Rotations in the layers with an attention window, if they differ (Gemma 3)."""
    bias: Float[Array, "#B N #T S"] | None = None
    """Added to the scores of attention."""
    distances: Float[Array, "#B #T S R"] | None = None
    """The clipped distance from each query to each key, one-hot over R distances."""
    key_positions: Int[Array, "B S"] | None = None
    """The position of each slot of a cache, if attention uses distances to cached keys."""

    def of_layer(self, windowed: bool | Bool[Array, ""]) -> "Positions":
        """Returns the positions for a layer with or without an attention window."""
        local, full = self.windowed_rotary, self.rotary
        if local is None or full is None:
            return self
        if isinstance(windowed, bool):
            chosen = local if windowed else full
        else:
            chosen = jax.tree.map(lambda x, y: jnp.where(windowed, x, y), local, full)
        return dataclasses.replace(self, rotary=chosen, windowed_rotary=None)

    def of_keys(self, keys: Keys) -> "Positions":
        """Returns the positions for attention to selected slots of a cache."""
        if keys.columns is None:
            return self
        bias, distances = self.bias, self.distances
        return dataclasses.replace(
            self,
            bias=None if bias is None else keys.of_columns(bias),
            distances=None if distances is None else keys.of_columns(distances, axis=2),
        )

    def added(
        self, x: Float[Array, "B T *rest"], *places: PositionPlace
    ) -> Float[Array, "B T *rest"]:
        """Adds Π at one of the given places, split into heads like `x`."""
        if self.vectors is None or self.place not in places:
            return x
        return x + self.vectors.reshape(*self.vectors.shape[:2], *x.shape[2:])

    def at_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Adds Π to the embeddings, the input of the first layer."""
        return self.added(x, "input", "every_layer")

    def at_layer(
        self, x: Float[Array, "B T D"], layer: int | Int[Array, ""]
    ) -> Float[Array, "B T D"]:
        """Adds Π to the input of every layer after the first, if `place` is "every_layer"."""
        if self.place != "every_layer":
            return x
        # `at_input` has already added Π for the first layer.
        return jnp.where(layer > 0, self.added(x, "every_layer"), x)


def make_positions(
    config: TransformerConfig,
    execution: Execution,
    position_ids: Int[AnyArray, "#B #T"],
    length: Size,
    *,
    cache: Cache | None,
    causal: bool,
    init_std: float = 0.02,
) -> Positions:
    """Returns the positions of tokens; call it in the compact method of a module.

    The module stores learned vectors in `position_embedding` and learned biases in `position_bias`.

    Args:
      config: the kind of positions, and sizes.
      execution: precision.
      position_ids: the position of each token.
      length: number of tokens, T.
      cache: keys and values of earlier calls. All of its slots are keys.
      causal: whether tokens cannot attend to later ones.
      init_std: standard deviation of the initial vectors or biases.
    """
    kind, place = config.positions, config.positions_at
    if kind == "rotary":
        rotary = rotary_positions(
            position_ids,
            config.rotated_dim,
            config.position_base,
            scaling=config.rope_scaling,
            max_length=config.max_length,
            interleaved=config.rotary_interleaved,
        )
        return Positions(rotary=rotary)
    if kind == "learned":
        rows = config.max_length + config.position_offset
        table = Embedding(rows, config.position_dim, init_std, execution, name="position_embedding")
        if config.position_offset:
            # A negative position must not read a row before that of position 0.
            position_ids = jnp.where(position_ids < 0, -1, position_ids + config.position_offset)
        return Positions(table(position_ids), place)
    if kind == "none":
        return Positions()
    num_keys = length if cache is None else cache.length
    if config.scores_by_distance:
        return _relative_positions(
            config, execution, position_ids, length, cache=cache, causal=causal, init_std=init_std
        )
    # Computed tables cover inputs beyond `max_length`, unless the length is symbolic (exported).
    longest = max(config.max_length, num_keys if isinstance(num_keys, int) else 0)
    rows = config.max_length if kind == "table" else longest
    table = jnp.asarray(position_vectors(config, rows), execution.dtype)
    return Positions(embedding_lookup(table, position_ids), place)


def _relative_positions(
    config: TransformerConfig,
    execution: Execution,
    position_ids: Int[AnyArray, "#B #T"],
    length: Size,
    *,
    cache: Cache | None,
    causal: bool,
    init_std: float,
) -> Positions:
    """Returns the biases or the clipped distances of all queries and keys."""
    queries = jnp.asarray(position_ids, jnp.int32)
    if cache is None:
        keys, written = jnp.broadcast_to(queries, (queries.shape[0], length)), None
    else:
        # Cached keys do not contain their positions, so the cache keeps them.
        assert cache.positions is not None
        new = jnp.broadcast_to(queries, (cache.positions.shape[0], length))
        start = (jnp.zeros((), cache.index.dtype), cache.index)
        keys = written = jax.lax.dynamic_update_slice(cache.positions, new, start)
    if config.positions == "relative":
        farthest = config.position_distance or 16
        distances = clipped_distances(queries, keys, farthest, causal=causal)
        return Positions(distances=distances.astype(execution.dtype), key_positions=written)
    if config.positions == "alibi":
        return Positions(bias=alibi(queries, keys, config.num_heads), key_positions=written)
    bias = RelativePositionBias(
        num_heads=config.num_heads,
        num_buckets=config.position_buckets,
        max_distance=config.position_distance or 128,
        bidirectional=not causal,
        init_std=init_std,
        execution=execution,
        name="position_bias",
    )
    return Positions(bias=bias(queries, keys), key_positions=written)
