"""Displays the progress of a training run: a bar, and one line for each event.

If the output is a file or a pipe, at most one line per minute replaces the bar.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

LogFn = Callable[[str], None]
"""A function that shows the user one line."""

AdvanceFn = Callable[[int, int], None]
"""A function called when texts are finished, with the number of texts and of tokens."""


def ignore(*_: object) -> None:
    """Does nothing; used as the default for callbacks."""


TEXT_WIDTH = len(" / 12,345,678 tokens/s 123:45:56 left ")
"""The width of the text next to a bar, excluding the noun, the counts and the loss."""
ELAPSED_WIDTH = len(" 123:45:56 elapsed,")
SECONDS_BETWEEN_LINES = 60.0
SECONDS_BETWEEN_DRAWINGS = 2.0
"""Seconds between two drawings of a bar in a notebook, which keeps every drawing in its output. In
a terminal, a bar is drawn ten times per second.
"""


class Progress:
    """A progress bar on standard error, and lines above it."""

    rewrite: ClassVar[Callable[[str], str]] = str
    """A function that rewrites each line before it is printed. The command line uses it to replace
    the names of fields by the names of options.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(
            stderr=True, quiet=quiet, highlight=False, soft_wrap=True, force_jupyter=False
        )
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._tokens_per_step = 0
        self._first_step = 0
        self._next_line = 0.0

    def log(self, line: str) -> None:
        """Prints one line."""
        self._console.print(Progress.rewrite(line), markup=False)

    @contextmanager
    def bar(self, steps: int, first_step: int, tokens_per_step: int) -> Iterator[None]:
        """Shows the step, loss, tokens per second and time left while the block runs."""
        columns = self._columns("step", steps, TextColumn("loss {task.fields[loss]}"))
        self._tokens_per_step, self._first_step = tokens_per_step, first_step
        self._next_line = 0.0
        with self._drawn(columns) as self._bar:
            self._task = self._bar.add_task(
                "train", total=steps, completed=first_step, loss="–", speed="–"
            )
            yield

    @contextmanager
    def counter(self, what: str, total: int) -> Iterator[AdvanceFn]:
        """Shows how many of `total` items are finished, and the tokens per second.

        If the output is a file or a pipe, the last line appears when the block ends.

        Yields:
            A function to call with the number of items finished since the last call, and the number
            of their tokens.
        """
        bar = self._drawn(self._columns(what, total))
        task = bar.add_task(what, total=total, speed="–")
        done = tokens = 0
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

        def line() -> str:
            return f"{done:,} of {total:,} {what}: {_speed(bar, tokens)} tokens/s"

        def advance(number: int, new_tokens: int) -> None:
            nonlocal done, tokens
            # Start the bar only now, so that only the error is printed if the input is rejected.
            bar.start()
            done, tokens = done + number, tokens + new_tokens
            bar.update(task, completed=done, speed=_speed(bar, tokens))
            if done < total:
                self._log_if_due(line)

        try:
            yield advance
        finally:
            if bar.live.is_started:
                bar.stop()
            if bar.disable and done:
                self.log(line())

    def _columns(self, what: str, total: int, *more: ProgressColumn) -> list[ProgressColumn]:
        """Returns the columns of a bar, without columns that do not fit into the terminal.

        Args:
            what: The noun before the count.
            total: The final count.
            *more: Additional columns of this bar.
        """
        # The width of all columns except the bar, with 13 characters for each additional column.
        text = len(what) + 2 * len(str(total)) + TEXT_WIDTH + 13 * len(more)
        left = self._console.width - text
        columns: list[ProgressColumn] = [TextColumn(what), MofNCompleteColumn()]
        # A bar needs at least four characters.
        if left >= 4:
            columns.append(BarColumn(min(left, 40)))
        columns += [*more, TextColumn("{task.fields[speed]} tokens/s")]
        # Show the elapsed time only if at least 10 characters remain for the bar.
        if left >= ELAPSED_WIDTH + 10:
            columns[2] = BarColumn(min(left - ELAPSED_WIDTH, 40))
            columns += [TimeElapsedColumn(), TextColumn("elapsed,")]
        return [*columns, TimeRemainingColumn(), TextColumn("left")]

    def _drawn(self, columns: list[ProgressColumn]) -> RichProgress:
        rate = 10.0 if sys.stderr.isatty() else 1 / SECONDS_BETWEEN_DRAWINGS
        return RichProgress(
            *columns,
            console=self._console,
            refresh_per_second=rate,
            # Otherwise rich prints the last state of the bar into a file.
            disable=not self._console.is_terminal,
        )

    def _log_if_due(self, line: Callable[[], str]) -> None:
        """Prints a line instead of the bar, if the last such line is at least a minute old.

        Args:
            line: Formats the line. It is called only if the line is printed.
        """
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self.log(line())

    def advance(self, step: int, loss: float) -> None:
        """Shows that `step` is finished."""
        if self._bar is None or self._task is None:
            return
        speed = _speed(self._bar, (step - self._first_step) * self._tokens_per_step)
        self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", speed=speed)
        total = self._bar.tasks[0].total
        self._log_if_due(lambda: f"step {step} of {total:.0f}: loss {loss:.3f}, {speed} tokens/s")

    def evaluated(self, step: int, scores: dict[str, float], metrics: tuple[str, ...]) -> None:
        """Prints the loss of an evaluation, and the scores whose names are in `metrics`."""
        shown = [f"{name} {scores[name]:.4f}" for name in metrics if name in scores]
        self.log(", ".join([f"step {step}: validation loss {scores['loss']:.4f}", *shown]))


def _speed(bar: RichProgress, tokens: int) -> str:
    elapsed = bar.tasks[0].elapsed
    return f"{tokens / elapsed:,.0f}" if elapsed else "–"
