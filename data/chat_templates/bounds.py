"""Bounds of a template's run: steps, characters, processor time.

A step is an iteration of a loop, a call, a filter or an operator. The characters of a result are
counted before it is made, so an endless template always stops at the same place. Processor time,
measured for the thread, bounds slow single steps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..common.errors import DataError

MAX_SOURCE = 1 << 17
"""The longest template, in characters; published templates have up to 20,000."""
MAX_STEPS = 1 << 20
"""Maximum number of steps of a run, in addition to ``STEPS_PER_CHARACTER``."""
STEPS_PER_CHARACTER = 64
"""Maximum number of additional steps per character of the input."""
MAX_SECONDS = 5.0
"""Maximum processor time of a run, in seconds."""
MAX_BITS = 10_000
"""Maximum size of a number, in bits."""
_CHARACTERS_PER_STEP = 16
_STEPS_PER_LOOK = 256


class EndlessTemplateError(DataError):
    """A chat template exceeds its bounds, so that every conversation fails."""


def too_much(reason: str) -> EndlessTemplateError:
    """Returns the error of a template that exceeds its budget of steps, characters or time."""
    return EndlessTemplateError(f"the chat template exceeds its bounds: {reason}")


@dataclass
class Run:
    """The remaining budget of a run of a template.

    Attributes:
      steps: Remaining steps.
      looks_at: The time is checked again when this many steps remain.
      ends: The limit of the thread's processor time, in seconds.
    """

    steps: int
    looks_at: int
    ends: float

    @classmethod
    def of(cls, characters: int) -> "Run":
        """Returns the budget of a run whose input has this many characters."""
        steps = MAX_STEPS + STEPS_PER_CHARACTER * characters
        return cls(steps, steps, time.thread_time() + MAX_SECONDS)


_RUN: ContextVar[Run | None] = ContextVar("run", default=None)


@contextmanager
def bounded(run: Run) -> Iterator[None]:
    """Makes ``spend`` reduce the budget of this run, inside of a ``with`` block."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def spend(steps: int = 1, *, characters: int = 0) -> None:
    """Counts steps and characters of the current run.

    Raises:
      EndlessTemplateError: The budget of the run is used up.
    """
    run = _RUN.get()
    # Strings are also made outside of a run, where nothing is counted.
    if run is None:
        return
    run.steps -= steps + characters // _CHARACTERS_PER_STEP
    if run.steps < 0:
        raise too_much("it exceeds the maximum number of steps")
    # Reading the clock is slow, so do it once in many steps.
    if run.steps < run.looks_at:
        run.looks_at = run.steps - _STEPS_PER_LOOK
        if time.thread_time() > run.ends:
            raise too_much(f"it takes more than {MAX_SECONDS:g} seconds")
