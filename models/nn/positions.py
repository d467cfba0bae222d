"""Positions of tokens: position ids, added vectors, rotations and relative distances.

Position embeddings are learned (`learned`). Position encodings are computed (`sinusoidal`,
`rotary`). Relative positions depend on the distance between two tokens (`buckets`, `alibi`).
`make_positions` provides every kind for every family. Vectors are added to the embeddings;
rotations and relative positions are used in attention. `models.lectures.positions` implements more
kinds of positions.

Only self-attention uses rotations and relative positions. Cross-attention uses only the vectors
that are added to the embeddings.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..config import Execution, TransformerConfig
from .cache import Cache, Keys
from .layers import Embedding, embedding_lookup
from .masks import AnyArray, Size
from .relative_positions import RelativePositionBias, alibi
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
      length: the number of requested slots, T.
      attention_mask: 1 for real tokens, with an entry for every slot. Padding may be on either
        side.
      segment_ids: the document id of each token of a packed sequence.
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
    """Returns the sines and cosines of all positions as a table float32[length, d_model].

    Vaswani et al. 2017, section 3.5: dimension 2i is sin(p / base^(2i/D)), and dimension 2i + 1 is
    the cosine. The paper's base is 10,000; some models use 100,000. With the layout "halves"
    (Marian) all sines come before all cosines. With "per_dimension" every dimension has a separate
    wavelength: dimension i is the sine of p / base^(i/D) if i is even, and the cosine if i is odd.
    """
    if layout == "per_dimension":
        dimension = np.arange(d_model)
        angle = np.arange(length)[:, None] * base ** (-dimension / d_model)
        return np.where(dimension % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)
    frequency = base ** (-np.arange(0, d_model, 2) / d_model)
    angle = np.arange(length)[:, None] * frequency[None, :]
    # Sines and cosines [length, ⌈D / 2⌉], one column for each wavelength.
    waves = np.sin(angle), np.cos(angle)
    if layout == "halves":
        table = np.concatenate(waves, axis=-1)
    else:
        table = np.stack(waves, axis=-1).reshape(length, -1)
    # If D is odd, the table has an extra column. Drop it.
    return table[:, :d_model].astype(np.float32)


@struct.dataclass
class Positions:
    """The positions of the tokens, in the representation that the layers of a stack use."""

    vectors: Float[Array, "#B #T D"] | None = None
    """The vector of each position, Π, which is added to the embeddings."""
    rotary: Rotary | None = None
    """Rotations of queries and keys."""
    windowed_rotary: Rotary | None = None
    """Rotations in the layers with an attention window, if they differ from the rotations in other
    layers (Gemma 3).
    """
    unrotated_layers: tuple[bool, ...] = struct.field(pytree_node=False, default=())
    """Whether each layer leaves queries and keys unrotated (SmolLM3). If empty, all layers rotate
    them.
    """
    bias: Float[Array, "#B N #T S"] | None = None
    """The bias that is added to the attention scores."""
    key_positions: Int[Array, "B S"] | None = None
    """The position of the token in each cache slot, if attention uses distances to cached keys."""

    def of_layer(
        self, layer: int | Int[Array, ""], windowed: bool | Bool[Array, ""]
    ) -> "Positions":
        """Returns the positions for one layer, which may have an attention window."""
        # A windowed layer may have a different base, and an unrotated layer rotates by the angle 0.
        chosen, local, flags = self.rotary, self.windowed_rotary, self.unrotated_layers
        if chosen is not None and local is not None:
            chosen = _select(windowed, local, chosen)
        if chosen is not None and any(flags):
            chosen = _select(flag_of_layer(flags, layer), chosen.identity(), chosen)
        return dataclasses.replace(self, rotary=chosen, windowed_rotary=None, unrotated_layers=())

    def of_keys(self, keys: Keys) -> "Positions":
        """Returns the positions for attention to the selected slots of a cache."""
        if self.bias is None or keys.columns is None:
            return self
        return dataclasses.replace(self, bias=keys.of_columns(self.bias))

    def at_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Adds the position vectors Π to the embeddings, the input of the first layer."""
        return x if self.vectors is None else x + self.vectors


def flag_of_layer(flags: tuple[bool, ...], layer: int | Int[Array, ""]) -> bool | Bool[Array, ""]:
    """Returns the flag of a layer; the layer's index may be traced."""
    return flags[layer] if isinstance(layer, int) else jnp.asarray(flags)[layer]


def _select(condition: bool | Bool[Array, ""], first: Rotary, second: Rotary) -> Rotary:
    """Returns `first` if `condition`, which may be traced, is true, and `second` otherwise."""
    if isinstance(condition, bool):
        return first if condition else second
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), first, second)


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
    """Returns the positions of tokens. Call this function in the compact method of a module.

    The module stores learned vectors in `position_embedding` and learned biases in `position_bias`.

    Args:
      config: the kind of positions, and the sizes.
      execution: precision.
      position_ids: the position of each token.
      length: number of tokens, T.
      cache: keys and values of earlier calls. All slots of the cache are keys.
      causal: whether tokens cannot attend to later tokens.
      init_std: standard deviation of the initial vectors or biases.
    """
    kind = config.positions
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
            # A negative position must not select a row before the row of position 0.
            position_ids = jnp.where(position_ids < 0, -1, position_ids + config.position_offset)
        return Positions(table(position_ids))
    if kind == "sinusoidal":
        # A computed table may have more rows than `max_length`, to support longer inputs.
        rows = max(config.max_length, num_keys(length, cache))
        base, layout = config.position_base, config.position_layout
        return computed_positions(
            sinusoidal_positions(rows, config.position_dim, base, layout), execution, position_ids
        )
    if kind == "none":
        return Positions()
    # The remaining kinds add a bias to the scores, which depends on the distance between query and
    # key.
    queries, keys, written = query_and_key_positions(position_ids, length, cache)
    if kind == "alibi":
        return Positions(bias=alibi(queries, keys, config.num_heads), key_positions=written)
    bias = bucket_bias(config, execution, bidirectional=not causal, init_std=init_std)
    return Positions(bias=bias(queries, keys), key_positions=written)


def bucket_bias(
    config: TransformerConfig, execution: Execution, *, bidirectional: bool, init_std: float = 0.02
) -> RelativePositionBias:
    """Returns the module `position_bias`. Call this function in a module's compact method.

    Args:
      config: the number of heads and of buckets.
      execution: precision.
      bidirectional: whether queries attend to later keys.
      init_std: standard deviation of the initial biases.
    """
    return RelativePositionBias(
        num_heads=config.num_heads,
        num_buckets=config.position_buckets,
        max_distance=config.position_distance or 128,
        bidirectional=bidirectional,
        init_std=init_std,
        execution=execution,
        name="position_bias",
    )


def computed_positions(
    table: np.ndarray, execution: Execution, position_ids: Int[AnyArray, "#B #T"]
) -> Positions:
    """Returns the rows of a computed table `[rows, D]`, which is a constant of the program."""
    return Positions(embedding_lookup(jnp.asarray(table, execution.dtype), position_ids))


def num_keys(length: Size, cache: Cache | None) -> int:
    """Returns the number of keys, or 0 if it is symbolic (in an exported program).

    Computed tables cover inputs beyond `max_length`, unless the length is symbolic.
    """
    size = length if cache is None else cache.length
    return size if isinstance(size, int) else 0


def query_and_key_positions(
    position_ids: Int[AnyArray, "#B #T"], length: Size, cache: Cache | None
) -> tuple[Int[Array, "#B #T"], Int[Array, "#B S"], Int[Array, "B S"] | None]:
    """Returns the positions of all queries and keys, and the positions to write into the cache."""
    queries = jnp.asarray(position_ids, jnp.int32)
    if cache is None:
        return queries, jnp.broadcast_to(queries, (queries.shape[0], length)), None
    # Cached keys do not contain their positions, so the cache stores the positions separately.
    assert cache.positions is not None
    new = jnp.broadcast_to(queries, (cache.positions.shape[0], length))
    start = (jnp.zeros((), cache.index.dtype), cache.index)
    keys = jax.lax.dynamic_update_slice(cache.positions, new, start)
    return queries, keys, keys
