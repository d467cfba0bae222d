"""The engine, a thread that owns the device. asyncio only sends messages to it and receives them.

A `Worker` does one kind of work with one model, such as generation, in small steps. The engine
calls the steps of all workers in turn. A `Job` is the work of one HTTP request. It has one or more
tasks, and yields their events. The number of admitted jobs is limited by their number of requests
and their number of tokens.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from ...data.common.errors import UserError
from ...data.common.fields import NonNegativeInt, Positive, PositiveInt
from .fields import ApiError

Work = TypeVar("Work")
"""The work of a task, which is the object that the worker reads."""
Event = TypeVar("Event")
"""An event of a task, which is an object that the worker sends."""
IDLE_TIME = 1.0
"""The number of seconds without work after which the engine compiles one more program."""
STOP_TIME = 1.0
"""The number of seconds to wait for the engine's current step when the server ends."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the queue and of each request."""

    max_requests: PositiveInt = 512
    """Maximum number of requests that wait or run. Further requests get status 429."""
    max_tokens: PositiveInt = 1_000_000
    """Maximum number of tokens in the requests that wait or run, including the new tokens that
    these requests may generate. Further requests get status 429."""
    time_limit: Positive = 600.0
    """The number of seconds after which a request is canceled with status 504."""
    retry_after: NonNegativeInt = 1
    """The number of seconds after which a refused client may try again."""


@runtime_checkable
class Worker(Protocol[Work, Event]):
    """Does one kind of work with one model. The engine's thread calls all methods."""

    @property
    def wait(self) -> float | None:
        """The seconds until `step` has work: 0 if it has work now, None without tasks."""
        ...

    def add(self, task: "Task[Work, Event]") -> None:
        """Accepts a task."""
        ...

    def cancel(self, task: "Task[Work, Event]") -> None:
        """Removes a task because its client has disconnected. The task may already have ended."""
        ...

    def step(self) -> None:
        """Does a small part of the work, and sends events to its tasks."""
        ...

    def reset(self) -> None:
        """Drops all tasks after an error."""
        ...

    def warm_up(self) -> Sequence[Callable[[], None]]:
        """Compiles the programs of the most common shapes, and logs them.

        Returns functions that compile more programs; the engine calls them while it is idle.
        """
        ...


class Task(Generic[Work, Event]):
    """A part of a job, which is the work for one text."""

    def __init__(self, job: "Job[Event]", index: int, work: Work) -> None:
        """Creates a task.

        Args:
            job: the job.
            index: the index of the task in its job.
            work: the object that the worker reads.
        """
        self.job, self.index, self.work = job, index, work
        self.ended = False
        """Whether the last event was sent, or the task was canceled."""

    def send(self, event: Event, *, last: bool = False) -> None:
        """Sends an event to the job. Only the engine's thread may call this method."""
        if not self.ended:
            self.ended = last
            self.job.engine.post(self.job, (self.index, event, last))

    def fail(self, error: ApiError) -> None:
        """Ends the whole job with an error, unless the task has ended."""
        if not self.ended:
            self.ended = True
            self.job.engine.post(self.job, error)


class Job(Generic[Event]):
    """The work of one request, as an asynchronous context manager and iterator.

    Example::

        async with engine.submit(worker, works, tokens=100) as job:
            async for index, event in job:
                ...

    The iterator yields the index of a task and its event, until all tasks have ended. Leaving the
    context earlier cancels the job.
    """

    def __init__(
        self,
        engine: "Engine",
        worker: Worker[Work, Event],
        works: Sequence[Work],
        tokens: int,
    ) -> None:
        """Creates a job; use `Engine.submit`."""
        self.engine, self.worker, self.tokens = engine, worker, tokens
        self.loop = asyncio.get_running_loop()
        self.tasks = [Task(self, i, work) for i, work in enumerate(works)]
        self._left = len(self.tasks)
        self._events: collections.deque[Posted[Event]] = collections.deque()
        self._arrived = asyncio.Event()
        limit = engine.limits.time_limit
        # This header prevents OpenAI's client library from repeating the failed request.
        late = ApiError(
            504,
            f"the request took longer than {limit:g} s: request fewer tokens",
            code="timeout",
            headers={"x-should-retry": "false"},
        )
        # Use a single timer for all events, because a timer for each event would take as long as
        # handling the event.
        self._timer = self.loop.call_later(limit, self.arrive, late)

    def arrive(self, event: "Posted[Event]") -> None:
        """Receives an event. Only the event loop may call this method."""
        self._events.append(event)
        self._arrived.set()

    async def __aenter__(self) -> "Job[Event]":
        return self

    def __aiter__(self) -> "Job[Event]":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        if not self._left:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, ApiError):
            raise event
        index, event, last = event
        self._left -= last
        return index, event

    async def results(self) -> list[Event]:
        """Waits until all tasks have ended, and returns the last event of each task."""
        async with self:
            last = {index: event async for index, event in self}
        return [last[index] for index in range(len(self.tasks))]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self.engine.leave(self)


Posted: TypeAlias = tuple[int, Event, bool] | ApiError
"""A message to a job: an error, or a tuple of the index of a task, its event, and whether this is
the last event of the task."""
AnyWorker: TypeAlias = Worker[Any, Any]
AnyJob: TypeAlias = Job[Any]


class Engine:
    """Runs the steps of workers in one thread, and admits jobs.

    Args:
        limits: the limits of the queue and of each request.
        workers: all workers.
    """

    def __init__(self, limits: Limits, workers: Sequence[AnyWorker]) -> None:
        self.limits, self.workers = limits, list(workers)
        self.jobs: set[AnyJob] = set()
        """The admitted jobs. Only the event loop may read this set."""
        self.num_tokens = 0
        """The number of tokens of the admitted jobs."""
        self.ready = threading.Event()
        """Set when the warm-up of all workers is complete."""
        self.closing = False
        """Whether new jobs are refused."""
        self.failed = False
        """Whether the engine's thread has ended with an error."""
        self._later: collections.deque[Callable[[], None]] = collections.deque()
        """Functions that compile more programs. They are called while the engine is idle."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[AnyJob, Posted[Any]]]] = {}
        self._tasks: dict[AnyWorker, set[Task[Any, Any]]] = {one: set() for one in self.workers}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self.ready.is_set() and not (self.closing or self.failed)

    def start(self) -> None:
        """Starts the thread, which begins with the warm-up of all workers."""
        self._thread.start()

    def stop(self) -> bool:
        """Ends the thread after its current step. Returns False if the step takes too long."""
        self._inbox.put(None)
        self._thread.join(STOP_TIME)
        return not self._thread.is_alive()

    def check_admission(self, tokens: int = 0) -> None:
        """Checks that the queue has space for one more job.

        Args:
            tokens: the number of tokens of the job.

        Raises:
            ApiError: the queue is full, or the server shuts down.
        """
        if self.closing or self.failed:
            why = "the server shuts down" if self.closing else "the engine has failed"
            headers = self._retry_after
            raise ApiError(503, f"{why}: try again later", code="unavailable", headers=headers)
        full = len(self.jobs) >= self.limits.max_requests
        # An empty queue admits a job of any size. A job with more tokens than the limit would
        # otherwise never be admitted.
        crowded = self.jobs and self.num_tokens + tokens > self.limits.max_tokens
        if full or crowded:
            raise self.overloaded(f"{len(self.jobs):,} requests with {self.num_tokens:,} tokens")

    def overloaded(self, counts: str) -> ApiError:
        """Returns the error for a refused request; `counts` describes the load of the server."""
        message = f"the server is busy ({counts}): try again later"
        return ApiError(429, message, code="overloaded", headers=self._retry_after)

    @property
    def _retry_after(self) -> dict[str, str]:
        return {"Retry-After": str(self.limits.retry_after)}

    def submit(
        self, worker: Worker[Work, Event], works: Sequence[Work], *, tokens: int
    ) -> Job[Event]:
        """Admits a job and gives its tasks to a worker.

        Args:
            worker: one of `workers`.
            works: the object that the worker reads, for each task.
            tokens: the number of tokens that the job adds to the queue.

        Raises:
            ApiError: the queue is full, or the server shuts down.
        """
        self.check_admission(tokens)
        job = Job(self, worker, works, tokens)
        self.jobs.add(job)
        self.num_tokens += tokens
        # Only the engine's thread may use a worker, so it also adds the tasks.
        self._inbox.put(lambda: self._add(job))
        return job

    def leave(self, job: AnyJob) -> None:
        """Releases a job, and cancels the job if it has not ended.

        Only the event loop may call this method.
        """
        if job in self.jobs:
            self.jobs.remove(job)
            self.num_tokens -= job.tokens
            self._inbox.put(lambda: self._drop(job))

    def cancel_all(self, error: ApiError) -> None:
        """Ends all jobs with an error."""
        for job in self.jobs:
            job.arrive(error)

    def post(self, job: AnyJob, event: Posted[Any]) -> None:
        """Stores an event until the step ends. Only the engine's thread may call this method."""
        self._outbox.setdefault(job.loop, []).append((job, event))

    def _add(self, job: AnyJob) -> None:
        self._tasks[job.worker].update(job.tasks)
        if not self.failed:
            for task in job.tasks:
                job.worker.add(task)

    def _drop(self, job: AnyJob) -> None:
        tasks = self._tasks[job.worker]
        for task in job.tasks:
            tasks.discard(task)
            if not task.ended:
                task.ended = True
                job.worker.cancel(task)

    def _run(self) -> None:
        """Runs the engine until `stop`."""
        try:
            for worker in self.workers:
                self._later.extend(worker.warm_up())
            self.ready.set()
            # Take messages, run one step of each worker that has work, and then send the events.
            while self._receive():
                for worker in self.workers:
                    if worker.wait == 0:
                        self._step(worker)
                self._deliver()
        except BaseException as error:
            # The engine does not run any more tasks, so end all jobs. Their clients would otherwise
            # wait forever.
            self.failed = True
            report_fault(error)
            self._refuse()

    def _refuse(self) -> None:
        """Ends all jobs with an error until `stop`, including jobs that are admitted later."""
        shown = ApiError(500, "the engine has failed: start the server again", code="failed")
        while True:
            for task in itertools.chain(*self._tasks.values()):
                task.fail(shown)
            self._deliver()
            message = self._inbox.get()
            if message is None:
                return
            message()

    def _receive(self) -> bool:
        """Takes all messages, and waits for a message if no worker has work.

        Returns False if the engine must stop.
        """
        # Wait until a worker has work, or without a time limit if all workers are idle.
        waits = [wait for worker in self.workers if (wait := worker.wait) is not None]
        compiles = not waits and bool(self._later)
        wait = min(waits, default=IDLE_TIME if compiles else None)
        deadline = None if wait is None else time.monotonic() + wait
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                message = self._inbox.get(timeout=left)
            except queue.Empty:
                if compiles:
                    self._later.popleft()()
                return True
            if message is None:
                return False
            message()
            # Also take the other messages that have arrived, but do not wait for more.
            compiles, deadline = False, time.monotonic()

    def _step(self, worker: AnyWorker) -> None:
        try:
            worker.step()
        except Exception as error:  # the error must not end the server
            fail_tasks(self._tasks[worker], error)
            worker.reset()

    def _deliver(self) -> None:
        """Passes the events of a step to their event loops, with one call for each loop."""
        outbox, self._outbox = self._outbox, {}
        for loop, events in outbox.items():
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(_arrive, events)


def report_fault(error: BaseException) -> None:
    """Prints the type and the traceback of an error.

    The message of an unexpected error may quote a prompt, so it is printed only for a `UserError`.
    """
    trace_text = "".join(traceback.format_tb(error.__traceback__))
    message = str(error) if isinstance(error, UserError) else "(message withheld)"
    print(f"{trace_text}{type(error).__name__}: {message}", file=sys.stderr, flush=True)


def fail_tasks(tasks: Iterable[Task[Any, Any]], error: Exception) -> None:
    """Reports an error of a model, and ends the jobs of the tasks with this error."""
    report_fault(error)
    # Clients see only messages that are meant for them. Other messages may quote a prompt of a
    # different client.
    known = isinstance(error, UserError)
    shown = str(error) if known else f"the model has failed ({type(error).__name__})"
    for task in tasks:
        task.fail(ApiError(500, shown, code="failed"))


def _arrive(events: Sequence[tuple[AnyJob, Posted[Any]]]) -> None:
    for job, event in events:
        job.arrive(event)
