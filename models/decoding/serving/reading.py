"""Divides contexts into chunks of a few fixed sizes, so that few programs are compiled."""

import dataclasses

import numpy as np

from ...config import TransformerConfig
from ..cached_context import rotates_by_length
from ..continuous_batch import read_length
from ..padding import divided, round_up
from ..rows import RowCaches
from .row_sampling import OpenText

CHUNKS = (512, 128, 32)
"""Contexts are read in chunks of these sizes."""


def pieces_of(length: int, config: TransformerConfig) -> list[int]:
    """Returns the sizes of the chunks for reading a context of `length` tokens."""
    if rotates_by_length(config, length):
        # Read the whole text at once, because the first of several chunks would get the rotary
        # frequencies of a short text.
        return [read_length(length, config.max_length)]
    return divided(round_up(length, CHUNKS[-1]), CHUNKS)


@dataclasses.dataclass
class Reading:
    """A text whose context is being read."""

    text: OpenText
    ids: np.ndarray
    """The tokens of the context, padded on the left, int32[1, T]."""
    pieces: list[int]
    """The sizes of the chunks that have not been read yet."""
    rows: RowCaches | None = None

    @classmethod
    def of(cls, text: OpenText, config: TransformerConfig) -> "Reading":
        """Prepares to read the context of a text, and sets the text's next slot."""
        length = len(text.context)
        pieces = pieces_of(length, config)
        text.slot = sum(pieces)
        ids = np.zeros((1, text.slot), np.int32)
        ids[0, text.slot - length :] = text.context
        return cls(text, ids, pieces)
