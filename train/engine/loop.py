"""The training loop: what runs on the host."""

import dataclasses
import functools
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...data.batching import BatchIterator, evaluation_batches, train_iterator
from ...data.chat.policy import PolicyExamples
from ...data.common.errors import NonFiniteLoss, RunError, StepNotTaken, UserError
from ...data.common.progress import LogFn, Progress
from ...data.dataset import counted
from ...models.adapters.lora import LoRA, join_params, make_lora, without_adapters
from ...models.loading import CHECKPOINTS, CONFIG_FILE, TOKENIZER, steps
from ...models.registry import create
from ..config import TrainConfig, objective_of
from ..distributed.multiprocess import all_reduce_max, barrier, is_primary, primary_first
from ..distributed.sharding import has_virtual_devices
from ..evaluation.final_sample import final_sample
from ..losses.eval_step import evaluate
from ..losses.objective import Objective
from ..objectives.online import OnlineConfig
from ..optim.schedules import make_schedule
from ..rewards.functions import RewardFunction
from ..runs.custom import Callback, Custom, MakeExamples
from ..runs.init_from import InitFromPlan, init_from
from ..runs.kept_folder import KeptFolder
from ..runs.metrics_log import MetricsLog, read_metrics, wandb_of
from ..runs.report import REPORT_FILE, write_report
from ..runs.run_folder import Run, create_folder, prepare_run
from ..runs.run_lock import LOCK_FILE, RunLock
from ..runs.samples import read_samples, write_samples
from ..state import Metrics, TrainState, count_parameters
from .checkpoint import Checkpoints, DataState, set_aside_damaged
from .compile import CompiledTrainer, NumpyBatch, compile_trainer
from .machine_memory import memory_of_each
from .memory_summary import check_batch_fits, check_state_fits, check_step_fits
from .policy_trainer import compile_policy_trainer
from .stop_signals import StopNow, StopRequest, stop_requested

SECONDS_BETWEEN_LOOKS = 0.001
"""Time between two looks whether a step is done; the next one runs meanwhile."""
SKIPPED = "skipped"
"""The key of the skipped steps in a checkpoint, beside the data position."""
EVALUATION_DUE = "evaluation_due"
"""The key in a checkpoint, beside the data position, of an evaluation that a signal cut off."""

FAILED = 1 << 16
"""Stands in place of a signal's number if a function of the caller failed."""

Scores = dict[str, float]
"""Loss and metrics of an evaluation by name."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a call of `train`."""

    run: Run = dataclasses.field(repr=False)  # configuration and data fill many pages
    step: int
    finished: bool
    """False if a signal stopped it before its last step."""
    signal: int | None
    """The number of the signal that stopped it."""
    validation: Scores | None
    """The last evaluation of this call, if there was one."""
    sample: str | None = None
    """The output of the finished model for `sample_prompt`, if that is given."""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Counts of steps that changed nothing because their loss or gradient was not finite."""

    total: int = 0
    in_a_row: int = 0
    """The number of them since the last step that was not skipped."""


@dataclasses.dataclass
class _Session:
    """The state of the loop."""

    run: Run
    config: TrainConfig
    trainer: CompiledTrainer
    objective: Objective
    kept: KeptFolder
    checkpoints: Checkpoints
    batches: BatchIterator
    log: MetricsLog | None
    """None on all processes but the primary."""
    progress: Progress
    state: TrainState
    step: int
    position: dict[str, int]
    """The position in the data after that step."""
    skipped: Skipped
    evaluation_due: bool
    """Whether a signal cut off the evaluation of that step."""
    callbacks: Sequence[Callback] = ()
    failure: Exception | None = None
    """The exception of a callback, a reward, the data or an evaluation, which ends the run after
    the last finished step is saved."""
    failed: str = "a callback failed"
    """What failed, for a message."""
    validation: Scores | None = None
    validated_step: int | None = None


def train(
    config: TrainConfig,
    workdir: str | Path,
    *,
    resume: bool = True,
    quiet: bool = False,
    objective: Objective | None = None,
    examples: MakeExamples | None = None,
    callbacks: Sequence[Callback] = (),
    rewards: Sequence[RewardFunction] = (),
) -> Result:
    """Trains, or resumes training, in a run folder.

    A run that was stopped at any step and is called again ends with bit for bit the parameters
    of a run that was never stopped. SIGTERM, SIGHUP and Ctrl-C end the step in progress, save
    and return; a second Ctrl-C interrupts.
    With several processes (`jax.distributed`) all must make the same call; a signal to one
    stops all. While a run trains, no other one can in its folder.

    Args:
        config: the run.
        workdir: its folder.
        resume: whether to resume from the newest checkpoint; with False a folder
          that has checkpoints is refused.
        quiet: no progress bar.
        objective: what is learned, instead of the objective of the data. Scores are then the loss
          and the mean of each of its terms and measures.
        examples: a function that returns the examples to train on and those to validate on, two
          `data.ExampleSource`s, given the tokenizer. The head and the labels are then those of
          `config.model`; of `config.data` only the tokenizer is used (and the source, if a new
          vocabulary is trained), the length, which is the tokens of a sequence, and the number of
          workers. The last batch of an evaluation is filled up with examples of zeros, which the
          counts of the objective must leave out.
        callbacks: called with the metrics of steps and evaluations, and with checkpoints.
        rewards: functions that reward answers in reinforcement learning, besides those that
          `objective.rewards` names: `reward(prompts, completions, **fields)` returns a number
          for each completion, or None for one that it does not judge. A function need not take all
          of these arguments; `fields` are the other fields of the prompts' records.

    The run folder records the names of an own objective, own examples and own rewards; to resume
    the run, give them again.

    Raises:
        DataError, RunError, UserError: the data, the folder or the devices do
          not fit; raised before any training.
        NonFiniteLoss: the loss was not finite for more steps than may be skipped; the last
          checkpoint is kept.
    """
    if not isinstance(config, TrainConfig):
        raise UserError(
            f"config {config!r} is not a TrainConfig: give one, for example "
            'train.recipe("quickstart")'
        )
    if config.wandb_project is not None:  # before data are read
        wandb_of(config.wandb_project)
    progress = Progress(quiet or not is_primary())
    custom = Custom(objective, examples, tuple(rewards))
    # A run does not depend on what jax is configured to use: it resumes under any configuration.
    with jax.enable_x64(False), RunLock(Path(workdir), progress.log) as lock:
        memory_of_each()  # all processes ask each other; below, the others wait for the first
        run, learned, trainer, is_new = primary_first(
            lambda: _open(config, Path(workdir), lock, progress.log, custom=custom)
        )
        progress.log(f"{_sizes(run.config, trainer)}, {trainer.description}")
        progress.log(trainer.memory_summary)
        note = None if custom.names else run.config.objective.loss_note(run.config.data)
        if note is not None:
            progress.log(note)
        # All processes compile together.
        with _removed_on_failure(run.folder) if is_new else nullcontext(), barrier():
            if objective is not None:
                _warn_of_counted_filler(run, objective, progress.log)
            _foresee_memory(run, trainer, progress.log)
        step, validation, stopped_by = _take_up(
            run,
            learned,
            trainer,
            resume=resume,
            progress=progress,
            callbacks=callbacks,
        )
        # A signal may have cut off the evaluation of the last step.
        finished, sample = step == run.config.steps and stopped_by is None, None
        with barrier():
            if finished and is_primary() and (last := validation or _left_unreported(run.folder)):
                sample = _finish(run, last, trainer.description, progress)
    return Result(
        run=run,
        step=step,
        finished=finished,
        signal=None if finished else stopped_by,
        validation=validation,
        sample=sample,
    )


def _take_up(
    run: Run,
    objective: Objective,
    trainer: CompiledTrainer,
    *,
    resume: bool,
    progress: Progress,
    callbacks: Sequence[Callback],
) -> tuple[int, Scores | None, int | None]:
    """Takes the steps that a run has left; returns the last step, its scores and the signal."""
    config, kept = run.config, KeptFolder.of(run.folder)
    with (
        _explained_by(kept),
        stop_requested() as stop,
        Checkpoints(
            run.folder, keep_last=config.keep_last, keep_best=config.keep_best
        ) as checkpoints,
        closing(_train_batches(run, config, trainer.shard)) as batches,
    ):
        state, step, skipped, evaluation_due = _start(
            trainer,
            run,
            objective,
            checkpoints=checkpoints,
            batches=batches,
            resume=resume,
            log=progress.log,
        )
        if step == config.steps and not evaluation_due:
            progress.log(f"{run.folder} is finished: all {counted(step, 'step')} are done")
            return step, None, None
        with (
            _metrics_log(run.folder, step, config) as log,
            progress.bar(config.steps, step, config.batch_size * config.data.length),
        ):
            session = _Session(
                run=run,
                config=config,
                trainer=trainer,
                objective=objective,
                kept=kept,
                checkpoints=checkpoints,
                batches=batches,
                log=log,
                progress=progress,
                state=state,
                step=step,
                position=batches.get_state(),
                skipped=skipped,
                evaluation_due=evaluation_due,
                callbacks=callbacks,
            )
            stopped_by = _run_steps(session, stop)
            return session.step, session.validation, stopped_by


@contextmanager
def _explained_by(kept: KeptFolder) -> Iterator[None]:
    """Raises RunError in place of an error whose cause is that the run folder was deleted."""
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
    """Opens the log of a run at `step`; yields None where another process writes it."""
    with barrier():
        log = (
            MetricsLog(folder, first_step=step, wandb_project=config.wandb_project)
            if is_primary()
            else None
        )
    with log or nullcontext():
        yield log


def _open(
    config: TrainConfig, folder: Path, lock: RunLock, log: LogFn, *, custom: Custom
) -> tuple[Run, Objective, CompiledTrainer, bool]:
    """Checks the run, the data and the devices, and only then makes the run folder.

    The last value is whether this process made it now.
    """
    if is_primary() and (folder / CONFIG_FILE).is_file():
        lock.acquire()  # before data are read: who may not train is told at once
    run = prepare_run(config, folder, log, custom)
    objective = objective_of(run.config, custom.objective)
    if isinstance(run.config.objective, OnlineConfig):
        trainer = compile_policy_trainer(run, objective, custom.rewards)
    else:
        trainer = compile_trainer(run.config, objective)
    is_begun = bool(steps(run.folder))
    check_state_fits(run.config, trainer.shapes, jax.local_devices(), resumed=is_begun)
    is_new = not (run.folder / CONFIG_FILE).is_file()
    create_folder(run)
    if is_primary():
        lock.acquire()
    set_aside_damaged(run.folder, log)
    return run, objective, trainer, is_new


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Removes what a new run folder holds, and no other file, if its step cannot be compiled.

    The same command may then be given with other options.
    """
    try:
        yield
    except BaseException:
        for name in (CONFIG_FILE, LOCK_FILE):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
        with suppress(OSError):  # it holds other files, or is where a disk is mounted
            folder.rmdir()
        raise


def _foresee_memory(run: Run, trainer: CompiledTrainer, log: LogFn) -> None:
    """Compiles the step, and refuses one that does not fit."""
    config, is_begun = run.config, bool(steps(run.folder))
    example = run.train.examples.example(0, 0)
    batch = {
        name: jax.ShapeDtypeStruct((config.batch_size, *np.shape(x)), np.asarray(x).dtype)
        for name, x in example.items()
    }
    check_batch_fits(config, batch, resumed=is_begun)
    check_step_fits(
        config,
        functools.partial(trainer.compile, batch),
        jax.local_devices(),
        resumed=is_begun,
        log=log,
    )


def _warn_of_counted_filler(run: Run, objective: Objective, log: LogFn) -> None:
    """Says so if an own objective counts the examples of zeros at the end of an evaluation."""
    examples, config = run.validation.examples, run.config
    filler = -examples.num_examples % (config.batch_size // config.micro_batches)
    zeros = {name: jnp.zeros_like(x)[None] for name, x in examples.example(0, 0).items()}
    counts = objective.checked(objective.counts(zeros), "counts")
    wrong = [name for name, count in counts.items() if float(count) != 0]
    if filler and wrong:
        log(
            f"the last batch of an evaluation is filled up with {counted(filler, 'example')} of "
            f"zeros, which counts[{wrong[0]!r}] of the objective includes: scores will be wrong; "
            "let counts and terms leave them out"
        )


def _left_unreported(folder: Path) -> Scores | None:
    """Returns the last evaluation if the process was killed before it wrote its report."""
    logged = read_metrics(folder, "validation")
    if not logged or (folder / REPORT_FILE).is_file():
        return None
    return {name: value for name, value in logged[-1].items() if name not in ("step", "split")}


def _finish(run: Run, validation: Scores, devices: str, progress: Progress) -> str | None:
    """Writes the report of a finished run; returns its sample."""
    config = run.config
    summary = {
        "steps": f"{config.steps:,} of {config.batch_size} × {config.data.length} tokens",
        "training data": run.train.summary
        if run.custom.examples is not None
        else f"{config.data.source_name}: {run.train.summary}",
        **{f"own {what}": name for what, name in run.custom.names.items()},
        "devices": devices,
    }
    baseline = None if run.custom.names else config.objective.baseline(run.train)
    if baseline is not None:
        compared, name, value = baseline
        summary[name] = f"{value:.4f} nats per token"
        progress.log(f"validation {compared} {validation[compared]:.4f}; {name} {value:.4f}")
    samples = read_samples(run.folder)
    write_report(run.folder, summary, validation, None, samples=samples)
    if config.sample_prompt is None:
        return None
    sample = final_sample(run.folder, config.sample_prompt, config.seed)
    write_report(run.folder, summary, validation, sample, samples=samples)
    return sample


def _train_batches(run: Run, config: TrainConfig, shard: tuple[int, int]) -> BatchIterator:
    return train_iterator(
        run.train.examples,
        batch_size=config.batch_size,
        seed=config.seed,
        num_steps=config.steps,
        process_index=shard[0],
        process_count=shard[1],
        num_workers=config.data.num_workers,
    )


def _start(
    trainer: CompiledTrainer,
    run: Run,
    objective: Objective,
    *,
    checkpoints: Checkpoints,
    batches: BatchIterator,
    resume: bool,
    log: LogFn,
) -> tuple[TrainState, int, Skipped, bool]:
    """Returns the first state, its step and the skipped steps: new, or of the newest checkpoint.

    The last value is whether that step is still to be evaluated.
    """
    newest = checkpoints.newest
    if newest is None:
        return _first_state(trainer, run, objective, log), 0, Skipped(), False
    if not resume:
        raise RunError(
            f"{run.folder} has checkpoints up to step {newest}: leave out --no-resume to resume "
            "from there, or give another --workdir"
        )
    # A checkpoint of adapters is without their base, which is read where it is.
    base = None
    if run.config.lora is not None:
        base = _first_state(trainer, run, objective, log)
    shapes = trainer.shapes if base is None else dataclasses.replace(trainer.shapes, frozen=None)
    state, data = checkpoints.restore(newest, shapes)
    if base is not None:
        state = dataclasses.replace(state, frozen=base.frozen)
    skipped, evaluation_due = Skipped(**data.pop(SKIPPED, {})), data.pop(EVALUATION_DUE, False)
    batches.set_state(data)
    log(f"resuming from step {newest} of {run.folder}")
    return state, newest, skipped, evaluation_due


def _sizes(config: TrainConfig, trainer: CompiledTrainer) -> str:
    """Returns the numbers of parameters, for a message."""
    trained = count_parameters(trainer.shapes.params)
    if config.lora is None:
        return f"model: {trained:,} parameters"
    frozen = count_parameters(trainer.shapes.frozen or {})
    return f"model: {frozen:,} frozen parameters, {trained:,} trained with adapters"


def _first_state(
    trainer: CompiledTrainer, run: Run, objective: Objective, log: LogFn
) -> TrainState:
    """Returns the state before the first step: with random parameters, or those of another run."""
    plan = run.init_from
    if plan is None:
        return trainer.init()
    if run.config.lora is not None:
        lora = make_lora(run.config.lora, create(run.config.model))
        kept = objective.reference or objective.keeps_initial
        return _with_base(trainer, plan, lora, keep_initial=kept, log=log)
    whole = trainer.init()
    shardings = jax.tree.map(lambda x: x.sharding, trainer.shapes.params)
    params = init_from(plan, whole.params, shardings, log)
    # The reference is the model as it was before the first step, in arrays of its own.
    frozen = None if whole.frozen is None else jax.tree.map(jnp.copy, params)
    return dataclasses.replace(whole, params=params, frozen=frozen)


def _with_base(
    trainer: CompiledTrainer, plan: InitFromPlan, lora: LoRA, *, keep_initial: bool, log: LogFn
) -> TrainState:
    """Returns the state before the first step, with a base that is read in place of a random one.

    `keep_initial` says whether the base includes the initial values of what is trained whole.
    """
    shapes = trainer.shapes
    # The random base gives its memory to the one that is read.
    whole = dataclasses.replace(trainer.init(), frozen=None)
    assert shapes.frozen is not None
    # What is trained whole keeps its precision, and its random value where the base lacks it.
    fresh = join_params(shapes.frozen, without_adapters(whole.params))
    placed = join_params(shapes.frozen, without_adapters(shapes.params))
    params = init_from(plan, fresh, jax.tree.map(lambda x: x.sharding, placed), log)
    own, frozen = lora.split(params, keep_initial=keep_initial)
    return dataclasses.replace(whole, params=join_params(whole.params, own), frozen=frozen)


def _run_steps(s: _Session, stop: StopRequest) -> int | None:
    """Takes the remaining steps; the loss of a step is read while the next one runs.

    Returns the number of the signal that stopped one of the processes, if any.
    """
    config = s.config
    schedule = make_schedule(config.optimizer, config.steps)
    pending: tuple[int, Metrics] | None = None
    started = time.monotonic()
    greatest, stopped_by = all_reduce_max(), 0
    if s.evaluation_due and not (stopped_by := _evaluate(s, stop)):
        assert s.validation is not None
        s.checkpoints.add_loss(s.step, s.validation["loss"])
    if s.trainer.validation is not None and not (
        s.step or read_metrics(s.run.folder, "validation")
    ):
        stopped_by = _evaluate(s, stop)  # what the policy is rewarded with before it learns
    while not stopped_by and s.step < config.steps:
        if stopped_by := greatest(FAILED if s.failure is not None else stop.number):
            break
        try:
            batch = _next_batch(s, stop)
            s.state, metrics = s.trainer.step(s.state, batch)
        except StopNow:
            stopped_by = stop.number
            break
        except StepNotTaken as note:
            stopped_by = _fail(s, f"step {s.step + 1}", note.__cause__)
            break
        if has_virtual_devices():
            _wait_for(s, metrics, stop)
        s.step, s.position = s.step + 1, s.batches.get_state()
        if pending is not None:
            _wait_for(s, pending[1], stop)
            _record(s, *pending, schedule)
        pending = (s.step, metrics)
        saving = s.step % config.checkpoint_every == 0 or s.step == config.steps
        if saving or s.step % config.evaluate_every == 0:
            # Recorded first: a state whose loss was not finite is never saved. Every
            # checkpoint is evaluated, so that the best is among those kept.
            _record(s, *pending, schedule)
            pending = None
            if stopped_by := _evaluate(s, stop):
                break
            if saving:
                _save(s)
    if pending is not None:
        _wait_for(s, pending[1], stop)
        _record(s, *pending, schedule)
    if stopped_by:
        _save(s)
        s.checkpoints.wait()
        _check_folder(s)
        name = s.failed if stopped_by == FAILED else signal.Signals(stopped_by).name
        s.progress.log(f"{name}: saved step {s.step}; the same command resumes from there")
    else:
        s.checkpoints.wait()
        _check_folder(s)
    s.progress.log(
        f"{counted(s.step, 'step')} done; trained for {time.monotonic() - started:.0f} s"
    )
    if s.callbacks or s.failure is not None:
        with barrier():
            if s.failure is not None:
                raise s.failure
    return stopped_by or None


def _fail(s: _Session, what: str, error: BaseException | None) -> int:
    """Notes the error that ends the run after a checkpoint of the last step; returns `FAILED`.

    Args:
        s: the session, whose state is that of its last step.
        what: what failed, for a message.
        error: raised when that step is saved.
    """
    assert isinstance(error, Exception)
    if s.failure is None:
        reason = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        s.failure, s.failed = error, " ".join(f"{what} failed ({reason})".split())
    return FAILED


def _call_back(s: _Session, call: Callable[[Callback], None]) -> None:
    """Calls each callback on the primary process, until one fails."""
    for callback in s.callbacks if is_primary() else ():
        if s.failure is None:
            try:
                call(callback)
            except Exception as error:
                _fail(s, f"the callback {type(callback).__name__} after step {s.step}", error)


def _next_batch(s: _Session, stop: StopRequest) -> NumpyBatch:
    """Returns the next batch, unless others wait for this process.

    Raises:
        StopNow: A signal comes before it.
        StepNotTaken: The data failed.
    """
    # The state is whole here, and needs no batch to be saved. Several processes must agree first.
    stop.cuts_off = jax.process_count() == 1
    try:
        if stop.cuts_off and stop.number:
            raise StopNow
        return next(s.batches)
    except Exception as error:
        if jax.process_count() > 1:
            raise
        raise StepNotTaken from error
    finally:
        stop.cuts_off = False


def _wait_for(s: _Session, metrics: Metrics, stop: StopRequest) -> None:
    """Waits for the metrics of a step where Python handles signals, and tells of the first one."""
    is_told = False
    # All arrays of jax have `is_ready`, though the class that type checkers see does not state it.
    while not all(x.is_ready() for x in metrics.values()):  # pyright: ignore
        if stop.number and not is_told:
            name = signal.Signals(stop.number).name
            s.progress.log(f"{name}: the step in progress ends first; a second one ends at once")
            is_told = True
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _record(s: _Session, step: int, metrics: Metrics, schedule: optax.Schedule) -> None:
    """Reads the metrics of a step, which waits for it; logs them or counts a skipped step."""
    numbers = {name: float(value) for name, value in metrics.items()}
    loss, norm = numbers["loss"], numbers["gradient_norm"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        _skip(s, f"the loss of step {step} is {loss} (gradient norm {norm})")
        return
    s.skipped = dataclasses.replace(s.skipped, in_a_row=0)
    s.progress.advance(step, loss)
    if s.log is not None and step % s.config.log_every == 0:
        updates = step - s.skipped.total  # the schedule counts updates, not steps
        rate = float(jnp.asarray(schedule(updates - 1)))
        counted = {"learning_rate": rate, "skipped_steps": s.skipped.total}
        _check_folder(s)
        s.log.write(step, "train", {**counted, **numbers})
    _call_back(s, lambda callback: callback.on_step(step, numbers))


def _skip(s: _Session, what: str) -> None:
    """Counts a step that changed nothing; raises NonFiniteLoss after too many in a row."""
    most = s.config.skip_bad_steps
    s.skipped = Skipped(s.skipped.total + 1, s.skipped.in_a_row + 1)
    if s.skipped.in_a_row > most:
        raise _not_finite(s, f"{what}, after {most} skipped steps" if most else what)
    s.progress.log(f"{what}: skipped, {s.skipped.in_a_row} of at most {most} in a row")


def _not_finite(s: _Session, what: str) -> NonFiniteLoss:
    kept = s.checkpoints.newest
    rest = "no checkpoint was written yet" if kept is None else f"step {kept} is kept"
    return NonFiniteLoss(
        f"{what}; {rest}: lower optimizer.peak_learning_rate, or lengthen optimizer.warmup_steps"
    )


def _evaluate(s: _Session, stop: StopRequest) -> int:
    """Computes loss and metrics on the validation data.

    Returns the number of the signal that cut it off, 0 if none did; the evaluation is then due.
    """
    split, data, (index, count) = s.run.validation, s.config.data, s.trainer.shard
    batches = evaluation_batches(
        split.examples,
        # As many sequences at once as a step processes at once.
        batch_size=s.config.batch_size // s.config.micro_batches,
        process_index=index,
        process_count=count,
    )
    s.evaluation_due = True
    try:
        evaluation = evaluate(
            s.trainer.evaluate,
            s.state,
            _until_stopped(batches, stop),
            s.trainer.validation or s.objective,
            num_rows=split.examples.num_examples,
        )
    except StopNow:
        return stop.number
    except Exception as error:  # the state is whole
        noted = isinstance(error, StepNotTaken)
        if jax.process_count() > 1 and not noted:
            raise
        what = f"the evaluation after step {s.step}"
        return _fail(s, what, error.__cause__ if noted else error)
    s.evaluation_due = False
    if not math.isfinite(evaluation.loss):
        raise _not_finite(s, f"the validation loss of step {s.step} is {evaluation.loss}")
    scores: Scores = {"loss": evaluation.loss}
    # The metrics of a kind of data need the predictions of its own objective.
    own = bool(s.run.custom.names)
    s.validation = (
        evaluation.means | scores if own else s.config.objective.score(evaluation, split, data)
    )
    s.validated_step = s.step
    if s.log is not None:
        _check_folder(s)
        s.log.write(s.step, "validation", s.validation)
        if isinstance(split.examples, PolicyExamples):
            write_samples(
                s.run.folder,
                s.step,
                examples=split.examples,
                predictions=evaluation.predictions,
                tokenizer=s.run.tokenizer,
            )
    shown = tuple(evaluation.means) if own else s.config.objective.progress_metrics
    s.progress.evaluated(s.step, s.validation, shown)
    step, validation = s.step, s.validation
    _call_back(s, lambda callback: callback.on_evaluation(step, validation))
    return 0


def _until_stopped(batches: Iterator[NumpyBatch], stop: StopRequest) -> Iterator[NumpyBatch]:
    """Yields batches; raises StopNow after a signal, unless other processes wait for this one."""
    for batch in batches:
        if stop.number and jax.process_count() == 1:
            raise StopNow
        yield batch


def _check_folder(s: _Session) -> None:
    """Raises RunError if the run folder, or a checkpoint in it, is gone."""
    if is_primary():
        s.kept.check(s.checkpoints.written)


def _save(s: _Session) -> None:
    """Starts to write a checkpoint, with the validation loss if this step has one."""
    _check_folder(s)
    measured = s.validation if s.validated_step == s.step else None
    loss = None if measured is None else measured["loss"]
    data: DataState = {**s.position, SKIPPED: dataclasses.asdict(s.skipped)}
    if s.evaluation_due:
        data[EVALUATION_DUE] = True
    state = s.state
    if s.config.lora is not None:  # the base is where it was read from
        state = dataclasses.replace(state, frozen=None)
    s.checkpoints.save(state, data, loss)
    if s.callbacks:
        s.checkpoints.wait()
        step, folder = s.step, s.run.folder / CHECKPOINTS / str(s.step)
        _call_back(s, lambda callback: callback.on_checkpoint(step, folder))
