"""Limits the steps, the characters and the processor time of a template's run.

A step is a loop iteration, a call, a filter or an operator. The characters of a result are counted
before the result is made, so an endless template always stops at the same place. The limit on
processor time, which is measured for the thread, stops single steps that are slow.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..common.errors import DataError

MAX_SOURCE = 1 << 17
"""The maximum length of a template, in characters; published templates have up to 20,000."""
MAX_STEPS = 1 << 20
"""Maximum number of steps in a run; ``STEPS_PER_CHARACTER`` adds more for long inputs."""
STEPS_PER_CHARACTER = 64
"""Number of additional steps allowed for each character of the input."""
MAX_SECONDS = 5.0
"""Maximum processor time of a run, in seconds."""
MAX_BITS = 10_000
"""Maximum size of a number, in bits."""
_CHARACTERS_PER_STEP = 16
_STEPS_PER_LOOK = 256


class EndlessTemplateError(DataError):
    """A chat template exceeds its limits, so no conversation can be rendered."""


def too_much(reason: str) -> EndlessTemplateError:
    """Returns an error that says that a template exceeds its limits, and the reason."""
    return EndlessTemplateError(f"the chat template exceeds its bounds: {reason}")


@dataclass
class Run:
    """The remaining budget for one run of a template.

    Attributes:
      steps: The number of remaining steps.
      looks_at: The time is checked again when this number of steps remains.
      ends: The run must stop when the thread has used this processor time, in seconds.
    """

    steps: int
    looks_at: int
    ends: float

    @classmethod
    def of(cls, characters: int) -> "Run":
        """Returns the budget for an input with the given number of characters."""
        steps = MAX_STEPS + STEPS_PER_CHARACTER * characters
        return cls(steps, steps, time.thread_time() + MAX_SECONDS)


_RUN: ContextVar[Run | None] = ContextVar("run", default=None)


@contextmanager
def bounded(run: Run) -> Iterator[None]:
    """Makes ``spend`` reduce the budget of a run within a ``with`` block."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def spend(steps: int = 1, *, characters: int = 0) -> None:
    """Subtracts steps and characters from the budget of the current run.

    Raises:
      EndlessTemplateError: The budget of the run is used up.
    """
    run = _RUN.get()
    # Strings can also be made outside a run, where nothing is counted.
    if run is None:
        return
    run.steps -= steps + characters // _CHARACTERS_PER_STEP
    if run.steps < 0:
        raise too_much("it exceeds the maximum number of steps")
    # Reading the clock is slow, so read it only once in many steps.
    if run.steps < run.looks_at:
        run.looks_at = run.steps - _STEPS_PER_LOOK
        if time.thread_time() > run.ends:
            raise too_much(f"it takes more than {MAX_SECONDS:g} seconds")
