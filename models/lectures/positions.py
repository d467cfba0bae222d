"""Kinds of positions from the lectures, and the places where position vectors are added.

- counter: 1, 2, 3, … in the last dimension; binary: binary digits in the last dimensions.
- appended_counter: embeddings of D - 1 dimensions, and 1, 2, 3, … as the last dimension.
- table: the vectors in `position_table`.
- relative: Shaw et al. 2018, "Self-attention with relative position representations", section 3:
  learned vectors for each clipped distance, added to keys (equation 4) and to values (equation 3);
  each layer has separate vectors, shared by the layer's heads.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..config import Execution, TransformerConfig
from ..nn.cache import Cache, Keys
from ..nn.masks import AnyArray, Size
from ..nn.positions import (
    Positions,
    computed_positions,
    make_positions,
    num_keys,
    query_and_key_positions,
    sinusoidal_positions,
)
from ..nn.typing import Array, Float, Int
from .options import MOST_BITS, LectureOptions, PositionPlace


def clipped_distances(
    query_positions: Int[Array, "#B #T"],
    key_positions: Int[Array, "#B S"],
    farthest: int,
    *,
    causal: bool,
) -> Float[Array, "#B #T S R"]:
    """Returns the clipped distance between each query and each key as a one-hot vector.

    Shaw et al. 2018, equation 4: the distance, key position minus query position, is clipped to ±k,
    so that R = 2k + 1. If causal, the distance is at most 0, and R = k + 1. All layers share the
    one-hot vectors, which take R / N of the memory of one layer's scores.

    Args:
      query_positions: position of each query.
      key_positions: position of each key.
      farthest: k; larger distances are clipped to k.
      causal: whether queries cannot attend to later keys.
    """
    distance = key_positions[:, None, :] - query_positions[:, :, None]
    latest = 0 if causal else farthest
    # Shift the distances -k … k, or -k … 0 if causal, to indices from 0.
    index = jnp.clip(distance, -farthest, latest) + farthest
    return jax.nn.one_hot(index, farthest + latest + 1)


def binary_positions(length: int, bits: int) -> np.ndarray:
    """Returns the binary digits of 0, 1, 2 … as a table float32[length, bits] of zeros and ones.

    The least significant digit is last: `binary_positions(16, 4)[5]` is
    `[0, 1, 0, 1]`.
    """
    index = np.arange(length)[:, None]
    return (index >> np.arange(bits)[::-1] & 1).astype(np.float32)


def position_vectors(config: TransformerConfig, length: int) -> np.ndarray:
    """Returns the vectors of positions 0 to length - 1 as a table float32[length, D].

    Args:
      config: a configuration with additive positions that are not learned.
      length: number of positions.
    """
    width = config.position_dim
    if config.positions == "sinusoidal" or not isinstance(config, LectureOptions):
        return sinusoidal_positions(length, width, config.position_base, config.position_layout)
    if config.positions == "table":
        return np.asarray(config.position_table, np.float32).reshape(-1, width)[:length]
    if config.positions != "binary":
        dimensions = np.arange(1, length + 1, dtype=np.float32)[:, None]
    else:
        dimensions = binary_positions(length, min(width, MOST_BITS))
    # Counter and binary digits are in the last dimensions; the other dimensions are 0.
    return np.pad(dimensions, ((0, 0), (width - dimensions.shape[1], 0)))


@struct.dataclass
class LecturePositions(Positions):
    """Clipped distances, and position vectors that are added at one of several places."""

    place: PositionPlace = struct.field(pytree_node=False, default="input")
    """Where the vectors are added."""
    appended: bool = struct.field(pytree_node=False, default=False)
    """Whether the last dimension of the vectors replaces the last dimension of the embeddings."""
    distances: Float[Array, "#B #T S R"] | None = None
    """The clipped distance from each query to each key, as a one-hot vector over R distances."""

    def of_keys(self, keys: Keys) -> "LecturePositions":
        """Returns the positions for attention to the selected slots of a cache."""
        selected = super().of_keys(keys)
        if self.distances is None:
            return selected  # pyright: ignore[reportReturnType]
        return dataclasses.replace(self, distances=keys.of_columns(self.distances, axis=2))

    def added(
        self, x: Float[Array, "B T *rest"], *places: PositionPlace
    ) -> Float[Array, "B T *rest"]:
        """Adds the vectors Π, split into heads like `x`, if `self.place` is one of `places`."""
        if self.vectors is None or self.place not in places:
            return x
        return x + self.vectors.reshape(*self.vectors.shape[:2], *x.shape[2:])

    def at_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Adds the position vectors Π to the embeddings, the input of the first layer."""
        if self.appended:
            x = x.at[..., -1].set(0)
        return self.added(x, "input", "every_layer")

    def at_layer(
        self, x: Float[Array, "B T D"], layer: int | Int[Array, ""]
    ) -> Float[Array, "B T D"]:
        """Adds Π to the inputs of all layers after the first, if `place` is "every_layer"."""
        if self.place != "every_layer":
            return x
        # `at_input` has already added Π for the first layer.
        return jnp.where(layer > 0, self.added(x, "every_layer"), x)


def make_lecture_positions(
    config: LectureOptions,
    execution: Execution,
    position_ids: Int[AnyArray, "#B #T"],
    length: Size,
    *,
    cache: Cache | None,
    causal: bool,
    init_std: float = 0.02,
) -> LecturePositions:
    """Returns the positions of tokens for every kind; see `make_positions` for the arguments."""
    # Relative distances change the scores and the values of every layer.
    if config.positions == "relative":
        queries, keys, written = query_and_key_positions(position_ids, length, cache)
        farthest = config.position_distance or 16
        distances = clipped_distances(queries, keys, farthest, causal=causal)
        return LecturePositions(distances=distances.astype(execution.dtype), key_positions=written)
    if config.positions in ("table", "counter", "appended_counter", "binary"):
        # A table has `max_length` rows. Computed positions are also available for longer inputs.
        longer = 0 if config.positions == "table" else num_keys(length, cache)
        table = position_vectors(config, max(config.max_length, longer))
        shared = computed_positions(table, execution, position_ids)
    else:
        shared = make_positions(
            config, execution, position_ids, length, cache=cache, causal=causal, init_std=init_std
        )
    appended = config.positions == "appended_counter"
    return LecturePositions(**vars(shared), place=config.positions_at, appended=appended)
