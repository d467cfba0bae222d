"""Texts of any length in batches of few shapes, so that few programs are compiled."""

from collections.abc import Iterator, Sequence

import numpy as np

from ...models.decoding.padding import pad_rows, power_of_two

SHORTEST = 16


def pad_batch(
    rows: Sequence[Sequence[int]], batch_size: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads token ids on the right to `[batch_size, T]`; T is a power of two, or `longest`.

    Args:
        rows: token ids, at most `batch_size` rows of at most `longest`.
        batch_size: rows of the array; those left over are padding.
        longest: T is never larger.

    Returns:
        Ids and their attention mask, both int32 `[batch_size, T]`.
    """
    length = min(power_of_two(max(SHORTEST, *map(len, rows))), longest)
    return pad_rows(rows, num_rows=batch_size, length=length)


def batches_by_length(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yields the numbers of all rows but empty ones, up to `batch_size` at a time.

    The longest come first, and rows of similar length share a batch, so that little is padding.
    """
    order = sorted((i for i, row in enumerate(rows) if row), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
