"""Writes and reads checkpoints with Orbax: parameters, optimizer state and data position."""

import itertools
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from ...data.batching import IteratorState
from ...data.common.errors import RunError
from ...data.common.fields import require, without_none
from ...data.common.progress import LogFn
from ...models.checksums import find_damage, replace_file, write_checksums
from ...models.nn.typing import PyTree
from ...models.run_files import CHECKPOINTS, DATA, EMA, EMA_AUXILIARY, PARAMS, numbered, steps
from ..losses.objective import AUXILIARY, joined, split
from ..optim.ema import ema_of, with_ema
from ..state import TrainState

OPTIMIZER = "optimizer"
FROZEN = "frozen"
"""The parameters that no step changes. Only checkpoints of an objective with a `reference` have
such parameters."""
METRICS = "metrics"
DELETED = "deleted"
"""The subfolder of `checkpoints` for checkpoints that are being removed."""
METADATA_BYTES = 1 << 20
"""An upper bound on the size of the files of a checkpoint that do not store arrays."""
POLL_SECONDS = 0.05
"""The number of seconds between two checks of whether a checkpoint has been written."""
THREAD_TIMEOUT_SECONDS = 60.0
"""The number of seconds to wait, at the end of a run, for each Orbax thread that is still writing.
"""


class Checkpoints:
    """The `checkpoints` folder of a run; a background thread writes the checkpoints.

    A checkpoint gets its final name only after the checkpoint and its checksums are complete. The
    folder keeps the newest `keep_last` checkpoints, and the `keep_best` checkpoints with the lowest
    measure (by default, the validation loss).
    """

    def __init__(self, run: Path, *, keep_last: int, keep_best: int) -> None:
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep_last),
                checkpoint_managers.BestN(
                    get_metric_fn=_loss,
                    reverse=True,  # sort from worst to best, so that the lowest loss comes last
                    n=keep_best,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._folder = (run / CHECKPOINTS).resolve()
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=_loss,  # never called, but without a function, Orbax would write no metrics
                create=True,
                cleanup_tmp_directories=True,
                # An old checkpoint is renamed before its files are removed, so that an interrupted
                # removal is not mistaken for a damaged checkpoint.
                todelete_subdir=DELETED,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            ),
        )
        self._saving = 0
        self.written = self.newest
        """The step of the newest complete checkpoint; older checkpoints may already be removed."""
        # Remove the files that a killed process left. Do not remove them in a background thread,
        # because the next save renames checkpoints into this folder.
        self._remove_deleted()
        self._removing: threading.Thread | None = None

    def _write_checksums(self) -> None:
        """Writes the checksums of a complete checkpoint before it gets its final name."""
        if jax.process_index() == 0:
            # Afterwards, Orbax renames this temporary folder to the final name.
            write_checksums(self._folder / f"{self._saving}{ocp.utils.TMP_DIR_SUFFIX}")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for pending writes; an error that ends the run takes precedence."""
        try:
            with self._writing():
                self._manager.close()
        except RunError:
            if error is None:
                raise
        finally:
            if self._removing is not None:
                self._removing.join()
            # If a save failed, Orbax does not wait for its other writers. Orbax's own `join` would
            # raise the error of a writer instead of the error of the save.
            for thread in threading.enumerate():
                if type(thread).__module__.startswith("orbax."):
                    threading.Thread.join(thread, THREAD_TIMEOUT_SECONDS)

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: IteratorState, measure: float | None) -> None:
        """Starts writing a state, unless a checkpoint of this step exists.

        Args:
            state: The state, with global arrays.
            data: The data iterator's state.
            measure: The value that ranks checkpoints; the lowest is best. None if this step was not
              evaluated.

        Raises:
            RunError: This checkpoint or the previous checkpoint cannot be written.
        """
        step = int(state.step)
        # Without this check, a run that stops right after a checkpoint would save the same step
        # again.
        if step == self.newest:
            return
        self.wait()
        # The previous save is complete, so its checksums no longer need `_saving`.
        self._saving = step
        self._check_room(state)
        arrays = {name: ocp.args.StandardSave(part) for name, part in _parts(state).items()}
        items = {**arrays, DATA: ocp.args.JsonSave(data)}
        metrics = {} if measure is None else {"loss": measure}
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        # A daemon thread does not keep the process alive. If files remain, the next process removes
        # them.
        self._removing = threading.Thread(target=self._remove_deleted, daemon=True)
        self._removing.start()

    def add_measure(self, step: int, measure: float) -> None:
        """Adds the measure to a checkpoint that was written before the evaluation of its step.

        Args:
            step: The step of the checkpoint.
            measure: The value that ranks checkpoints; the lowest is best.

        Raises:
            DataError: The measure cannot be written.
        """
        self.wait()
        checkpoint = self._folder / str(step)
        if jax.process_index() == 0:
            content = json.dumps({"loss": measure}).encode()
            replace_file(checkpoint, f"{METRICS}/{METRICS}", content)
        # Orbax caches metrics, so reload them to find the best checkpoints.
        self._manager.reload()

    def _remove_deleted(self) -> None:
        """Removes old checkpoints that Orbax has renamed, after the new checkpoint is written."""
        while self._manager.is_saving_in_progress():
            time.sleep(POLL_SECONDS)
        if jax.process_index() == 0:
            shutil.rmtree(self._folder / DELETED, ignore_errors=True)

    def _check_room(self, state: TrainState) -> None:
        """Raises RunError if the disk is too full, before a write starts."""
        needed = METADATA_BYTES + sum(x.nbytes for x in jax.tree.leaves(state))
        with self._writing():
            free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise self._cannot_write(
                f"the checkpoint takes {needed:,} bytes, but the disk has {free:,} bytes left"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Converts file errors to a one-line RunError."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for a full disk
            code = re.search(r"os_error_code='(\d+)'", str(error))
            why = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
            raise self._cannot_write(why or str(error).split("\n")[0][:100]) from error

    def _cannot_write(self, why: str) -> RunError:
        others = [step for step in steps(self._folder.parent) if step != self._saving]
        start = f"step {others[-1]}" if others else "the start"
        return RunError(
            f"cannot write checkpoint {self._saving} to {self._folder} ({why}): solve this "
            f"problem; the same command resumes from {start}"
        )

    def restore(self, step: int, shapes: TrainState) -> tuple[TrainState, IteratorState]:
        """Reads a state onto the devices, with the shardings of `shapes`.

        Args:
            step: The step of the checkpoint.
            shapes: Shapes, dtypes and shardings of the global arrays.

        Returns:
            The state, and the state of the data iterator.

        Raises:
            RunError: `shapes` has frozen parameters, but the checkpoint has no frozen parameters.
        """
        require(
            shapes.frozen is None or (self._folder / str(step) / FROZEN).is_dir(),
            f"checkpoint {step} of {self._folder.parent} has no frozen parameters, which the "
            "objective needs as its reference: resume it with the objective that it was "
            "written with",
            RunError,
        )
        arrays = {name: ocp.args.StandardRestore(part) for name, part in _parts(shapes).items()}
        items = {**arrays, DATA: ocp.args.JsonRestore()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        optimizer = restored[OPTIMIZER]
        state = TrainState(
            optimizer["step"],
            restored[PARAMS],
            with_ema(
                optimizer["state"], joined(restored.get(EMA, {}), restored.get(EMA_AUXILIARY))
            ),
            restored.get(FROZEN),
            restored.get(AUXILIARY),
        )
        return state, restored[DATA]

    def wait(self) -> None:
        """Waits until every checkpoint is on disk and every replaced checkpoint is removed."""
        with self._writing():
            self._manager.wait_until_finished()
        self.written = self.newest
        if self._removing is not None:
            self._removing.join()


def _parts(state: TrainState) -> dict[str, PyTree]:
    """Returns the arrays of a checkpoint by subfolder, without parts that the state lacks."""
    # The moving average of the parameters has its own subfolder, so that it can be read alone.
    ema, ema_auxiliary = split(ema_of(state.opt_state) or {})
    parts = {
        PARAMS: state.params,
        EMA: ema or None,
        EMA_AUXILIARY: ema_auxiliary or None,
        OPTIMIZER: {"step": state.step, "state": with_ema(state.opt_state, ())},
        FROZEN: state.frozen,
        AUXILIARY: state.auxiliary,
    }
    return without_none(parts)


def set_aside_damaged(run: Path, log: LogFn) -> None:
    """Renames damaged checkpoints, so that the newest remaining checkpoint is intact.

    Checkpoints are checked completely, starting with the newest, until an intact checkpoint is
    found. In older checkpoints, only the measure is checked, because Orbax reads the measure of
    every checkpoint.

    Args:
        run: The run folder.
        log: Called with a line for each damaged checkpoint.

    Raises:
        RunError: All checkpoints are damaged; they are left unchanged.
    """
    complete = steps(run)
    for step in sorted(set(numbered(run)) - set(complete)):
        # Orbax would treat such a folder as the newest checkpoint.
        _set_aside(run, step, "it is not a checkpoint", log)
    damaged: dict[int, str] = {}
    part = ""  # first check the whole checkpoint
    for step in reversed(complete):
        damage = find_damage(run / CHECKPOINTS / str(step), part)
        if damage is None:
            part = METRICS
        else:
            damaged[step] = damage
    listed = "; ".join(f"{step}: {damage}" for step, damage in damaged.items())
    require(
        part or not damaged,
        f"every checkpoint of {run} is damaged ({listed}): restore a checkpoint, or give "
        "another --workdir",
        RunError,
    )
    for step, damage in damaged.items():
        _set_aside(run, step, damage, log)


def _set_aside(run: Path, step: int, damage: str, log: LogFn) -> None:
    folder = run / CHECKPOINTS / str(step)
    aside = _free_name(folder.with_name(f"{step}.damaged"))
    folder.rename(aside)
    log(f"checkpoint {step} of {run} is damaged: {damage}; renamed to {aside.name}")


def _free_name(path: Path) -> Path:
    """Returns `path`, or the first of `path-2`, `path-3` … that does not exist."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return next(itertools.filterfalse(Path.exists, itertools.chain([path], numbered)))


def best_checkpoint(run: Path) -> int | None:
    """Returns the step of the kept checkpoint with the lowest measure; None if none was measured.

    Args:
        run: The run folder.
    """
    measures = {}
    for step in steps(run):
        file = run / CHECKPOINTS / str(step) / METRICS / METRICS
        metrics = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if "loss" in metrics:
            measures[step] = metrics["loss"]
    return min(measures, key=lambda step: measures[step], default=None)


def _loss(metrics: dict[str, float]) -> float:
    return metrics.get("loss", math.inf)
