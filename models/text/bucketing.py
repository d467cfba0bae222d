"""Pads texts to batches of few different shapes, so that few programs are compiled.

The possible lengths are 16, 32, 48 … 256. Greater lengths are multiples of a sixteenth of the next
power of two. The possible numbers of rows are powers of two up to `MOST_ROWS`. A model with a
maximum length of 512 tokens is therefore compiled for at most 24 lengths with 6 numbers of rows
each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from ..decoding.padding import pad_rows, power_of_two, round_up

SHORTEST = 16
MOST_ROWS = 32
TOKENS_AT_ONCE = 1 << 15
"""Maximum number of tokens in a batch. A batch of this size fits into the memory of any device that
has space for the model."""
TOKENS_IN_CACHE = 1024
"""Maximum number of tokens in a batch on a CPU. The activations of a larger batch would not fit
into the CPU's caches (MiniLM takes 0.25 ms per token with 8 rows of 128, and 0.29 ms with 32
rows)."""


def padded_length(number: int, longest: int) -> int:
    """Returns the padded length of rows with at most `number` tokens; it is at most `longest`."""
    step = max(SHORTEST, power_of_two(number) // 16)
    return min(round_up(max(number, 1), step), longest)


def padded_rows(number: int, length: int) -> int:
    """Returns the number of rows of the next batch, given the number of remaining rows.

    The number of rows is a power of two, and at most a quarter of these rows are padding. For
    example, five rows are divided into a batch of four and a batch of one.
    """
    tokens = TOKENS_IN_CACHE if jax.default_backend() == "cpu" else TOKENS_AT_ONCE
    # Find the largest power of two such that a batch with this many rows does not exceed the
    # maximum number of tokens.
    most = min(MOST_ROWS, power_of_two(max(1, tokens // length) + 1) // 2)
    rows = min(power_of_two(number), most)
    # Halve the batch if more than a quarter of its rows would be padding.
    return rows // 2 if 4 * number < 3 * rows else rows


def padded_batches(lengths: Sequence[int], longest: int) -> Iterator[tuple[list[int], int]]:
    """Divides all nonempty rows into batches, and chooses the padded number of rows of each batch.

    To reduce padding, each batch contains rows of similar length. The longest rows come first.

    Args:
        lengths: the number of tokens of each row.
        longest: the largest padded length.

    Yields:
        The indices of the rows of a batch, longest first, and the padded number of rows of the
        batch.
    """
    order = _longest_first(lengths)
    start = 0
    while start < len(order):
        # The first row of a batch is its longest row, so it determines the padded length.
        length = padded_length(lengths[order[start]], longest)
        num_rows = padded_rows(len(order) - start, length)
        yield order[start : start + num_rows], num_rows
        start += num_rows


def pad_batch(
    rows: Sequence[Sequence[int]], num_rows: int, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads token ids on the right to `[num_rows, T]`, where T is given by `padded_length`.

    Args:
        rows: the token ids of at most `num_rows` rows with at most `longest` tokens each.
        num_rows: the number of rows of the array. Additional rows contain padding.
        longest: the maximum of T.

    Returns:
        Ids and their attention mask, both int32 `[num_rows, T]`.
    """
    length = padded_length(max(map(len, rows)), longest)
    return pad_rows(rows, num_rows=num_rows, length=length)


def by_length(
    outputs: Callable[[dict[str, np.ndarray]], Mapping[str, jax.Array]],
    example: Callable[[int], Mapping[str, np.ndarray]],
    lengths: Sequence[int],
) -> dict[str, np.ndarray]:
    """Applies a function to many examples. Each batch contains examples of similar length.

    Args:
        outputs: a compiled function that maps a batch to its outputs. Each array of the batch
            stacks the arrays of its examples.
        example: returns the arrays of an example, given its index. Arrays with the shape of
          `input_ids` are truncated to the padded length of a batch.
        lengths: the number of tokens of each example before padding, at least 1.

    Returns:
        The outputs for all examples. Outputs at trailing padding positions are not computed but set
        to 0.
    """
    first = example(0)
    shape = first["input_ids"].shape
    # Find the shapes of the full-length outputs without computing them.
    whole = {name: x[None] for name, x in first.items()}
    results = {
        name: np.zeros((len(lengths), *x.shape[1:]), x.dtype)
        for name, x in jax.eval_shape(outputs, whole).items()
    }
    for batch, num_rows in padded_batches(lengths, shape[-1]):
        length = padded_length(lengths[batch[0]], shape[-1])
        # Pad the batch to `num_rows` and the bucket's length, so that few programs are compiled.
        given = {name: np.zeros((num_rows, *x.shape), x.dtype) for name, x in first.items()}
        rows = list(map(example, batch))
        for name, array in given.items():
            array[: len(batch)] = [row[name] for row in rows]
            # Truncate only arrays that have one value per token.
            if array.shape[1:] == shape:
                given[name] = array[..., :length]
        for name, part in outputs(given).items():
            # Outputs with one value per token are shorter than the full length.
            positions = tuple(map(slice, part.shape[1:]))
            results[name][(batch, *positions)] = np.asarray(part)[: len(batch)]
    return results


def batches_by_length(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Yields batches of up to `batch_size` indices of nonempty rows, the longest rows first.

    The rows are not padded, because the generator pads each batch itself.
    """
    order = _longest_first([*map(len, rows)])
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Returns the indices of the nonempty rows, the longest rows first."""
    return sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
