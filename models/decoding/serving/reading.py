"""A context that is read in pieces of few sizes, so that few programs are compiled."""

import dataclasses

import numpy as np

from ...config import TransformerConfig
from ..cached_context import rotates_by_length
from ..continuous_batch import read_length
from ..padding import round_up
from ..rows import RowCaches
from .row_sampling import OpenText

CHUNKS = (512, 128, 32)
"""Contexts are read in pieces of these sizes."""


def pieces_of(length: int, config: TransformerConfig) -> list[int]:
    """Returns the sizes of the pieces of a context of a number of tokens."""
    if rotates_by_length(config, length):
        # The first piece alone would be rotated like a short text, so read the whole text at once.
        return [read_length(length, config.max_length)]
    # Pad to a multiple of the smallest piece, then divide into the largest pieces that fit.
    left, pieces = round_up(length, CHUNKS[-1]), []
    while left:
        pieces.append(next(size for size in CHUNKS if size <= left))
        left -= pieces[-1]
    return pieces


@dataclasses.dataclass
class Reading:
    """A text whose context is being read."""

    text: OpenText
    row: int
    ids: np.ndarray
    """The tokens with padding on the left, int32[1, T]."""
    pieces: list[int]
    """The sizes of the pieces that have not been read."""
    rows: RowCaches | None = None

    @classmethod
    def of(cls, text: OpenText, row: int, config: TransformerConfig) -> "Reading":
        """Returns the reading of a text, and sets the next slot of the text after its context."""
        length = len(text.context)
        pieces = pieces_of(length, config)
        text.slot = sum(pieces)
        ids = np.zeros((1, text.slot), np.int32)
        ids[0, text.slot - length :] = text.context
        return cls(text, row, ids, pieces)
