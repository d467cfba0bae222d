"""Where numbers go: `metrics.jsonl`, TensorBoard, and Weights & Biases if asked for."""

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from ..data.atomic import write_file
from ..models.loading import CONFIG_FILE

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsLog:
    """Writes one line of numbers per logged step.

    A run that is taken up at step n forgets what was logged after n, so that
    its file reads like that of a run never stopped.
    """

    def __init__(self, run: Path, *, first_step: int, wandb_project: str | None) -> None:
        from tensorboardX import SummaryWriter

        # First, so that nothing is open if it cannot be had.
        self._wandb = _start_wandb(wandb_project, run) if wandb_project else None
        self._file = run / METRICS_FILE
        _forget_after(self._file, first_step)
        self._lines = self._file.open("a")
        self._board = SummaryWriter(str(run / TENSORBOARD), purge_step=first_step + 1)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes all of them."""
        self._lines.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, step: int, group: str, numbers: dict[str, float]) -> None:
        """Logs `numbers` of `group` ("train" or "validation") at `step`."""
        self._lines.write(json.dumps({"step": step, "split": group, **numbers}) + "\n")
        self._lines.flush()
        named = {f"{group}/{name}": value for name, value in numbers.items()}
        for name, value in named.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(named, step=step)


def read_metrics(run: Path, group: str) -> list[dict[str, Any]]:
    """The logged lines of a group, in order."""
    file = run / METRICS_FILE
    lines = file.read_text().split("\n") if file.is_file() else []
    return [row for row in map(json.loads, filter(None, lines)) if row["split"] == group]


def _forget_after(file: Path, step: int) -> None:
    if not file.is_file():
        return
    # A process killed in mid-line leaves one without its end.
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    write_file(file, "".join(kept).encode())


def _start_wandb(project: str, run: Path) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)
    except ImportError as error:
        raise ValueError(
            f"wandb_project {project!r} needs Weights & Biases: pip install 'flaxzoo[wandb]'"
        ) from error
    # The same folder is the same run there, however often it is taken up.
    identity = hashlib.blake2b((run / CONFIG_FILE).read_bytes(), digest_size=8).hexdigest()
    return wandb.init(
        project=project, name=run.name, id=f"{run.name}-{identity}", dir=str(run), resume="allow"
    )
