"""Batches examples with Grain, in a global order that depends only on the seed.

A batch is a pure function of ``(seed, step)``. Item ``g = step * batch_size + i`` is example
``permutation(seed, epoch)[g % num_examples]`` of epoch ``g // num_examples``. Each batch is divided
into ``n`` equal parts, and process ``p`` of ``n`` makes part ``p``. The global batch therefore does
not depend on the number of processes or workers, and the step alone determines the position of a
run in its data. A type of data may replace this permutation and decide which of its examples share
a batch; see ``data/orders``. If the data are a mixture, ``mixture`` chooses the source of each
example, and the examples of each source keep the order that they would have in a run with this
source alone.

Each type of data defines an ``ExampleSource``; this file batches the examples of all types.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import numpy as np
from absl import flags

from .common.errors import DataError
from .common.fields import require, require_type
from .dataset import ExampleSource, OrderedExamples, PickledByFields, stacked
from .mixture import MIXTURE, MixedExamples

Batch = dict[str, np.ndarray]
IteratorState = dict[str, Any]
"""The position of an iterator in its data, as a JSON object."""

# The number of rounds that ``grain.MapDataset.shuffle`` uses.
_SHUFFLE_ROUNDS = 4


@dataclass(frozen=True)
class TrainBatches(PickledByFields):
    """The batches of a training run in order, with random access for Grain.

    Attributes:
      examples: The examples.
      batch_size: The size of the global batch, B.
      seed: The seed of the order, any integer.
      num_steps: The number of batches.
      process_index: The index of the part of each batch that this process makes, in
        ``[0, process_count)``.
      process_count: The number of processes; each process makes one part of a batch.
      start: The index of the first batch that is made with this batch size.
      examples_before: The number of examples in the batches before `start`.

    Raises:
      DataError: The batch size is not divisible by the number of processes, or there are too few
        examples that can share a batch.
    """

    examples: ExampleSource
    batch_size: int
    seed: int
    num_steps: int
    process_index: int = 0
    process_count: int = 1
    start: int = 0
    examples_before: int = 0

    def __post_init__(self) -> None:
        local_batch_size(self.batch_size, self.process_count)
        # Raise now if no batch can be made.
        _ = self._epoch_size

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, index: int) -> Batch:
        """Makes this process's part of a batch, with arrays of shape [B / process_count, ...]."""
        local = local_batch_size(self.batch_size, self.process_count)
        # The indices count the examples of the whole run, so an epoch may end within a batch.
        first = self.read_before(index) + self.process_index * local
        return stacked([self.examples.example(*self._at(g)) for g in range(first, first + local)])

    def read_before(self, step: int) -> int:
        """Returns the number of examples in all batches before a step, including earlier stages."""
        return self._before + (step - self.start) * self.batch_size

    def _at(self, g: int) -> tuple[int, int]:
        """Converts the index of an example in the run to its epoch and its index in the epoch."""
        if isinstance(self.examples, MixedExamples):
            part, g = self.examples.locate(g)
            number = self.examples.parts[part].examples.num_examples
            # The examples of each source have the same epochs and the same order as in a run with
            # this source alone.
            epoch, position = divmod(g, number)
            index = _shuffled(position, number, self.seed, epoch)
            return epoch, self.examples.start(part) + index
        # If the examples allow any order, each epoch is a random permutation.
        size = self._epoch_size
        if size is None:
            number = self.examples.num_examples
            epoch, position = divmod(g, number)
            return epoch, _shuffled(position, number, self.seed, epoch)
        # An epoch consists of whole batches.
        epoch, position = divmod(g, size)
        order = self._order_of(epoch)
        assert order is not None
        return epoch, int(order.flat[position])

    @property
    def _before(self) -> int:
        # If the source decides which examples share a batch, all earlier batches were complete.
        whole = -(-self.examples_before // self.batch_size) * self.batch_size
        return self.examples_before if self._epoch_size is None else whole

    @cached_property
    def _epoch_size(self) -> int | None:
        """The number of examples in the batches of an epoch, or None if any order is allowed."""
        order = self._order_of(0)
        return None if order is None else order.size

    def _order_of(self, epoch: int) -> np.ndarray | None:
        """Returns the batches of an epoch, or None if any order is allowed."""
        if not isinstance(self.examples, OrderedExamples):
            return None
        if epoch not in self._orders:
            # Cache only one epoch, because batches are read in order.
            self._orders.clear()
            self._orders[epoch] = self.examples.batches(self.batch_size, self.seed, epoch)
        return self._orders[epoch]

    @cached_property
    def _orders(self) -> dict[int, np.ndarray | None]:
        """A cache that holds the batches of one epoch."""
        return {}


class BatchIterator(grain.DatasetIterator[Batch]):
    """Iterates over the batches of a run and reads ahead; the state is the index of the next step.

    Like Grain's iterators, this iterator works with ``grain.checkpoint``. Unlike their states, its
    state does not depend on the number of workers or processes. Reading starts with the first call
    of ``next``, so no batch is made before a state is restored.
    """

    def __init__(self, batches: TrainBatches, num_workers: int = 0) -> None:
        """Creates an iterator at step 0.

        Args:
          batches: The batches in order.
          num_workers: Number of worker processes. If 0, the batches are made in a thread.
        """
        super().__init__()
        self._batches = batches
        self._num_workers = num_workers
        self._step = 0
        self._reader: grain.DatasetIterator[Batch] | None = None

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._step >= len(self._batches):
            raise StopIteration
        if self._reader is None:
            self._reader = self._read_from(self._step)
        batch = next(self._reader)
        self._step += 1
        return batch

    def get_state(self) -> IteratorState:
        """Returns ``{"step": index of the next batch}``.

        If the data are a mixture, the state also contains ``mixture``, the position of each source;
        see ``MixedExamples.positions``.
        """
        return self._state_at(self._step)

    def _state_at(self, step: int) -> IteratorState:
        examples = self._batches.examples
        if not isinstance(examples, MixedExamples):
            return {"step": step}
        return {"step": step, MIXTURE: examples.positions(self._batches.read_before(step))}

    def set_state(self, state: IteratorState) -> None:
        """Moves the iterator to the step of a state.

        Raises:
          DataError: The state is not from ``get_state``, its step is beyond the end of the run, or
            its positions in a mixture differ from the positions in this run.
        """
        problem = (
            f"data iterator state {state} does not fit a run of {len(self._batches)} steps: resume "
            "with at least as many steps"
        )
        step = require_type(state.get("step"), int, problem, DataError)
        require(0 <= step <= len(self._batches), problem, DataError)
        expected, start = self._state_at(step).get(MIXTURE), self._batches.start
        # If the data or the batch size changed during the run, `start` is the step of the change;
        # otherwise it is 0.
        require(
            state.get(MIXTURE) == expected or step == start > 0,
            f"the checkpoint of step {step} is at {state.get(MIXTURE)} of its sources, "
            f"but this run is at {expected}: keep the sources, the weights and batch_size",
            DataError,
        )
        # The batches that were read ahead belong to the old position; ``next`` starts a new reader.
        self._stop_reading()
        self._step = step

    def close(self) -> None:
        """Stops reading ahead; ``next`` then raises ValueError."""
        self._stop_reading()
        super().close()

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read_from(self, step: int) -> grain.DatasetIterator[Batch]:
        remaining = grain.MapDataset.source(self._batches)[step:]
        # One thread reads a few batches ahead; worker processes provide more parallelism.
        data = remaining.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
        if self._num_workers > 0:
            # Grain's workers read absl's flags, which are parsed only in programs that use absl.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            # Do not start more workers than there are batches.
            workers = min(self._num_workers, len(remaining))
            data = data.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
            )
        return iter(data)


def train_iterator(
    examples: ExampleSource,
    *,
    batch_size: int,
    seed: int,
    num_steps: int,
    process_index: int = 0,
    process_count: int = 1,
    num_workers: int = 0,
    start: int = 0,
    examples_before: int = 0,
) -> BatchIterator:
    """Iterates over the batches of a training run and reads ahead.

    ``get_state`` and ``set_state`` (or ``grain.checkpoint``) resume exactly, even if the number of
    workers or processes changes. Close the iterator after use.

    Args:
      examples: The examples.
      batch_size: The size of the global batch, B.
      seed: The seed of the order, any integer.
      num_steps: The number of batches.
      process_index: The index of the part of each batch that this process reads.
      process_count: The number of processes that share a batch.
      num_workers: Number of worker processes. If 0, the batches are made in a thread.
      start: The index of the first batch with this batch size, if earlier batches of the run had
        another batch size.
      examples_before: The number of examples in the batches before ``start``.

    Returns:
      The iterator. The arrays of each batch have the shape [B / process_count, ...].

    Raises:
      DataError: ``batch_size`` is not divisible by ``process_count``.
    """
    batches = TrainBatches(
        examples,
        batch_size,
        seed,
        num_steps,
        process_index,
        process_count,
        start=start,
        examples_before=examples_before,
    )
    return BatchIterator(batches, num_workers)


def evaluation_batches(
    examples: ExampleSource, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Iterates once over the examples of epoch 0, in order.

    Args:
      examples: The examples.
      batch_size: The size of the global batch, B.
      process_index: The index of the part of each batch that this process reads.
      process_count: The number of processes that share a batch.

    Yields:
      Batches with arrays of shape [B / process_count, ...]. The last batch is padded with examples
      that contain only zeros. Every process gets the same number of batches.

    Raises:
      DataError: ``batch_size`` is not divisible by ``process_count``.
    """
    local = local_batch_size(batch_size, process_count)
    # An example that contains only zeros is padding; see ``ExampleSource.example``.
    padding = {name: np.zeros_like(array) for name, array in examples.example(0, 0).items()}
    for start in range(0, examples.num_examples, batch_size):
        # Fill the part of the batch that lies beyond the last example with padding.
        first = start + process_index * local
        yield stacked(
            [
                examples.example(0, index) if index < examples.num_examples else padding
                for index in range(first, first + local)
            ]
        )


def local_batch_size(batch_size: int, process_count: int) -> int:
    """Returns how many examples of each batch a process makes.

    Raises:
      DataError: The batch size is not divisible by the number of processes.
    """
    require(
        batch_size > 0 and batch_size % process_count == 0,
        f"batch_size {batch_size} is not divisible by {process_count} processes: choose a positive "
        f"multiple of {process_count}",
        DataError,
    )
    return batch_size // process_count


def _shuffled(index: int, count: int, seed: int, epoch: int) -> int:
    """Maps an index by a permutation of ``range(count)``, without storing the permutation."""
    # Call Grain's function directly, because a Grain data set would take longer than reading a
    # prepared sequence.
    shuffle_seed = _shuffle_seed(seed, epoch)
    return grain.experimental.index_shuffle(
        index, max_index=count - 1, seed=shuffle_seed, rounds=_SHUFFLE_ROUNDS
    )


@functools.lru_cache(maxsize=8)
def _shuffle_seed(seed: int, epoch: int) -> int:
    # Grain accepts seeds of 32 bits and uses neighboring seeds for its epochs, so hash both
    # numbers.
    return int(np.random.SeedSequence([seed % 2**64, epoch]).generate_state(1)[0])
