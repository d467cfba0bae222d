"""Checkpoints of a run: parameters, optimizer and data position, through Orbax."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from ..models.loading import CHECKPOINTS, PARAMS
from .state import TrainState

OPTIMIZER = "optimizer"
DATA = "data"


class Checkpoints:
    """The `checkpoints` folder of a run; saves in the background.

    A checkpoint appears whole or not at all. The newest `keep_last` are kept,
    and the `keep_best` of lowest validation loss.
    """

    def __init__(self, run: Path, *, keep_last: int, keep_best: int) -> None:
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep_last),
                checkpoint_managers.BestN(
                    get_metric_fn=_loss,
                    reverse=True,  # ascending in worth: the lowest loss last
                    n=keep_best,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._manager = ocp.CheckpointManager(
            (run / CHECKPOINTS).resolve(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy,
                best_fn=_loss,  # not asked, but without it metrics are not written to disk
                create=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for what is still being written."""
        self._manager.close()

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: dict[str, Any], validation_loss: float | None) -> None:
        """Begins to write a state, unless its step is there already.

        Args:
          state: in its global form.
          data: the data iterator's state.
          validation_loss: the lower the better, if it was measured at this step.
        """
        step = int(state.step)
        if step == self.newest:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **{
                    PARAMS: ocp.args.StandardSave(state.params),
                    OPTIMIZER: ocp.args.StandardSave(
                        {"step": state.step, "state": state.opt_state}
                    ),
                    DATA: ocp.args.JsonSave(data),
                }
            ),
            metrics={} if validation_loss is None else {"loss": validation_loss},
        )

    def restore(self, step: int, shapes: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a state onto the devices that `shapes` names.

        Args:
          step: which checkpoint.
          shapes: shapes, dtypes and shardings of the global form.

        Returns:
          The state and the data iterator's.
        """
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                **{
                    PARAMS: ocp.args.StandardRestore(shapes.params),
                    OPTIMIZER: ocp.args.StandardRestore(
                        {"step": shapes.step, "state": shapes.opt_state}
                    ),
                    DATA: ocp.args.JsonRestore(),
                }
            ),
        )
        optimizer = restored[OPTIMIZER]
        state = TrainState(optimizer["step"], restored[PARAMS], optimizer["state"])
        return state, restored[DATA]

    def wait(self) -> None:
        """Returns when everything begun is on disk."""
        self._manager.wait_until_finished()


def _loss(metrics: dict[str, float]) -> float:
    return metrics.get("loss", math.inf)
