"""Orders examples so that no text occurs twice in a batch.

If the other texts in a batch are used as negatives, a second example with the same text would be a
false negative. The order of an epoch depends only on the seed, the epoch and the batch size.
"""

import itertools

import numpy as np

from ..common.errors import DataError
from ..common.fields import require

ABSENT = -1
"""The value that replaces the index of a missing text."""


def distinct_order(keys: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divides the examples of an epoch into batches without equal texts.

    The examples are shuffled. Each example is then added to the first batch that has room and comes
    after all batches that contain one of its texts. The last batches are filled with the remaining
    examples and then with repeated examples.

    Args:
      keys: The indices of the texts in each example, or -1 for a missing text, int [n, K]. Equal
        texts have the same index.
      batch_size: The size of a batch, B.
      seed: The seed of the order, any integer.
      epoch: The epoch.

    Returns:
      The indices of the examples in each batch, int64 [ceil(n / B), B].

    Raises:
      DataError: There are too few examples without common texts to fill the batches.
    """
    texts = [tuple({*row} - {ABSENT}) for row in keys.tolist()]
    num_batches = -(-len(texts) // batch_size)
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    # `earliest` maps each text to the first batch that may contain it. `following` maps each batch
    # to the next batch with room.
    earliest = [0] * (int(keys.max()) + 1)
    following = list(range(num_batches + 1))
    # Add each example to the earliest possible batch. `late` collects the examples that fit into
    # none.
    order, next_order = (shuffled(len(texts), seed, epoch, turn) for turn in range(2))
    late = []
    for index in order:
        batch = _with_room(following, max((earliest[text] for text in texts[index]), default=0))
        if batch == num_batches:
            late.append(index)
            continue
        batches[batch].append(index)
        # Later examples with one of these texts must be added to later batches.
        for text in texts[index]:
            earliest[text] = batch + 1
        if len(batches[batch]) == batch_size:
            following[batch] = batch + 1
    # Prefer examples that are not yet in any batch.
    _fill(batches, texts, [*late, *next_order], batch_size)
    return np.array(batches, np.int64)


def _with_room(following: list[int], batch: int) -> int:
    """Returns the first batch with room from `batch` on, or the batch count if all are full."""
    while following[batch] != batch:
        # Path halving: skip one entry of the path to make later calls faster.
        following[batch] = following[following[batch]]
        batch = following[batch]
    return batch


def _fill(
    batches: list[list[int]], texts: list[tuple[int, ...]], spare: list[int], batch_size: int
) -> None:
    """Fills each batch with the next spare examples that share no text with the batch."""
    # All batches draw from the same cycle, so each batch continues where the previous batch
    # stopped.
    candidates = itertools.cycle(spare)
    for batch in batches:
        present = set(itertools.chain.from_iterable(texts[index] for index in batch))
        # Also remember the examples, because an example without texts shares no text with itself.
        used = set(batch)
        # Try each spare example only once.
        for index in itertools.islice(candidates, len(spare)):
            if len(batch) == batch_size:
                break
            if index not in used and present.isdisjoint(texts[index]):
                batch.append(index)
                used.add(index)
                present.update(texts[index])
        require(
            len(batch) == batch_size,
            f"batch_size {batch_size} needs as many examples without a common text, and a batch "
            f"has {len(batch)}: lower batch_size to at most {len(batch)}, or give more examples",
            error=DataError,
        )


def shuffled(number: int, seed: int, epoch: int, turn: int) -> list[int]:
    """Returns a random permutation of `range(number)` that differs for each turn of an epoch."""
    # Seed sequences produce the same random numbers in every version of NumPy.
    sequence = np.random.SeedSequence([seed % 2**64, epoch, turn])
    return np.argsort(sequence.generate_state(number, np.uint64), kind="stable").tolist()
