"""Orders labeled examples so that each label in a batch has at least two examples.

Losses that compare the labels of the texts in a batch require both equal and different labels. The
order of an epoch depends only on the seed, the epoch and the batch size.
"""

from collections import defaultdict
from itertools import chain

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from .distinct import shuffled


def label_order(labels: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divides the examples of an epoch into batches, based on their labels.

    Each round selects two examples of each label, with the labels in a random order. The rounds end
    when fewer than two labels have at least two remaining examples. The remaining examples are not
    used in this epoch. The last batch is filled with repeated examples. GroupByLabelBatchSampler of
    sentence-transformers uses the same rounds.

    Args:
      labels: The label of each example, int [n].
      batch_size: The size of a batch, B.
      seed: The seed of the order, any integer.
      epoch: The epoch.

    Returns:
      The indices of the examples in each batch, int64 [N, B]. N is the same in every epoch.

    Raises:
      DataError: Fewer than two labels have at least two examples, or B is odd, less than 4 or too
        large.
    """
    require(
        batch_size >= 4 and batch_size % 2 == 0,
        f"batch_size {batch_size} must be even and at least 4 for texts with labels, so that each "
        "label of a batch has two texts: change batch_size",
        error=DataError,
    )
    # Shuffle the examples before grouping them by label, so that the examples of each label are in
    # a random order.
    order = shuffled(len(labels), seed, epoch, 0)
    by_label = defaultdict[int, list[int]](list)
    for index in order:
        by_label[int(labels[index])].append(index)
    # A label with only one example cannot form a pair.
    left = {label: examples for label, examples in by_label.items() if len(examples) > 1}
    require(
        len(left) > 1,
        f"{len(left)} labels have two or more texts, and a loss by labels needs two such labels: "
        "give more texts",
        error=DataError,
    )
    pairs = _rounds(left, seed, epoch)
    count = batch_size // 2
    # Fill the last batch with the first pairs of the epoch that are not in this batch. Prefer
    # labels that are not in this batch, because the losses require different labels in a batch.
    last = pairs[len(pairs) // count * count :]
    used = set(chain.from_iterable(last))
    present = set(labels[sorted(used)].tolist())
    spare = list(filter(used.isdisjoint, pairs))
    spare.sort(key=lambda pair: int(labels[pair[0]]) in present)
    pairs += spare[: -len(pairs) % count]
    require(
        pairs and len(pairs) % count == 0,
        f"batch_size {batch_size} needs {count} pairs of texts with equal labels, and an epoch has "
        f"{len(pairs)}: lower batch_size to at most {2 * len(pairs)}, or give more texts",
        error=DataError,
    )
    # Reshape [pairs, 2] to [N, B], since a batch contains B / 2 pairs.
    return np.array(pairs, np.int64).reshape(-1, batch_size)


def _rounds(left: dict[int, list[int]], seed: int, epoch: int) -> list[tuple[int, int]]:
    """Returns pairs of examples with the same label, in rounds over all labels."""
    # Turn 0 shuffles the examples, and each round shuffles the labels with another turn.
    pairs, turn, last = list[tuple[int, int]](), 1, None
    while len(left) > 1:
        names = sorted(left)
        names = [names[i] for i in shuffled(len(names), seed, epoch, turn)]
        # Consecutive pairs must have different labels, so that each batch has several labels.
        if names[0] == last:
            names[:2] = names[1::-1]
        pairs += [(left[name].pop(), left[name].pop()) for name in names]
        left = {name: examples for name, examples in left.items() if len(examples) > 1}
        turn, last = turn + 1, names[-1]
    return pairs
