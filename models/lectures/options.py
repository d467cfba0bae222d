"""The options of the lecture variants, for the configurations of several families."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from ...data.common.fields import Checked, require
from ..config import Size, TransformerConfig

LecturePositionKind: TypeAlias = Literal[
    "learned",
    "sinusoidal",
    "rotary",
    "buckets",
    "alibi",
    "none",
    "relative",
    "counter",
    "appended_counter",
    "binary",
    "table",
]
"""The kinds of positions; see `models.lectures.positions`."""
PositionPlace: TypeAlias = Literal["input", "every_layer", "queries_keys", "projections"]
"""The places where position vectors can be added."""
MOST_BITS = 31
"""Maximum number of binary digits that represent a position."""

# The options come before the family's fields (`LectureGPTConfig(LectureOptions, GPTConfig)`), so
# that the dataclass keeps the family's defaults.
_Base = TransformerConfig if TYPE_CHECKING else Checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class LectureOptions(_Base):
    """The options that no published family uses. The defaults disable them.

    Raises:
      UserError: a size is out of range, or options contradict each other.
    """

    attention: Literal["learned", "simple"] = "learned"
    """How attention projects its input and output. learned: linear maps compute queries, keys,
    values and outputs. simple: attention has no parameters. The input is divided into N slices of
    size D / N, and each slice is the query, key and value of one head.
    """
    norm_affine: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether norms have learned scales and biases."""
    add_residual: bool = True
    """Whether a sublayer's output is added to its input. If False, the output replaces the
    input."""
    residual_scalar: bool = False
    """Whether each sublayer's output is multiplied by a learned scalar, whose initial value is
    1."""
    head_convolution: Size | None = None
    """Width of the causal convolution over tokens that follows the query, key and value projections
    of causal self-attention (3 in Primer). If None, attention has no convolution."""
    positions_at: PositionPlace = "input"
    """Where position vectors are added. input: once, to the embeddings. every_layer: to the input
    of every layer. queries_keys: to the inputs of the query and key projections, in every layer.
    projections: to the projected queries, keys and values, with D split into heads."""
    position_table: tuple[float, ...] | None = None
    """The position vectors for `positions` "table": max_length · D values, row by row. To convert
    an array [max_length, D], use `tuple(array.ravel().tolist())`."""

    position_options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TransformerConfig.position_options,
        "position_distance": ("relative", "buckets"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.add_residual or not self.residual_scalar,
            "residual_scalar True multiplies what is added, and add_residual False adds nothing: "
            "leave one of them out",
        )
        if self.attention != "simple":
            return
        require(
            self.head_convolution is None,
            f"head_convolution {self.head_convolution} follows projections, and attention "
            '"simple" has none: leave head_convolution out',
        )
        # The input itself is used as query, key and value. All slices of the input have the same
        # size.
        part = self.d_model // self.num_heads
        require(
            (self.kv_heads, self.key_dim, self.value_dim) == (self.num_heads, part, part),
            'attention "simple" requires keys and values of the size of a head: leave '
            f"d_k and d_v at {part}",
        )

    def _check_positions(self) -> None:
        super()._check_positions()
        kind = self.positions
        require(
            self.adds_positions or self.positions_at == "input",
            f"positions_at {self.positions_at!r} requires additive positions, got {kind!r}: "
            f"leave positions_at out",
        )
        # A vector of size D is split into heads, so the keys of all heads must have D dimensions in
        # total, and so must the values.
        sizes = {self.key_dim * self.num_heads, self.value_dim * self.num_heads}
        require(
            self.positions_at != "projections" or sizes == {self.d_model},
            f"positions_at 'projections' cuts {self.d_model} dimensions into {self.num_heads} "
            f"heads, but keys have size {self.key_dim} and values {self.value_dim}: choose "
            "another place or D / N",
        )
        require(
            kind != "appended_counter" or self.positions_at == "input",
            f"positions_at {self.positions_at!r} does not suit positions 'appended_counter', which "
            "extend the embeddings: leave positions_at out",
        )
        require(
            kind != "binary" or self.max_length <= 2 ** min(self.d_model, MOST_BITS),
            f"max_length {self.max_length} has more positions than {self.d_model} binary "
            "digits: raise d_model or choose other positions",
        )
        # Only the position kind "table" reads `position_table`, which has one vector for each
        # position.
        rows = self.max_length * self.position_dim if kind == "table" else 0
        num_values = len(self.position_table or ())
        require(
            rows == num_values,
            f"position_table has {num_values} numbers: positions {kind!r} with max_length "
            f"{self.max_length} and rows of {self.position_dim} need {rows}",
        )

    @property
    def longest_input(self) -> int | None:
        """The maximum input length in tokens, or None if positions do not come from a table."""
        return self.max_length if self.positions in ("learned", "table") else None

    @property
    def scores_by_distance(self) -> bool:
        """Whether attention scores depend on the distance between query and key."""
        return self.positions == "relative" or super().scores_by_distance

    @property
    def adds_positions(self) -> bool:
        """Whether positions are vectors that are added to embeddings."""
        additive = ("counter", "appended_counter", "binary", "table")
        return self.positions in additive or super().adds_positions

    @property
    def recent_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes `[w, N, H]` of the last inputs of the query, key and value convolutions."""
        if self.head_convolution is None:
            return ()
        before = self.head_convolution - 1
        return (
            (before, self.num_heads, self.key_dim),
            (before, self.kv_heads, self.key_dim),
            (before, self.kv_heads, self.value_dim),
        )
