"""An order of examples that never puts a text twice into a batch.

With in-batch negatives, a second example with the same text would be a wrong negative. The order of
an epoch depends only on the seed, the epoch and the batch size.
"""

import itertools

import numpy as np

from ..common.errors import DataError
from ..common.fields import require

ABSENT = -1
"""The number that marks a missing text of an example."""


def distinct_order(keys: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Divides the examples of an epoch into batches without equal texts.

    Examples are shuffled. Each example goes to the first batch with room after the last batch that
    has one of its texts. The last batches are filled with the remaining examples, and then with
    repeated examples.

    Args:
      keys: The number of each text of each example, or -1, int [n, K].
      batch_size: The size of a batch, B.
      seed: The seed of the order, any integer.
      epoch: The epoch.

    Returns:
      The indices of the examples, int64 [n / B rounded up, B].

    Raises:
      DataError: Too few examples have different texts.
    """
    texts = [tuple({*row} - {ABSENT}) for row in keys.tolist()]
    number = -(-len(texts) // batch_size)
    batches: list[list[int]] = [[] for _ in range(number)]
    # The first batch that may contain each text, and the next batch with room from each batch on.
    earliest = [0] * (int(keys.max()) + 1)
    following = list(range(number + 1))
    # Give each example to the earliest possible batch; `late` collects examples without a batch.
    order, next_order = (shuffled(len(texts), seed, epoch, turn) for turn in range(2))
    late = []
    for index in order:
        batch = _with_room(following, max((earliest[text] for text in texts[index]), default=0))
        if batch == number:
            late.append(index)
            continue
        batches[batch].append(index)
        # Another example with one of these texts goes to a later batch.
        for text in texts[index]:
            earliest[text] = batch + 1
        if len(batches[batch]) == batch_size:
            following[batch] = batch + 1
    # Prefer examples that found no batch to repeated examples.
    _fill(batches, texts, [*late, *next_order], batch_size)
    return np.array(batches, np.int64)


def _with_room(following: list[int], batch: int) -> int:
    """Returns the first batch with room from a batch on, or the number of batches."""
    while following[batch] != batch:
        # Skip one entry of the path, which shortens the path of later calls.
        following[batch] = following[following[batch]]
        batch = following[batch]
    return batch


def _fill(
    batches: list[list[int]], texts: list[tuple[int, ...]], spare: list[int], batch_size: int
) -> None:
    """Fills each batch with the next spare examples whose texts it does not have yet."""
    # All batches draw from the same cycle, so that each batch continues where the previous batch
    # stopped.
    candidates = itertools.cycle(spare)
    for batch in batches:
        present = {text for index in batch for text in texts[index]}
        used = set(batch)
        # Look at each spare example once.
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
    """Returns a permutation of `range(number)`, for a turn of an epoch."""
    # Seed sequences give the same numbers under every version of numpy.
    sequence = np.random.SeedSequence([seed % 2**64, epoch, turn])
    return np.argsort(sequence.generate_state(number, np.uint64), kind="stable").tolist()
