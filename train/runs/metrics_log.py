"""Writes metrics to `metrics.jsonl`, TensorBoard and, if requested, Weights & Biases."""

import contextlib
import hashlib
import json
import math
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ...data.common.atomic_io import write_file
from ...data.common.errors import RunError, UserError
from ...data.common.fields import require
from ...data.common.json_text import to_json
from ...models.run_files import CONFIG_FILE

METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
SECONDS_BETWEEN_FLUSHES = 30.0
"""The minimum number of seconds between two flushes of TensorBoard's file."""


class MetricsLog:
    """Writes one line of metrics for each logged step.

    A run that resumes at step n first removes all lines after step n, so that its file becomes the
    same as the file of an uninterrupted run.
    """

    def __init__(self, run: Path, *, first_step: int, wandb_project: str | None) -> None:
        # Start Weights & Biases first, so that no file is open if it fails.
        self._wandb = _start_wandb(wandb_project, run) if wandb_project else None
        self._file = run / METRICS_FILE
        _forget_after(self._file, first_step)
        self._lines = self._file.open("a")
        self._board = _Board(run / TENSORBOARD, first_step)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes all outputs.

        An error that ends the run takes precedence over an error that closing raises.
        """
        try:
            with contextlib.closing(self._board), contextlib.closing(self._lines):
                pass
        except OSError as fault:
            if error is None:
                raise self._cannot_write(fault) from fault
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, step: int, group: str, numbers: dict[str, float]) -> None:
        """Logs `numbers` of `group` ("train" or "validation") at `step`.

        Raises:
            RunError: the numbers cannot be written.
        """
        named = {f"{group}/{name}": value for name, value in numbers.items()}
        # If the open file was deleted, it would still accept lines, but these would be lost.
        require(
            self._file.is_file(),
            f"{self._file} was deleted during training: restore it; the same command resumes "
            "from the newest checkpoint",
            RunError,
        )
        try:
            # JSON has no NaN and no infinity, so write null.
            finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            self._lines.write(to_json({"step": step, "split": group, **finite}) + "\n")
            self._lines.flush()
            self._board.write(step, named)
        except OSError as fault:
            raise self._cannot_write(fault) from fault
        if self._wandb is not None:
            self._wandb.log(named, step=step)

    def _cannot_write(self, fault: OSError) -> RunError:
        return RunError(
            f"cannot write the metrics to {self._file.parent} ({fault.strerror}): correct this "
            "problem; the same command resumes from the newest checkpoint"
        )


@contextlib.contextmanager
def _absent(package: str) -> Iterator[None]:
    """Hides a package from imports in the `with` block, unless it is already loaded."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]  (as importlib has it)
    try:
        yield
    finally:
        del sys.modules[package]


class _Board:
    """TensorBoard's event file.

    This class writes the file synchronously. The thread of tensorboardX's `SummaryWriter` dies if
    the disk is full, and the run would then wait for this thread forever.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # tensorboardX would import torch only for the name of a type, and this import takes two
        # seconds.
        with _absent("torch"):
            from tensorboardX.proto import event_pb2
            from tensorboardX.record_writer import RecordWriter

        # A type checker cannot see the names in this module, because they are created at run time.
        protocol: Any = event_pb2
        self._event = protocol.Event
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._records = RecordWriter(str(folder / name))
        self._next_flush = 0.0
        # This event makes TensorBoard discard what an earlier process logged after this step.
        start = protocol.SessionLog(status=protocol.SessionLog.START)
        self._write(file_version="brain.Event:2")
        self._write(session_log=start, step=first_step + 1)

    def write(self, step: int, named: dict[str, float]) -> None:
        from tensorboardX.summary import scalar

        for name, value in named.items():
            self._write(step=step, summary=scalar(name, value))
        if time.monotonic() >= self._next_flush:
            self._records.flush()
            self._next_flush = time.monotonic() + SECONDS_BETWEEN_FLUSHES

    def _write(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._records.close()


def read_metrics(run: Path, group: str) -> list[dict[str, Any]]:
    """Returns the logged lines of a group ("train" or "validation"), in order."""
    return [row for row in read_rows(run / METRICS_FILE) if row["split"] == group]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of JSON lines, or an empty list if the file does not exist."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return list(map(json.loads, filter(None, text.split("\n"))))


def _forget_after(file: Path, step: int) -> None:
    if not file.is_file():
        return
    # A process that was killed while writing leaves an incomplete last line.
    lines = file.read_text().splitlines(keepends=True)
    kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= step]
    write_file(file, "".join(kept).encode())


def wandb_of(project: str) -> Any:
    """Returns the `wandb` package.

    Raises:
        UserError: the package is not installed.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]  (an extra)
    except ImportError as error:
        raise UserError(
            f"wandb_project {project!r} needs Weights & Biases: pip install 'flaxzoo[wandb]'"
        ) from error
    return wandb


def _start_wandb(project: str, run: Path) -> Any:
    wandb = wandb_of(project)
    # Derive the id from the folder, so that a resumed run continues the same W&B run.
    identity = hashlib.blake2b((run / CONFIG_FILE).read_bytes(), digest_size=8).hexdigest()
    return wandb.init(
        project=project, name=run.name, id=f"{run.name}-{identity}", dir=str(run), resume="allow"
    )
