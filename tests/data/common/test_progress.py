"""What is seen of a training: lines where no bar can be drawn, few drawings in a notebook."""

import io
import re

import pytest
from flaxzoo.data.common import progress as module
from flaxzoo.data.common.progress import Progress


def standard_error(monkeypatch):
    """A standard error that is no terminal; not a fixture, whose file pytest would replace."""
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return file


def steps_of(error):
    return [line.split()[1] for line in error.getvalue().splitlines() if " of 100: " in line]


def test_a_line_for_the_first_step_and_then_every_minute(monkeypatch):
    error, seconds = standard_error(monkeypatch), 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds)
    progress = Progress()
    with progress.bar(100, 40, 10):
        for step in range(41, 51):
            seconds += 20.0
            progress.advance(step, 2.5)
        assert steps_of(error) == ["41", "44", "47", "50"]
        lines = error.getvalue().splitlines()
    assert len(lines) == 4  # and no bar
    assert lines[0].startswith("step 41 of 100: loss 2.500, ")


def test_a_counter_prints_a_line_every_minute_and_at_the_end(monkeypatch):
    error, seconds = standard_error(monkeypatch), 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds)
    monkeypatch.setattr(module, "_speed", lambda bar, tokens: f"{tokens}")
    with Progress().counter("sentences", 8) as advance:
        for _ in range(8):
            seconds += 25.0
            advance(1, 10)
    assert error.getvalue().splitlines() == [
        "3 of 8 sentences: 30 tokens/s",
        "6 of 8 sentences: 60 tokens/s",
        "8 of 8 sentences: 80 tokens/s",
    ]


def test_a_counter_that_counts_nothing_prints_nothing(monkeypatch):
    error = standard_error(monkeypatch)
    with Progress().counter("sentences", 8):
        pass
    assert error.getvalue() == ""


def test_quiet_is_quiet(monkeypatch):
    error = standard_error(monkeypatch)
    progress = Progress(quiet=True)
    with progress.bar(100, 0, 10):
        progress.advance(1, 2.5)
    assert error.getvalue() == ""


@pytest.mark.parametrize(("terminal", "rate"), [(True, 10.0), (False, 0.5)])
def test_a_notebook_keeps_few_drawings(monkeypatch, terminal, rate):
    error = standard_error(monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    monkeypatch.setattr(error, "isatty", lambda: terminal, raising=False)
    progress = Progress()
    with progress.bar(100, 0, 10):
        assert progress._bar.live.refresh_per_second == rate
        progress.advance(1, 2.5)
    assert steps_of(error) == []


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_of_a_long_run_fits_the_terminal(monkeypatch, width):
    error = standard_error(monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    progress = Progress()
    with progress.bar(1_000_000, 0, 500_000):
        progress.advance(123_456, 12.5)
        progress._bar.update(progress._task, speed="1,234,567")
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", error.getvalue()).splitlines()
    last = next(line for line in reversed(drawn) if line.startswith("step"))
    assert len(last) <= width
    assert re.match(r" *step +123456/1000000 .*loss 12.500 1,234,567 tokens/s .*left", last)
    assert ("elapsed" in last) == (width == 120)
