"""The progress display of a training run: one bar, and one line per event.

In a file or a pipe, where no bar can be drawn, the display prints a line from time to time.
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
"""Shows the user one line."""

AdvanceFn = Callable[[int, int], None]
"""Called when some texts are finished, with their number and the number of their tokens."""


def ignore(*_: object) -> None:
    """Does nothing; the default of callbacks."""


TEXT_WIDTH = len(" / 12,345,678 tokens/s 123:45:56 left ")
"""The width of the text next to a bar, except the noun, the counts and the loss."""
ELAPSED_WIDTH = len(" 123:45:56 elapsed,")
SECONDS_BETWEEN_LINES = 60.0
SECONDS_BETWEEN_DRAWINGS = 2.0
"""Seconds between drawings in a notebook, which keeps each drawing of a bar as output. A terminal
draws ten times per second."""


class Progress:
    """A progress bar on standard error, and lines above it."""

    rewrite: ClassVar[Callable[[str], str]] = str
    """Rewrites each line before it is printed; the command line sets it to replace names of fields
    by names of options."""

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
        """Shows step, loss, tokens per second and time left while the block runs."""
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
        """Shows how many of `total` things are done, and tokens per second.

        Yields:
            A function that takes the number of things done since the last call, and the number of
            their tokens.
        """
        bar = self._drawn(self._columns(what, total))
        task = bar.add_task(what, total=total, speed="–")
        tokens = 0

        def advance(number: int, new_tokens: int) -> None:
            nonlocal tokens
            # Start the bar only now, so that a refused input prints a single line.
            bar.start()
            tokens += new_tokens
            bar.update(task, advance=number, speed=_speed(bar, tokens))

        try:
            yield advance
        finally:
            if bar.live.is_started:
                bar.stop()

    def _columns(self, what: str, total: int, *more: ProgressColumn) -> list[ProgressColumn]:
        """Returns the columns of a bar, without columns that do not fit the terminal.

        Args:
            what: The noun before the count.
            total: The last count.
            *more: Additional columns of this bar.
        """
        # The width of all columns except the bar, with 13 characters for each additional column.
        text = len(what) + 2 * len(str(total)) + TEXT_WIDTH + 13 * len(more)
        left = self._console.width - text
        columns: list[ProgressColumn] = [TextColumn(what), MofNCompleteColumn()]
        # Fewer than four characters are too few for a bar.
        if left >= 4:
            columns.append(BarColumn(min(left, 40)))
        columns += [*more, TextColumn("{task.fields[speed]} tokens/s")]
        # Show the elapsed time only if the bar keeps at least 10 columns.
        if left >= ELAPSED_WIDTH + 10:
            columns[2] = BarColumn(min(left - ELAPSED_WIDTH, 40))
            columns += [TimeElapsedColumn(), TextColumn("elapsed,")]
        return [*columns, TimeRemainingColumn(), TextColumn("left")]

    def _drawn(self, columns: list[ProgressColumn]) -> RichProgress:
        rate = 10.0 if sys.stderr.isatty() else 1 / SECONDS_BETWEEN_DRAWINGS
        return RichProgress(*columns, console=self._console, refresh_per_second=rate)

    def advance(self, step: int, loss: float) -> None:
        """Shows that `step` is done."""
        if self._bar is None or self._task is None:
            return
        speed = _speed(self._bar, (step - self._first_step) * self._tokens_per_step)
        self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", speed=speed)
        # A file or a pipe gets lines in place of the bar.
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            total = self._bar.tasks[0].total
            self.log(f"step {step} of {total:.0f}: loss {loss:.3f}, {speed} tokens/s")

    def evaluated(self, step: int, scores: dict[str, float], metrics: tuple[str, ...]) -> None:
        """Prints the loss of an evaluation and the scores that `metrics` names."""
        shown = [f"{name} {scores[name]:.4f}" for name in metrics if name in scores]
        self.log(", ".join([f"step {step}: validation loss {scores['loss']:.4f}", *shown]))


def _speed(bar: RichProgress, tokens: int) -> str:
    elapsed = bar.tasks[0].elapsed
    return f"{tokens / elapsed:,.0f}" if elapsed else "–"
