"""Lists of token ids as arrays of few shapes, so that few programs are compiled."""

from collections.abc import Sequence

import numpy as np


def pad_rows(
    rows: Sequence[Sequence[int]],
    *,
    num_rows: int | None = None,
    length: int | None = None,
    fill: int = 0,
    left: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows of token ids to one array.

    Args:
      rows: token ids of each row.
      num_rows: the number of rows of the result, B; by default that of `rows`. Rows that are
        added are all padding.
      length: the length of the result, T; by default that of the longest row.
      fill: the token that pads.
      left: whether padding stands before a row's tokens instead of after them.

    Returns:
      Ids int32[B, T], and a mask int32[B, T] with 1 where there is a token of `rows`.
    """
    length = max(map(len, rows), default=0) if length is None else length
    shape = (len(rows) if num_rows is None else num_rows, length)
    ids, mask = np.full(shape, fill, np.int32), np.zeros(shape, np.int32)
    for i, row in enumerate(rows):
        first = length - len(row) if left else 0
        ids[i, first : first + len(row)] = row
        mask[i, first : first + len(row)] = 1
    return ids, mask


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`, at least 1."""
    return 1 << max(0, number - 1).bit_length()


def shortened(context: list[int], longest: int) -> list[int]:
    """Drops the oldest tokens of a context that is longer than the model's positions."""
    return context if len(context) <= longest else context[-max(1, longest - longest // 4) :]


FIRST_STAGE = 256
"""A cache for more tokens than these grows. Below, attention to empty slots takes a few percent of
a token's time, and another program seconds to compile."""


def cache_stage(needed: int, most: int) -> int:
    """Returns the length of a cache that holds `needed` tokens now and will hold at most `most`.

    It doubles, so that attention over empty slots at most doubles the work, and n tokens take
    O(log n) compiled programs.
    """
    return min(max(FIRST_STAGE, power_of_two(needed)), most)
