"""Skips steps with a non-finite loss or gradient, and ends a run with too many such steps."""

import dataclasses
import math
from collections.abc import Mapping

from ...data.common.errors import NonFiniteLoss
from ...data.common.progress import LogFn
from .checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True)
class SkipCounts:
    """The numbers of skipped steps, which are stored in checkpoints."""

    total: int = 0
    in_a_row: int = 0
    """The number of skipped steps in the current series of consecutive skipped steps."""


@dataclasses.dataclass
class BadSteps:
    """Counts the steps that were skipped because their loss or gradient was not finite."""

    most: int
    """The maximum number of consecutive steps that a run may skip."""
    counts: SkipCounts
    checkpoints: Checkpoints
    """The checkpoints of the run, which error messages mention."""
    log: LogFn

    def skips(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Returns whether a step was skipped, and counts the step if it was.

        Raises:
            NonFiniteLoss: too many consecutive steps were skipped.
        """
        loss, norm = metrics["loss"], metrics["gradient_norm"]
        if math.isfinite(loss) and math.isfinite(norm):
            self.counts = dataclasses.replace(self.counts, in_a_row=0)
            return False
        # The compiled step has already discarded its update; this method only counts the step.
        in_a_row = self.counts.in_a_row + 1
        self.counts = SkipCounts(self.counts.total + 1, in_a_row)
        what = f"the loss of step {step} is {loss} (gradient norm {norm})"
        if in_a_row > self.most:
            raise self._not_finite(
                f"{what}, after {self.most} skipped steps" if self.most else what
            )
        self.log(f"{what}: skipped, {in_a_row} of at most {self.most} in a row")
        return True

    def check_validation(self, step: int, loss: float) -> None:
        """Raises NonFiniteLoss if a validation loss is not finite."""
        if not math.isfinite(loss):
            raise self._not_finite(f"the validation loss of step {step} is {loss}")

    def _not_finite(self, what: str) -> NonFiniteLoss:
        kept = self.checkpoints.newest
        rest = (
            "no checkpoint was written yet"
            if kept is None
            else f"the checkpoint of step {kept} is kept"
        )
        return NonFiniteLoss(
            f"{what}; {rest}: lower optimizer.peak_learning_rate, or lengthen "
            "optimizer.warmup_steps"
        )
