"""The training loop, which takes steps, logs, evaluates, saves and stops."""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

import jax
import jax.numpy as jnp

from ...data.batching import BatchIterator, IteratorState, evaluation_batches
from ...data.chat.policy import PolicyExamples
from ...data.common.errors import StepNotTaken, counted
from ...data.common.fields import require, require_one_of, without_none
from ...data.common.progress import Progress
from ...models.adapters.lora import make_lora
from ...models.model import Model
from ...models.nn.typing import Params
from ...models.registry import create
from ...models.run_files import CHECKPOINTS
from ..distributed.multiprocess import barrier, from_primary, is_primary, on_primary
from ..distributed.sharding import has_virtual_devices
from ..evaluation.tasks import Judged, Task, flat, judge
from ..evaluation.vectors.held_out import vector_scores
from ..losses.eval_step import Evaluation, evaluate, evaluated_at_once
from ..optim.ema import evaluated_by_ema
from ..optim.schedules import make_schedule
from ..runs.custom import RunningModel
from ..runs.kept_folder import KeptFolder
from ..runs.metrics_log import MetricsLog, read_metrics
from ..runs.samples import write_samples
from ..state import Metrics, TrainState
from .bad_steps import BadSteps
from .checkpoint import Checkpoints
from .start import OpenRun, position_to_save
from .stop_signals import StopNow
from .stopping import Callbacks, Stopper

T = TypeVar("T")
Scores = dict[str, float]
"""Maps names to the loss and the metrics of an evaluation."""


@dataclasses.dataclass
class Loop:
    """Runs the steps of a run, and holds its state between two steps."""

    opened: OpenRun
    tasks: tuple[Task, ...]
    """The tasks of `evaluate.tasks`; empty except on the primary process."""
    kept: KeptFolder
    checkpoints: Checkpoints
    batches: BatchIterator
    log: MetricsLog | None
    """The log of metrics; None except on the primary process."""
    progress: Progress
    bad_steps: BadSteps
    stopper: Stopper
    callbacks: Callbacks
    state: TrainState
    step: int
    evaluation_due: bool
    """Whether an evaluation of this step is due but not yet complete."""
    position: IteratorState = dataclasses.field(init=False)
    """The position of the data iterator after this step."""
    pending: tuple[int, Metrics] | None = None
    """The number and the metrics of a step that may still be running on the devices."""
    validation: Scores | None = None
    measures: dict[int, float | None] = dataclasses.field(default_factory=dict)
    """The step of the last evaluation, and its measure; see `_measure`."""

    def __post_init__(self) -> None:
        self.run, self.config = self.opened.run, self.opened.run.config
        self.trainer, self.position = self.opened.trainer, self.batches.get_state()
        config = self.config
        self.schedule = make_schedule(config.optimizer, config.steps, config.schedule_start)
        self.evaluations = {config.evaluate_every, config.evaluate.tasks_every} - {0}

    def take_all_steps(self) -> int | None:
        """Takes the remaining steps; returns the number of the signal that ended the run, if any.

        Raises:
            NonFiniteLoss: too many steps had a loss that is not finite.
            Exception: a function that the caller passed raised this error; the state was saved
              first.
        """
        started, stopped = time.monotonic(), False
        try:
            self.callbacks(self.step, lambda callback: callback.on_start(self._running_model()))
            self._evaluate_before_first_step()
            while self.step < self.config.steps:
                # A collective call: if one process must stop, all processes stop before the same
                # step.
                self.stopper.check()
                self._take_step()
                saving = self._is_due(self.config.checkpoint_every) or self._is_last
                if saving or any(map(self._is_due, self.evaluations)):
                    # First log the pending step, so that a state with a non-finite loss is never
                    # saved. Evaluate before every checkpoint, because the measure decides which
                    # checkpoints are kept.
                    self._log_pending()
                    self._evaluate()
                if saving:
                    self._save()
        except StopNow:
            stopped = True
        self._log_pending()
        self._end(stopped, time.monotonic() - started)
        # If an error stopped the run, `_end` has already raised this error.
        return self.stopper.signal if stopped else None

    def _running_model(self) -> RunningModel:
        """Returns the model for callbacks; its parameters are gathered only when they are read."""
        model = create(self.config.model)

        def read(ema: bool) -> tuple[int, Params]:
            state = evaluated_by_ema(self.state) if ema else self.state
            require(state, "the run keeps no moving average: set optimizer.ema_decay")
            assert state is not None
            # Check before merging: a merge in one process would wait for the others forever.
            leaves = jax.tree.leaves((state.params, state.frozen))
            require(
                all(x.is_fully_addressable or x.is_fully_replicated for x in leaves),
                "the parameters are sharded over several processes, but callbacks run in one "
                "process: read the checkpoint in on_checkpoint",
            )
            return int(state.step), self._merged(model, jax.tree.map(_in_this_process, state))

        return RunningModel(model, self.run.tokenizer, read)

    def _merged(self, model: Model, state: TrainState) -> Params:
        """Returns the parameters of a state, with adapters merged into the base model."""
        lora = self.config.lora
        if lora is None:
            return state.params
        return make_lora(lora, model).merge(state.params, cast(Params, state.frozen))

    @property
    def _is_last(self) -> bool:
        return self.step == self.config.steps

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0

    def _take_step(self) -> None:
        """Starts a step, and logs the previous step while the devices compute.

        Raises:
            StopNow: a signal arrived before the step, or the data or a reward function raised an
              error.
        """
        number = self.step + 1
        # `saving_first` raises StopNow for an error, so that the state is saved before the error
        # ends the run.
        with self.stopper.saving_first(f"step {number}"), self.stopper.interruptible():
            batch = next(self.batches)
        with self.stopper.saving_first(f"step {number}", StepNotTaken):
            self.state, metrics = self.trainer.step(self.state, batch)
        # Virtual CPU devices may deadlock if several programs run at once.
        if has_virtual_devices():
            self.stopper.wait_for(metrics)
        # Store the position only after the step, so that a resumed run repeats the batch if the
        # step failed.
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
        # A skipped step changed no parameters, so it is not logged.
        if self.bad_steps.skips(step, numbers):
            return
        self.progress.advance(step, numbers["loss"])
        if self.log is not None and step % self.config.log_every == 0:
            skipped = self.bad_steps.counts.total
            # The schedule counts updates from 0.
            rate = float(jnp.asarray(self.schedule(step - skipped - 1)))
            self._check_folder()
            counted = {"learning_rate": rate, "skipped_steps": skipped}
            self.log.write(step, "train", {**counted, **numbers})
        self.callbacks(step, lambda callback: callback.on_step(step, numbers))

    def _evaluate_before_first_step(self) -> None:
        """Repeats an interrupted evaluation, or evaluates the initial model.

        The initial model is evaluated for comparison, and to reject an unknown `best_metric`.
        """
        if self.evaluation_due:
            self._evaluate()
            if (measure := self.measures[self.step]) is not None:
                self.checkpoints.add_measure(self.step, measure)
            return
        # For comparison, also evaluate a policy before training, even if its initial parameters are
        # random.
        started = self.config.init_from is not None or self.trainer.validation is not None
        compared = self.config.objective.compares_with_start and started
        needed = compared or self.config.best_metric is not None
        if needed and self.step == 0 and not read_metrics(self.run.folder, "validation"):
            self._evaluate()

    def _evaluate(self) -> None:
        """Computes the loss and the metrics on the validation data.

        Raises:
            StopNow: a signal interrupted the evaluation, or the evaluation failed. The evaluation
              is then still due.
        """
        # First mark the evaluation as due, so that a checkpoint after an interruption records that
        # it is due.
        self.evaluation_due = True
        step, average = self.step, evaluated_by_ema(self.state)
        # Also evaluate the moving average of the parameters, if the optimizer keeps one.
        states = without_none({"": self.state, "ema_": average})
        with self.stopper.saving_first(f"the evaluation after step {step}"):
            evaluations = {x: self._run_model_on_validation_data(s) for x, s in states.items()}
        evaluation = evaluations[""]
        self.bad_steps.check_validation(step, evaluation.loss)
        with self.stopper.saving_first(f"the evaluation on tasks after step {step}"):
            judged = {x: self._judge(state) for x, state in states.items()}
        self.evaluation_due = False
        validation = {
            prefix + name: x
            for prefix, of_state in evaluations.items()
            for name, x in {**self._scores(of_state), **judged[prefix]}.items()
        }
        # `_measure` raises UserError if `best_metric` does not exist.
        self.validation, self.measures = validation, {step: self._measure(validation)}
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
        # The main metrics of a custom objective are unknown, so show the means of all its terms.
        is_custom, usual = bool(self.run.custom.names), self.config.objective.progress_metrics
        shown = tuple(evaluation.means) if is_custom else usual
        shown += ("ema_loss",) * (average is not None)
        # Show only the first metric of each task, which is its main metric.
        shown += tuple({name.split("/")[0]: name for name in reversed(judged[""])}.values())
        self.progress.evaluated(step, validation, shown)
        self.callbacks(step, lambda callback: callback.on_evaluation(step, validation))

    def _run_model_on_validation_data(self, state: TrainState) -> Evaluation:
        examples, (index, count) = self.run.validation.examples, self.trainer.shard
        batches = evaluation_batches(
            examples,
            batch_size=evaluated_at_once(
                self.opened.objective, self.config.batch_size, self.config.micro_batches
            ),
            process_index=index,
            process_count=count,
        )
        return evaluate(
            self.trainer.evaluate,
            state,
            self._until_stopped(batches),
            self.trainer.validation or self.opened.objective,
            num_rows=examples.num_examples,
        )

    def _judge(self, state: TrainState) -> Scores:
        """Returns the metrics of the tasks if tasks are due at this step; a collective call."""
        if not self._tasks_are_due:
            return {}
        model = create(self.config.model)
        params = on_primary(self._merged(model, state))
        judged = Judged(self.run.folder, loaded=(model, params), log=self.progress.log)
        return from_primary(lambda: flat(judge(self._until_stopped(self.tasks), judged)))

    @property
    def _tasks_are_due(self) -> bool:
        settings = self.config.evaluate
        return bool(settings.tasks) and (self._is_last or self._is_due(settings.tasks_every or 1))

    def _until_stopped(self, parts: Iterable[T]) -> Iterator[T]:
        # An evaluation changes no state, so a signal may interrupt it between batches and tasks.
        for part in parts:
            self.stopper.check_local()
            yield part

    def _scores(self, evaluation: Evaluation) -> Scores:
        # The usual metrics need predictions that only the default objective returns, so a custom
        # objective is scored only by the means of its terms.
        if self.run.custom.names:
            return {**evaluation.means, "loss": evaluation.loss}
        scores = self.config.objective.score(evaluation, self.run.validation, self.config.data)
        by_dot = self.config.objective.compares_by_dot
        return {**scores, **vector_scores(evaluation, self.run.validation, by_dot=by_dot)}

    def _measure(self, scores: Scores) -> float | None:
        """Returns the number that ranks checkpoints; the lowest number is best.

        Returns None if `best_metric` is a metric of a task, and no tasks are due in this
        evaluation.
        """
        if self.config.best_metric is not None:
            direction, _, name = self.config.best_metric.partition(":")
            if "/" in name and self.config.evaluate.tasks and not self._tasks_are_due:
                return None
            numbers = [x for x, score in scores.items() if not isinstance(score, str)]
            require_one_of("the metric of best_metric", name, numbers)
            return scores[name] if direction == "min" else -scores[name]
        is_custom = bool(self.run.custom.names)
        return scores["loss"] if is_custom else self.config.objective.to_minimize(scores)

    def _check_folder(self) -> None:
        """Raises RunError if the run folder or its newest checkpoint was deleted."""
        if is_primary():
            self.kept.check(self.checkpoints.written)

    def _save(self) -> None:
        """Starts writing a checkpoint, including the measure if this step was evaluated."""
        self._check_folder()
        position = position_to_save(
            self.position, self.bad_steps.counts, evaluation_due=self.evaluation_due
        )
        state = self.state
        if self.config.lora is not None:  # a resumed run reads the base model from its source
            state = dataclasses.replace(state, frozen=None)
        self.checkpoints.save(state, position, self.measures.get(self.step))
        if self.callbacks:
            self.checkpoints.wait()
            step, folder = self.step, self.run.folder / CHECKPOINTS / str(self.step)
            self.callbacks(step, lambda callback: callback.on_checkpoint(step, folder))

    def _end(self, stopped: bool, seconds: float) -> None:
        """Saves the state of a stopped run and raises the error that stopped it, if any."""
        if stopped:
            self._save()
        self.checkpoints.wait()
        self._check_folder()
        if stopped:
            self.progress.log(
                f"{self.stopper.reason}: saved step {self.step}; the same command resumes from "
                "this step"
            )
        self.progress.log(f"{counted(self.step, 'step')} done; trained for {seconds:.0f} s")
        # An error in the primary process, such as a failed callback, must end all processes.
        with barrier():
            if self.stopper.failure is not None:
                raise self.stopper.failure


def _in_this_process(x: jax.Array) -> jax.Array:
    """Returns this process's copy of an array that is replicated over several processes."""
    return x if x.is_fully_addressable else x.addressable_data(0)
