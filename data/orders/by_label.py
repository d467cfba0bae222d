"""An order of labeled examples in which each batch has at least two of each of its labels.

Losses that compare the texts of a batch by their labels need both equal and different labels. The
order of an epoch depends only on the seed, the epoch and the batch size.
"""

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from .distinct import shuffled


def label_order(labels: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divides the examples of an epoch into batches by label.

    In each round every label in a random order gives two of its examples, until fewer than two
    labels have any left, as GroupByLabelBatchSampler of sentence-transformers does. An example that
    is left over comes in another epoch. The last batch is filled with repeated examples.

    Args:
      labels: The label of each example, int [n].
      batch_size: The size of a batch, B.
      seed: The seed of the order, any integer.
      epoch: The epoch.

    Returns:
      The indices of the examples, int64 [N, B]; N is the same in every epoch.

    Raises:
      DataError: Fewer than two labels have two examples, or B is odd, below 4 or too large.
    """
    require(
        batch_size >= 4 and batch_size % 2 == 0,
        f"batch_size {batch_size} must be even and at least 4 for texts with labels, so that each "
        "label of a batch has two texts: change it",
        error=DataError,
    )
    order = shuffled(len(labels), seed, epoch, 0)
    by_label: dict[int, list[int]] = {}
    for index in order:
        by_label.setdefault(int(labels[index]), []).append(index)
    left = {label: found for label, found in by_label.items() if len(found) > 1}
    require(
        len(left) > 1,
        f"{len(left)} labels have two or more texts, and a loss by labels needs two such labels: "
        "give more texts",
        error=DataError,
    )
    pairs = _rounds(left, seed, epoch)
    count = batch_size // 2
    # Fill the last batch with the first pairs that it does not have.
    last = pairs[len(pairs) // count * count :]
    if last:
        used = {index for pair in last for index in pair}
        spare = [pair for pair in pairs if used.isdisjoint(pair)]
        pairs += spare[: count - len(last)]
    require(
        pairs and len(pairs) % count == 0,
        f"batch_size {batch_size} needs {count} pairs of texts with one label, and an epoch has "
        f"{len(pairs)}: lower it to at most {2 * len(pairs)}, or give more texts",
        error=DataError,
    )
    return np.array(pairs, np.int64).reshape(-1, batch_size)


def _rounds(left: dict[int, list[int]], seed: int, epoch: int) -> list[tuple[int, int]]:
    """Returns pairs of examples with one label, the labels in turn."""
    pairs, turn, last = list[tuple[int, int]](), 1, None
    while len(left) > 1:
        names = sorted(left)
        names = [names[i] for i in shuffled(len(names), seed, epoch, turn)]
        # Two pairs in a row must not have one label, so that each batch has several.
        if names[0] == last:
            names[:2] = names[1::-1]
        pairs += [(left[name].pop(), left[name].pop()) for name in names]
        left = {name: found for name, found in left.items() if len(found) > 1}
        turn, last = turn + 1, names[-1]
    return pairs
