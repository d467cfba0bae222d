"""Writes `report.md`, a summary of a finished run with a plot of its loss."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .metrics_log import read_metrics
from .samples import first_and_last, when

REPORT_FILE = "report.md"
CURVE_FILE = "loss.png"


def write_report(
    folder: Path,
    facts: Mapping[str, object],
    validation: Mapping[str, float | int],
    sample: str | None,
    *,
    samples: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes `report.md` and `loss.png` into a run folder.

    Args:
        folder: the run folder. Its `metrics.jsonl` is plotted.
        facts: the names and values for the first rows of the report's table.
        validation: loss and metrics of the last evaluation.
        sample: the model's output for a prompt.
        samples: completions of a policy with their rewards, from `read_samples`. The report shows
          the first and the last evaluation.
    """
    # The report has a table of facts and scores, the loss curve, and samples.
    draw_curve(folder, folder / CURVE_FILE)
    scores = {f"validation {name}": _shown(value) for name, value in validation.items()}
    rows = {**facts, **scores}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    text = f"# {folder.name}\n\n| | |\n| --- | --- |\n{table}\n\n![loss]({CURVE_FILE})\n"
    if sample is not None:
        text += f"\n## A sample\n\n```text\n{sample}\n```\n"
    for step, of_step in first_and_last(samples).items():
        columns = {"prompt": "prompt", "answer": "completion", "reward": "reward"}
        if not any("reward" in row for row in of_step):
            del columns["reward"]
        text += f"\n## Answers {when(step)}\n\n"
        text += f"{_row(columns)}\n{_row(['---'] * len(columns))}\n"
        for row in of_step:
            text += f"{_row(_cell(row[key]) for key in columns.values())}\n"
    (folder / REPORT_FILE).write_text(text, encoding="utf-8")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    """Formats a value as a table cell, with pipes escaped and line feeds replaced.

    A missing value, such as a reward that is not finite, is an empty cell.
    """
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", "⏎")


def _shown(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def draw_curve(folder: Path, file: Path) -> None:
    """Draws training and validation loss over steps, as a PNG."""
    # Do not use pyplot, because it selects a window system and is not thread-safe.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for group, style in (("train", "-"), ("validation", "o-")):
        lines = read_metrics(folder, group)
        steps, losses = [row["step"] for row in lines], [row["loss"] for row in lines]
        axes.plot(steps, losses, style, label=group, markersize=4, linewidth=1)
    axes.set(xlabel="step", ylabel="loss")
    # Losses are low on the right. The default place is searched, which is slow in long runs.
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    figure.savefig(file)
