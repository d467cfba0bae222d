"""Texts of any length as one array of few shapes, so that few programs are compiled."""

from collections.abc import Sequence

import numpy as np

SHORTEST = 16


def padded(
    rows: Sequence[Sequence[int]], batch_size: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and their attention mask, int32 `[batch_size, T]`; T is a power of two.

    Args:
      rows: token ids, at most `batch_size` rows of at most `longest`.
      batch_size: rows of the array; those left over are padding.
      longest: T is never larger.
    """
    most = max(SHORTEST, *map(len, rows))
    ids, mask = np.zeros((2, batch_size, min(1 << (most - 1).bit_length(), longest)), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask
