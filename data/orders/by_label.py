"""An order of labeled examples. A batch has at least two examples of each of its labels.

Losses that compare the texts of a batch by their labels need both equal and different labels. The
order of an epoch depends only on the seed, the epoch and the batch size.
"""

from collections import defaultdict
from itertools import chain

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from .distinct import shuffled


def label_order(labels: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divides the examples of an epoch into batches by label.

    Each round selects two examples of each label, in a random order of the labels. The rounds end
    when fewer than two labels have two examples left. The other examples are left out of this
    epoch. The last batch is filled with repeated examples. GroupByLabelBatchSampler of
    sentence-transformers has the same rounds.

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
        "label of a batch has two texts: change batch_size",
        error=DataError,
    )
    # Group the shuffled examples by label, so that each label has its examples in a random order.
    order = shuffled(len(labels), seed, epoch, 0)
    by_label = defaultdict[int, list[int]](list)
    for index in order:
        by_label[int(labels[index])].append(index)
    # A label with a single example gives no pair.
    left = {label: examples for label, examples in by_label.items() if len(examples) > 1}
    require(
        len(left) > 1,
        f"{len(left)} labels have two or more texts, and a loss by labels needs two such labels: "
        "give more texts",
        error=DataError,
    )
    pairs = _rounds(left, seed, epoch)
    count = batch_size // 2
    # Fill the last batch with the epoch's first pairs that are not yet in the batch. Prefer pairs
    # of labels that are not in the batch, because losses by label need different labels in a batch.
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
    # [pairs, 2] to [N, B]: a batch has B / 2 pairs.
    return np.array(pairs, np.int64).reshape(-1, batch_size)


def _rounds(left: dict[int, list[int]], seed: int, epoch: int) -> list[tuple[int, int]]:
    """Returns pairs of examples with the same label, alternating between labels."""
    # Turn 0 shuffles the examples. Each round shuffles the labels with a later turn.
    pairs, turn, last = list[tuple[int, int]](), 1, None
    while len(left) > 1:
        names = sorted(left)
        names = [names[i] for i in shuffled(len(names), seed, epoch, turn)]
        # Neighboring pairs must have different labels, so that each batch has several labels.
        if names[0] == last:
            names[:2] = names[1::-1]
        pairs += [(left[name].pop(), left[name].pop()) for name in names]
        left = {name: examples for name, examples in left.items() if len(examples) > 1}
        turn, last = turn + 1, names[-1]
    return pairs
