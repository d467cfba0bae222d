"""Trains a model: opens a run, takes its steps, and writes its report."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import jax

from ...data.chat.records import Demonstration, Preference
from ...data.common.errors import counted
from ...data.common.fields import require
from ...data.common.progress import Progress
from ...models.heads.specs import CAUSAL_HEADS
from ..config import TrainConfig
from ..distributed.multiprocess import barrier, is_primary
from ..evaluation.answers import (
    Rows,
    answers_before_and_after,
    log_rows,
    rewards_of_pairs,
)
from ..evaluation.final_sample import final_sample
from ..evaluation.tasks import Task, open_all
from ..losses.objective import Objective
from ..rewards.functions import RewardFunction
from ..runs.custom import Callback, Custom, MakeExamples, check_custom
from ..runs.kept_folder import KeptFolder
from ..runs.metrics_log import MetricsLog, read_metrics, wandb_of
from ..runs.report import REPORT_FILE, write_report
from ..runs.run_folder import Run
from ..runs.run_lock import RunLock
from ..runs.samples import read_samples
from ..runs.stages import described_stages
from .bad_steps import BadSteps
from .checkpoint import Checkpoints, best_checkpoint
from .loop import Loop, Scores
from .machine_memory import memory_of_each
from .start import OpenRun, mixture_lines, open_run, start_or_resume, train_batches
from .stop_signals import stop_requested
from .stopping import Callbacks, Stopper


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a call of `train`."""

    run: Run = dataclasses.field(repr=False)  # too long to print
    step: int
    finished: bool
    """False if a signal stopped the run before its last step."""
    signal: int | None
    """The number of the signal that stopped the run, or None."""
    validation: Scores | None
    """The metrics of the last evaluation in this call, or None if there was none."""
    sample: str | None = None
    """The text that the finished model generates for `sample_prompt`; None without a prompt.
    """


def train(
    config: TrainConfig,
    workdir: str | Path,
    *,
    resume: bool = True,
    extend: bool = False,
    quiet: bool = False,
    objective: Objective | None = None,
    examples: MakeExamples | None = None,
    callbacks: Sequence[Callback] = (),
    rewards: Sequence[RewardFunction] = (),
) -> Result:
    """Starts or resumes the training of a model in a run folder.

    A run that is stopped at any step and then resumed ends with the same parameters, bit for bit,
    as a run that is not stopped. On SIGTERM, SIGHUP and Ctrl-C, the call completes the step in
    progress, saves the state and returns; a second Ctrl-C interrupts the call. With several
    processes (`jax.distributed`), all processes must make the same call, and a signal to one
    process stops them all. The folder is locked while a run trains.

    Args:
        config: the configuration of the run.
        workdir: the run folder.
        resume: whether to resume from the newest checkpoint. If False, a folder with checkpoints
          raises RunError.
        extend: whether to add a stage to an existing run if `config` differs from the run's
            configuration. The stage lasts from the newest checkpoint to `config.steps`. Steps,
            batch size, learning rate, schedule and data may differ; parameters, optimizer state and
            the position in the same data are kept.
        quiet: whether to hide the progress bar.
        objective: replaces the objective of the data. Evaluations during the run then report only
          the loss of this objective and the mean of each sum that its `terms` returns, with or
          without a coefficient. They report no scores of predictions, such as F1; `score_run`
          computes these scores after the run.
        examples: a function that takes the tokenizer and returns the training and the validation
          examples, each a `data.ExampleSource`. `config.model` then sets the head and the labels.
          Of `config.data`, the run uses only the tokenizer, the source (if a new vocabulary is
          trained), the sequence length in tokens and the number of workers. The last batch of an
          evaluation is padded with examples that consist of zeros, which the objective must not
          count.
        callbacks: called with the metrics of steps and evaluations, and with checkpoints.
        rewards: functions that reward answers in reinforcement learning, in addition to
          `objective.rewards`: `reward(prompts, completions, **fields)` returns a number for each
          completion, or None for no reward. A reward function may leave out arguments that it does
          not use; `fields` are all other fields of the prompts' records.

    The run folder records only the names of a custom objective, custom examples and custom rewards,
    so pass the same objects again to resume the run.

    Raises:
        DataError, RunError, UserError: the data, the folder or the devices do not fit the
          configuration; raised before any training.
        NonFiniteLoss: the number of consecutive steps without a finite loss exceeds
          `skip_bad_steps`; the last checkpoint is kept.
    """
    require(
        isinstance(config, TrainConfig),
        f"config {config!r} is not a TrainConfig: give a TrainConfig, for example "
        'train.recipe("quickstart")',
    )
    check_custom(objective, examples, callbacks, rewards)
    # A stage continues from a checkpoint. Raise this error before the folder records the stage.
    require(
        resume or not extend, "extend requires a checkpoint, but resume is False: leave resume out"
    )
    if config.wandb_project is not None:  # raise any error of wandb before data are read
        wandb_of(config.wandb_project)
    with barrier():
        tasks = open_all(config.evaluate) if is_primary() else ()
    progress = Progress(quiet or not is_primary())
    custom = Custom(objective, examples, tuple(rewards))
    # Fix the precision, so that a run can be resumed under any jax configuration.
    with jax.enable_x64(False), RunLock(Path(workdir), progress.log) as lock:
        memory_of_each()  # collective, so call it before `open_run` runs process 0 alone
        opened = open_run(
            config, Path(workdir), lock=lock, log=progress.log, custom=custom, extend=extend
        )
        run = opened.run
        with barrier():
            for task in tasks:
                task.check(run.config.model)
        step, validation, stopped_by = _take_steps(
            opened, tasks, resume=resume, progress=progress, callbacks=callbacks
        )
        # A signal may have interrupted the evaluation of the last step.
        finished, sample = step == run.config.steps and stopped_by is None, None
        with barrier():
            if finished and is_primary() and (last := validation or _left_unreported(run.folder)):
                sample = _finish(run, last, opened.trainer.description, progress)
    return Result(
        run=run,
        step=step,
        finished=finished,
        signal=stopped_by,
        validation=validation,
        sample=sample,
    )


def _take_steps(
    opened: OpenRun,
    tasks: tuple[Task, ...],
    *,
    resume: bool,
    progress: Progress,
    callbacks: Sequence[Callback],
) -> tuple[int, Scores | None, int | None]:
    """Takes a run's remaining steps; returns the last step, its metrics, and the signal or None."""
    run, config, kept = opened.run, opened.run.config, KeptFolder.of(opened.run.folder)
    with (
        _explained_by(kept),
        stop_requested() as request,
        Checkpoints(
            run.folder, keep_last=config.keep_last, keep_best=config.keep_best
        ) as checkpoints,
        closing(train_batches(run, opened.trainer.shard)) as batches,
    ):
        start = start_or_resume(opened, checkpoints, batches, resume=resume, log=progress.log)
        # All steps are done. `train` writes the report if it is missing.
        if start.step == config.steps and not start.evaluation_due:
            progress.log(f"{run.folder} is finished: all {counted(start.step, 'step')} are done")
            return start.step, None, None
        stopper = Stopper(request, progress.log)
        with (
            _metrics_log(run.folder, start.step, config) as log,
            progress.bar(config.steps, start.step, config.batch_size * config.data.lengths[0]),
        ):
            loop = Loop(
                opened=opened,
                tasks=tasks,
                kept=kept,
                checkpoints=checkpoints,
                batches=batches,
                log=log,
                progress=progress,
                bad_steps=BadSteps(config.skip_bad_steps, start.skipped, checkpoints, progress.log),
                stopper=stopper,
                callbacks=Callbacks(callbacks, stopper),
                state=start.state,
                step=start.step,
                evaluation_due=start.evaluation_due,
            )
            stopped_by = loop.take_all_steps()
            return loop.step, loop.validation, stopped_by


@contextmanager
def _explained_by(kept: KeptFolder) -> Iterator[None]:
    """If the run folder was deleted, raises RunError in place of the error of the block."""
    try:
        yield
    except Exception:
        if is_primary():
            kept.check()
        raise
    finally:
        if is_primary():
            kept.remove_rest()


@contextmanager
def _metrics_log(folder: Path, step: int, config: TrainConfig) -> Iterator[MetricsLog | None]:
    """Opens the log of a run at `step`; yields None except on the primary process."""
    log: MetricsLog | None = None
    with ExitStack() as stack:
        # If the log cannot be opened, all processes fail together.
        with barrier():
            if is_primary():
                log = MetricsLog(folder, first_step=step, wandb_project=config.wandb_project)
                stack.enter_context(log)
        yield log


def _left_unreported(folder: Path) -> Scores | None:
    """Returns the last logged evaluation if a killed process left the run without a report."""
    logged = read_metrics(folder, "validation")
    if not logged or (folder / REPORT_FILE).is_file():
        return None
    return {name: value for name, value in logged[-1].items() if name not in ("step", "split")}


def _finish(run: Run, validation: Scores, devices: str, progress: Progress) -> str | None:
    """Writes the report of a finished run; returns the text that the model wrote for the report."""
    config, stage = run.config, run.config.stage
    # Earlier stages may have had another batch size or another length.
    number = f"{config.steps:,}" + (f", the last {config.steps - stage.start:,}" if stage else "")
    summary = {
        "steps": f"{number} of {config.batch_size} × {config.data.lengths[0]} tokens",
        "training data": run.train.summary
        if run.custom.examples is not None
        else f"{config.data.source_name}: {run.train.summary}",
        **{f"source {name}": part for name, part in mixture_lines(run)},
        **{f"own {what}": name for what, name in run.custom.names.items()},
        "devices": devices,
        **described_stages(run.folder, run.stated),
    }
    best = best_checkpoint(run.folder) if config.keep_best else None
    if best is not None:
        summary["best checkpoint"] = f"step {best:,}"
        progress.log(f"best checkpoint: step {best:,}")
    # Compare the loss with the loss of a model that uses only token frequencies.
    baseline = None if run.custom.names else config.objective.baseline(run.train)
    if baseline is not None:
        compared, name, value = baseline
        summary[name] = f"{value:.4f} nats per token"
        progress.log(f"validation {compared} {validation[compared]:.4f}; {name} {value:.4f}")
    # Show the effect of the training: first the change of the metrics, then answers of the initial
    # and the trained model.
    changes = _changes(run)
    for name, (before, after) in changes.items():
        progress.log(f"validation {name} before training {before:.4f}, after {after:.4f}")
    summary.update({f"{name} before training": f"{x:.4f}" for name, (x, _) in changes.items()})
    samples = read_samples(run.folder) or _compared(run)
    log_rows(samples, progress.log)
    write_report(run.folder, summary, validation, None, samples=samples)
    # Write the report before the model generates a sample, which may fail. The report is written
    # again below.
    if config.sample_prompt is None:
        return None
    sample = final_sample(run.folder, config.sample_prompt, config.seed)
    write_report(run.folder, summary, validation, sample, samples=samples)
    return sample


def _changes(run: Run) -> dict[str, tuple[float, float]]:
    """Returns the loss and the main metrics before and after training, if both were logged."""
    logged = read_metrics(run.folder, "validation")
    if run.custom.names or len(logged) < 2 or logged[0]["step"] > 0:
        return {}
    names = ("loss", *run.config.objective.progress_metrics)
    first, last = logged[0], logged[-1]
    shared = first.keys() & last.keys()
    return {name: (first[name], last[name]) for name in names if name in shared}


def _compared(run: Run) -> Rows:
    """Returns answers of the initial and the trained model, or the rewards of a reward model."""
    config, start = run.config, run.config.init_from
    if run.custom.names or start is None or not config.objective.compares_with_start:
        return []
    # Only conversations have answers.
    if not isinstance(run.validation.content[0], Demonstration | Preference):
        return []
    # A reward model has no answers, and its head was random before training.
    if config.model.head not in CAUSAL_HEADS:
        return rewards_of_pairs(config.steps, run.folder, run.validation.content)
    folders = ((0, start), (config.steps, run.folder))
    return answers_before_and_after(folders, run.tokenizer, run.validation.content)
