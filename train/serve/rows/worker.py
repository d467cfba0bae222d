"""Computes the rows of several requests together, in batches of similar length.

A row is a text to embed, a pair to score, an example to classify or a text to translate, encoded as
tokens. Rows wait in the order of arrival. Each step computes one batch. It considers the oldest
waiting rows, up to a total of `batch_tokens` tokens, and divides them by length into batches
(`padded_batches`). It computes the batch that contains the oldest row. The result of a row does not
depend on the other rows of its batch.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ....data.common.json_text import JsonValue
from ....data.common.progress import LogFn
from ....models.decoding.padding import power_of_two
from ....models.text.bucketing import (
    MOST_ROWS,
    padded_batches,
    padded_length,
    padded_rows,
)
from ..app import Served, Service
from ..engine import Task, fail_tasks
from .settings import RowSettings

RowTask: TypeAlias = "Task[Row, Any]"
MANY = 1 << 20
"""An upper bound on the number of rows in a batch."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The work of a task.

    Attributes:
        item: the object that the worker's function reads.
        length: the number of tokens of the row.
        group: the group of the row. Only rows of the same group are computed together.
        copies: the number of sequences that the device computes for the row, such as the beams of a
          search.
    """

    item: Any
    length: int
    group: Hashable = None
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """A function that computes a result for each row. The rows do not affect each other.

    Attributes:
        front: the model, which encodes the texts of requests.
        parts: yields None after each part of a long computation, and finally the results for all
          items, in order.
        longest: the maximum number of tokens of a row.
        filler: returns an item with a given number of tokens, for compiling programs.
    """

    front: Any
    parts: Callable[[Sequence[Any]], Iterator[Sequence[Any] | None]]
    longest: int
    filler: Callable[[int], Any]

    def compute(self, items: Sequence[Any]) -> Sequence[Any]:
        """Returns a result for each item, in order."""
        results: Any
        *_, results = self.parts(items)
        return results


class RowWorker:
    """Computes a `RowFunction` for the rows of all requests; see `engine.Worker`.

    Args:
        name: the names of the model and of the kind of work, for the log.
        function: the function.
        settings: the settings of batches.
        shapes: the batch shapes (number of rows, padded length) to compile before the first
          request.
        log: called with a line for each compiled program.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        function: RowFunction,
        settings: RowSettings = RowSettings(),
        *,
        shapes: Sequence[tuple[int, int]] = (),
        log: LogFn = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.front, self.settings = function.front, settings
        self._name, self._function, self._shapes = name, function, shapes
        self._log, self._clock = log, clock
        self._arrivals: dict[RowTask, float] = {}
        """The arrival time of each waiting task, in the order of arrival."""
        self._batch: Sequence[RowTask] = ()
        """The tasks of the batch that is being computed."""
        self._parts: Iterator[Sequence[Any] | None] = iter(())
        """The remaining parts of this batch's computation."""

    @property
    def wait(self) -> float | None:
        """Seconds until the next step: 0 if a batch is full or has begun, None if no row waits."""
        if self._batch:
            return 0.0
        oldest = next(iter(self._arrivals), None)
        if oldest is None:
            return None
        left = self.settings.batch_wait - (self._clock() - self._arrivals[oldest])
        return left if left > 0 and not self._is_full() else 0.0

    def add(self, task: RowTask) -> None:
        """Appends a row."""
        self._arrivals[task] = self._clock()

    def cancel(self, task: RowTask) -> None:
        """Drops a row."""
        self._arrivals.pop(task, None)

    def reset(self) -> None:
        """Drops all rows."""
        self._arrivals.clear()
        self._batch = ()

    def step(self) -> None:
        """Computes one part of the oldest row's batch; sends the results after the last part."""
        if not self._batch:
            self._batch = self._next_batch()
            for task in self._batch:
                del self._arrivals[task]
            self._parts = self._function.parts([task.work.item for task in self._batch])
        batch = self._batch
        try:
            results = next(self._parts)
        except Exception as error:  # a failed batch must not end the worker
            self._batch = ()
            fail_tasks(batch, error)
            return
        # The next step computes the next part, unless all clients have disconnected.
        if results is not None or all(task.ended for task in batch):
            self._batch, self._parts = (), iter(())
        if results is not None:
            for task, result in zip(batch, results, strict=True):
                task.send(result, last=True)

    def warm_up(self) -> tuple[()]:
        """Compiles the programs for each batch shape in `shapes`."""
        for num_rows, length in self._shapes:
            start = time.perf_counter()
            self._function.compute([self._function.filler(length)] * num_rows)
            shape = f"{num_rows} × {length} tokens"
            self._log(f"{self._name}: {shape} compiled in {time.perf_counter() - start:.1f} s")
        if not self.settings.warm_up_all:
            longest = max((length for _, length in self._shapes), default=0)
            what = f"texts of more than {longest} tokens compile" if longest else "compiles"
            self._log(f"{self._name}: {what} at first use; --warm-up-all compiles more now")
        return ()

    def _window(self) -> Iterator[tuple[RowTask, int]]:
        """Yields the oldest tasks of one group and their padded lengths, up to `batch_tokens`.

        The number of sequences is also limited, because all other work of the server waits until
        the batch ends.
        """
        room, first = self.settings.batch_tokens, next(iter(self._arrivals)).work
        # The search pads the number of rows to a power of two.
        most = power_of_two(max(1, MOST_ROWS // first.copies) + 1) // 2
        left = most if first.copies > 1 else MANY
        for task in self._arrivals:
            tokens = padded_length(task.work.length, self._function.longest)
            # Always yield the oldest row, even if this row exceeds the limit.
            if tokens > room and room < self.settings.batch_tokens:
                return
            if task.work.group == first.group and left:
                room, left = room - tokens, left - 1
                yield task, tokens

    def _next_batch(self) -> list[RowTask]:
        """Returns the batch that contains the oldest task."""
        tasks, lengths = zip(*self._window(), strict=True)
        batches = padded_batches(lengths, self._function.longest)
        # Index 0 is the oldest row, because tasks wait in the order of arrival.
        return next([tasks[i] for i in batch] for batch, _ in batches if 0 in batch)

    def _is_full(self) -> bool:
        """Returns whether the batch with the oldest row has no space for another row."""
        batch = self._next_batch()
        # The first row of a batch is its longest row.
        length = padded_length(batch[0].work.length, self._function.longest)
        return len(batch) >= padded_rows(MANY, length)


async def computed(
    service: Service, model: Served, worker: RowWorker, rows: list[Row]
) -> list[Any]:
    """Computes the rows of a request, and returns a result for each row.

    Raises:
        ApiError: the queue is full, or the request took too long.
    """
    num_tokens = sum(row.length for row in rows)
    results = await service.engine.submit(worker, rows, tokens=num_tokens).results()
    service.metrics.tokens.labels(model.name, "prompt").inc(num_tokens)
    return results


def outputs_of_rows(outputs: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Splits output arrays along their first axis, and returns the outputs of each row."""
    rows = zip(*outputs.values(), strict=True)
    return [dict(zip(outputs, row, strict=True)) for row in rows]


def usage_of(rows: Sequence[Row], written: int = 0) -> dict[str, JsonValue]:
    """Returns the numbers of tokens read and written, in the form of OpenAI's `usage`."""
    read = sum(row.length for row in rows)
    completion: dict[str, JsonValue] = {"completion_tokens": written} if written else {}
    return {"prompt_tokens": read, **completion, "total_tokens": read + written}


def shapes_of_short_rows(function: RowFunction, settings: RowSettings) -> list[tuple[int, int]]:
    """Returns the possible shapes (number of rows, padded length) of batches of short rows."""
    most = function.longest
    if not settings.warm_up_all:
        most = min(settings.warm_up_length, most)
    lengths = dict.fromkeys(padded_length(n, function.longest) for n in range(1, most + 1))
    return [
        (1 << power, length)
        for length in lengths
        for power in range(padded_rows(MANY, length).bit_length())
    ]


def shapes_of_searches(function: RowFunction, settings: RowSettings) -> list[tuple[int, int]]:
    """Returns only the smallest shape, because a search needs several programs for each shape."""
    return shapes_of_short_rows(function, settings)[:1]
