"""Pads lists of token ids to arrays of few different shapes, so that few programs are compiled."""

import itertools
import operator
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
      num_rows: the number of rows of the result, B. Defaults to the number of `rows`. Added rows
        contain only padding.
      length: the length of the result, T. Defaults to the length of the longest row.
      fill: the padding token.
      left: whether padding precedes the tokens of a row.

    Returns:
      Ids int32[B, T], and a mask int32[B, T] with 1 for tokens of `rows`.
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
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def divided(length: int, sizes: Sequence[int]) -> list[int]:
    """Divides a length into as few pieces of the given sizes as possible, the largest first.

    Args:
      length: a multiple of the last size.
      sizes: the sizes in descending order, each a multiple of the next.
    """
    pieces: list[int] = []
    for size in sizes:
        pieces += [size] * (length // size)
        length %= size
    return pieces


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the longest common prefix of two sequences."""
    equal = map(operator.eq, first, second)
    return sum(1 for _ in itertools.takewhile(bool, equal))


def shortened(context: list[int], longest: int) -> list[int]:
    """Returns a context that the model can read.

    A context above the maximum length loses its oldest tokens, and about three quarters of the
    maximum length remain.
    """
    return context if len(context) <= longest else context[-max(1, longest - longest // 4) :]


FIRST_STAGE = 256
"""The smallest length of a growing cache. Attention to this many empty slots takes only a few
percent of the time to compute a token, while compiling another program takes seconds.
"""


def cache_stage(needed: int, most: int) -> int:
    """Returns the length of a cache that needs `needed` slots now and at most `most` slots later.

    Lengths are powers of two, so at most half of the slots that attention reads are empty, and n
    tokens require only O(log n) compiled programs.
    """
    return min(max(FIRST_STAGE, power_of_two(needed)), most)
