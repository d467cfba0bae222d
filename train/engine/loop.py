"""The training loop: step, log, evaluate, save, stop."""

import dataclasses
import time
from collections.abc import Iterator

import jax.numpy as jnp

from ...data.batching import BatchIterator, evaluation_batches
from ...data.chat.policy import PolicyExamples
from ...data.common.errors import StepNotTaken
from ...data.common.progress import Progress
from ...data.dataset import counted
from ...models.loading import CHECKPOINTS
from ..distributed.multiprocess import barrier, is_primary
from ..distributed.sharding import has_virtual_devices
from ..losses.eval_step import Evaluation, evaluate
from ..optim.schedules import make_schedule
from ..runs.kept_folder import KeptFolder
from ..runs.metrics_log import MetricsLog, read_metrics
from ..runs.samples import write_samples
from ..state import Metrics, TrainState
from .bad_steps import BadSteps
from .checkpoint import Checkpoints
from .compile import NumpyBatch
from .start import OpenRun, position_to_save
from .stop_signals import StopNow
from .stopping import Callbacks, Stopper

Scores = dict[str, float]
"""Loss and metrics of an evaluation by name."""


@dataclasses.dataclass
class Loop:
    """A run between two of its steps."""

    opened: OpenRun
    kept: KeptFolder
    checkpoints: Checkpoints
    batches: BatchIterator
    log: MetricsLog | None
    """None on all processes but the primary."""
    progress: Progress
    bad_steps: BadSteps
    stopper: Stopper
    callbacks: Callbacks
    state: TrainState
    step: int
    evaluation_due: bool
    """Whether this step is still to be evaluated."""
    position: dict[str, int] = dataclasses.field(init=False)
    """The position in the data after this step."""
    pending: tuple[int, Metrics] | None = None
    """A step whose metrics were not read yet."""
    validation: Scores | None = None
    validated_step: int | None = None

    def __post_init__(self) -> None:
        self.run, self.config = self.opened.run, self.opened.run.config
        self.trainer, self.position = self.opened.trainer, self.batches.get_state()
        self.schedule = make_schedule(self.config.optimizer, self.config.steps)

    def take_all_steps(self) -> int | None:
        """Takes the remaining steps; returns the number of the signal that stopped them, if any.

        Raises:
            NonFiniteLoss: too many steps had no finite loss.
            Exception: of a function of the caller, after the state is saved.
        """
        started, stopped = time.monotonic(), False
        try:
            self._evaluate_before_first_step()
            while self.step < self.config.steps:
                self.stopper.check()
                self._take_step()
                saving = self._is_due(self.config.checkpoint_every) or self._is_last
                if saving or self._is_due(self.config.evaluate_every):
                    # Logged first: a state whose loss was not finite is never saved. Every
                    # checkpoint is evaluated, so that the best is among those kept.
                    self._log_pending()
                    self._evaluate()
                if saving:
                    self._save()
        except StopNow:
            stopped = True
        self._log_pending()
        self._end(stopped, time.monotonic() - started)
        return (self.stopper.signal or None) if stopped else None

    @property
    def _is_last(self) -> bool:
        return self.step == self.config.steps

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0

    def _take_step(self) -> None:
        """Takes a step, and logs the one before while this one runs.

        Raises:
            StopNow: a signal comes before the step, or the data or a reward failed.
        """
        number = self.step + 1
        with self.stopper.saving_first(f"step {number}"), self.stopper.interruptible():
            batch = next(self.batches)
        with self.stopper.saving_first(f"step {number}", StepNotTaken):
            self.state, metrics = self.trainer.step(self.state, batch)
        if has_virtual_devices():
            self.stopper.wait_for(metrics)
        self.step, self.position = number, self.batches.get_state()
        self._log_pending()
        self.pending = number, metrics

    def _log_pending(self) -> None:
        """Waits for the metrics of the pending step, and logs them unless it was skipped."""
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        self.stopper.wait_for(metrics)
        numbers = {name: float(value) for name, value in metrics.items()}
        if self.bad_steps.skips(step, numbers):
            return
        self.progress.advance(step, numbers["loss"])
        if self.log is not None and step % self.config.log_every == 0:
            skipped = self.bad_steps.counts.total
            rate = float(jnp.asarray(self.schedule(step - skipped - 1)))  # it counts updates
            self._check_folder()
            counted = {"learning_rate": rate, "skipped_steps": skipped}
            self.log.write(step, "train", {**counted, **numbers})
        self.callbacks(step, lambda callback: callback.on_step(step, numbers))

    def _evaluate_before_first_step(self) -> None:
        """Makes up for an evaluation that was cut off; a policy is evaluated before it learns."""
        if self.evaluation_due:
            validation = self._evaluate()
            self.checkpoints.add_loss(self.step, validation["loss"])
            return
        is_policy = self.trainer.validation is not None
        if is_policy and self.step == 0 and not read_metrics(self.run.folder, "validation"):
            self._evaluate()

    def _evaluate(self) -> Scores:
        """Computes loss and metrics on the validation data.

        Raises:
            StopNow: a signal cut it off, or it failed. It is then due.
        """
        self.evaluation_due = True
        with self.stopper.saving_first(f"the evaluation after step {self.step}"):
            evaluation = self._run_model_on_validation_data()
        self.evaluation_due = False
        self.bad_steps.check_validation(self.step, evaluation.loss)
        step, validation = self.step, self._scores(evaluation)
        self.validation, self.validated_step = validation, step
        if self.log is not None:
            self._check_folder()
            self.log.write(step, "validation", validation)
            examples = self.run.validation.examples
            if isinstance(examples, PolicyExamples):
                write_samples(
                    self.run.folder,
                    step,
                    examples=examples,
                    predictions=evaluation.predictions,
                    tokenizer=self.run.tokenizer,
                )
        own, usual = bool(self.run.custom.names), self.config.objective.progress_metrics
        shown = tuple(evaluation.means) if own else usual
        self.progress.evaluated(step, validation, shown)
        self.callbacks(step, lambda callback: callback.on_evaluation(step, validation))
        return validation

    def _run_model_on_validation_data(self) -> Evaluation:
        examples, (index, count) = self.run.validation.examples, self.trainer.shard
        batches = evaluation_batches(
            examples,
            # As many sequences at once as a step processes at once.
            batch_size=self.config.batch_size // self.config.micro_batches,
            process_index=index,
            process_count=count,
        )
        return evaluate(
            self.trainer.evaluate,
            self.state,
            self._until_stopped(batches),
            self.trainer.validation or self.opened.objective,
            num_rows=examples.num_examples,
        )

    def _until_stopped(self, batches: Iterator[NumpyBatch]) -> Iterator[NumpyBatch]:
        for batch in batches:
            self.stopper.check_here()
            yield batch

    def _scores(self, evaluation: Evaluation) -> Scores:
        # The metrics of a kind of data need the predictions of its own objective.
        if self.run.custom.names:
            return {**evaluation.means, "loss": evaluation.loss}
        return self.config.objective.score(evaluation, self.run.validation, self.config.data)

    def _check_folder(self) -> None:
        """Raises RunError if the run folder, or a checkpoint in it, is gone."""
        if is_primary():
            self.kept.check(self.checkpoints.written)

    def _save(self) -> None:
        """Starts to write a checkpoint, with the validation loss if this step has one."""
        self._check_folder()
        measured = self.validation if self.validated_step == self.step else None
        position = position_to_save(
            self.position, self.bad_steps.counts, evaluation_due=self.evaluation_due
        )
        state = self.state
        if self.config.lora is not None:  # the base is read from where it is
            state = dataclasses.replace(state, frozen=None)
        self.checkpoints.save(state, position, None if measured is None else measured["loss"])
        if self.callbacks:
            self.checkpoints.wait()
            step, folder = self.step, self.run.folder / CHECKPOINTS / str(self.step)
            self.callbacks(step, lambda callback: callback.on_checkpoint(step, folder))

    def _end(self, stopped: bool, seconds: float) -> None:
        """Saves the state if the run was stopped, and raises the error that stopped it."""
        if stopped:
            self._save()
        self.checkpoints.wait()
        self._check_folder()
        if stopped:
            self.progress.log(
                f"{self.stopper.reason}: saved step {self.step}; the same command resumes from "
                "there"
            )
        self.progress.log(f"{counted(self.step, 'step')} done; trained for {seconds:.0f} s")
        with barrier():
            if self.stopper.failure is not None:
                raise self.stopper.failure
