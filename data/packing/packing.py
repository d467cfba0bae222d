"""Packing: pure functions that assign target tokens, or sentence pairs, to rows.

A row holds the tokens of one example. A **span** is ``(first target token, length)`` inside one
document; a row is a list of spans whose lengths sum to at most ``T``.

*Concat-then-split* concatenates all documents and splits after every ``T`` target tokens: no
padding, and documents are split anywhere. *First-fit* keeps documents whole where possible, and
pads.

For translation the unit is a sentence pair, a source and its target, which are never split. A
row has room for ``T`` tokens on each side; *best-fit* plans which pairs share a row.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import numpy as np

from ..errors import DataError

Span = tuple[int, int]
Packing = Literal["concat", "first-fit"]

# The most rows that are open at once: bounds the planning time at documents × rows.
_OPEN_ROWS = 64


def spans_of_range(first: int, length: int, target_starts: np.ndarray) -> list[Span]:
    """Splits a range of target tokens where documents end.

    Args:
      first: The first target token.
      length: The number of target tokens, at least 1.
      target_starts: The first target token of each document, int64 [num_documents], ascending.

    Returns:
      The spans in order; their lengths sum to ``length``.
    """
    low = np.searchsorted(target_starts, first, "right")
    high = np.searchsorted(target_starts, first + length, "left")
    edges = [first, *target_starts[low:high].tolist(), first + length]
    return [(a, b - a) for a, b in pairwise(edges)]


def concat_then_split(
    row: int, length: int, target_starts: np.ndarray, *, total: int, offset: int
) -> list[Span]:
    """Returns one row of an epoch of ``total // length`` full rows.

    The target tokens form a ring, which is split from ``offset`` on. The ``total % length`` tokens
    that fill no row are left out of this epoch; another epoch's offset leaves out others.

    Args:
      row: In ``[0, total // length)``.
      length: Target tokens in a row, T.
      target_starts: The first target token of each document, int64 [num_documents].
      total: The number of target tokens.
      offset: Where the first row starts, in ``[0, total)``.

    Returns:
      The spans of the row, ``length`` target tokens in total.
    """
    first = (offset + row * length) % total
    before_end = min(length, total - first)
    spans = spans_of_range(first, before_end, target_starts)
    if before_end < length:
        spans += spans_of_range(0, length - before_end, target_starts)
    return spans


def split_once(row: int, length: int, target_starts: np.ndarray, total: int) -> list[Span]:
    """Returns one of ``ceil(total / length)`` rows that hold every target token once, in order.

    Args:
      row: In ``[0, ceil(total / length))``.
      length: Target tokens in a row, T.
      target_starts: The first target token of each document, int64 [num_documents].
      total: The number of target tokens.

    Returns:
      The spans of the row; the last row may be shorter than ``length``.
    """
    first = row * length
    return spans_of_range(first, min(length, total - first), target_starts)


def first_fit(target_counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Plans rows that keep documents whole; a longer document is split into pieces of T.

    Each piece goes to the first of a bounded number of open rows that has room; if none
    has, a new row opens and, where too many are open, the fullest one closes. Nothing is
    lost, and the plan is a pure function of its arguments.

    Args:
      target_counts: The number of target tokens of each document, all positive, int64
        [num_documents].
      length: Target tokens in a row, T.

    Returns:
      ``spans`` int64 [num_spans, 2] of (first target token, length), grouped by row, and
      ``row_starts`` int64 [num_rows + 1]: row ``r`` has ``spans[row_starts[r] :
      row_starts[r + 1]]``.
    """
    closed: list[list[Span]] = []
    rows: list[list[Span]] = []
    room: list[int] = []
    for first, size in _pieces(target_counts, length):
        # The first open row with enough room takes the piece.
        index = next((i for i, free in enumerate(room) if free >= size), None)
        if index is None:
            if len(rows) == _OPEN_ROWS:  # close the row with the least room
                fullest = min(range(len(room)), key=room.__getitem__)
                closed.append(rows.pop(fullest))
                room.pop(fullest)
            index = len(rows)
            rows.append([])
            room.append(length)
        rows[index].append((first, size))
        room[index] -= size
        if room[index] == 0:  # full: no later piece can go here
            closed.append(rows.pop(index))
            room.pop(index)
    closed += rows
    spans = np.asarray([span for row in closed for span in row], np.int64).reshape(-1, 2)
    row_starts = np.cumsum([0, *map(len, closed)], dtype=np.int64)
    return spans, row_starts


def best_fit(
    source_sizes: np.ndarray, target_sizes: np.ndarray, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Plans rows of whole sentence pairs, with the same room on either side.

    The pairs come in an order drawn from the seed. Each goes to the fullest of a bounded
    number of open rows that has room for both its sides; if none has, a new row opens and,
    where too many are open, the one with the least room on a side closes. A pair with a
    side longer than a row is in no row. The plan is a pure function of its arguments.

    Args:
      source_sizes: Tokens of each source, int64 [num_pairs].
      target_sizes: Tokens of each target, int64 [num_pairs].
      length: Tokens in a row on each side.
      seed: Of the order; any integer.

    Returns:
      ``pairs`` int64 [num_fitting], grouped by row, and ``row_starts`` int64
      [num_rows + 1]: row ``r`` has ``pairs[row_starts[r] : row_starts[r + 1]]``.
    """
    order = np.flatnonzero(np.maximum(source_sizes, target_sizes) <= length)
    np.random.default_rng(seed % 2**64).shuffle(order)
    rows: list[list[int]] = [[] for _ in range(_OPEN_ROWS)]
    closed: list[list[int]] = []
    room = np.full((2, _OPEN_ROWS), length)  # free tokens of each side of each open row
    of_sources, of_targets = room
    unused = 2 * length
    in_all = np.full(_OPEN_ROWS, unused)  # free tokens of both sides together
    sizes = zip(source_sizes[order].tolist(), target_sizes[order].tolist(), strict=True)
    for pair, (source, target) in zip(order.tolist(), sizes, strict=True):
        # The fullest row with room on both sides; an empty row is the last choice.
        fits = (of_sources >= source) & (of_targets >= target)
        index = int(np.where(fits, in_all, unused + 1).argmin())
        if not fits[index]:  # close the row with the least room on a side, and reuse its slot
            index = int(np.minimum(of_sources, of_targets).argmin())
            closed.append(rows[index])
            rows[index], room[:, index], in_all[index] = [], length, unused
        rows[index].append(pair)
        room[:, index] -= source, target
        in_all[index] -= source + target
    closed += filter(None, rows)
    pairs = np.asarray([pair for row in closed for pair in row], np.int64)
    return pairs, np.cumsum([0, *map(len, closed)], dtype=np.int64)


def check_fills_a_row(total: int, length: int) -> None:
    """Checks that a corpus has at least one row.

    Args:
      total: The number of target tokens in the corpus.
      length: Target tokens in a row, T.

    Raises:
      DataError: It has not.
    """
    if total < length:
        raise DataError(
            f"the corpus has {total} pairs of input and label, shorter than one row of {length}: "
            f"give more text, or rows of at most {total}"
        )


def _pieces(target_counts: np.ndarray, length: int) -> Iterator[Span]:
    first = 0
    for count in target_counts.tolist():
        for start in range(0, count, length):
            yield first + start, min(length, count - start)
        first += count
