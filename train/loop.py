"""The training loop: host side only."""

import dataclasses
import math
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax

from ..data.pipeline import BatchIterator, evaluation_batches, train_iterator
from .checkpoint import Checkpoints
from .config import TrainConfig
from .errors import NonFiniteLoss, RunError
from .evaluation import evaluate
from .initialise import Beginning, begin
from .metrics import MetricsLog, read_metrics
from .objectives import Objective
from .parallel import Program, make_program
from .progress import Progress
from .report import REPORT_FILE, write_report
from .run import Run, create_folder, prepare_run
from .samples import final_sample
from .schedules import make_schedule
from .state import count_parameters
from .tasks import objective_of, score, task_of


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Run
    step: int
    finished: bool
    """False if it was asked to stop before its last step."""
    signal: int | None
    """The number of the signal that asked."""
    validation: dict[str, Any] | None
    """The last evaluation of this call, if there was one."""
    sample: str | None = None
    """What the finished model wrote, if `sample_prompt` is given."""


@dataclasses.dataclass
class _Session:
    """What the loop carries from step to step."""

    run: Run
    config: TrainConfig
    program: Program
    objective: Objective
    checkpoints: Checkpoints
    batches: BatchIterator
    log: MetricsLog
    progress: Progress
    state: Any
    step: int
    validation: dict[str, Any] | None = None
    validated_step: int | None = None


def train(
    config: TrainConfig, workdir: str | Path, *, resume: bool = True, quiet: bool = False
) -> Result:
    """Trains, or goes on training, in a run folder.

    Stopped at any step and called again, it ends with bit for bit the
    parameters of a run never stopped. SIGTERM, SIGHUP and Ctrl-C save and return.

    Args:
      config: the run.
      workdir: its folder.
      resume: whether to go on from the newest checkpoint; with False a folder
        that has checkpoints is refused.
      quiet: no progress bar.

    Raises:
      DataError, RunError, ValueError: the data, the folder or the devices do
        not fit; before any training.
      NonFiniteLoss: the loss stopped being finite; the last checkpoint stands.
    """
    if jax.process_count() > 1:
        raise RunError(
            f"{jax.process_count()} processes cannot share a run yet: start one, for all devices "
            "of one machine"
        )
    progress = Progress(quiet)
    run = prepare_run(config, Path(workdir), progress.say)
    config = run.config
    objective = objective_of(config)
    program = make_program(config, objective)
    create_folder(run)
    progress.say(
        f"model: {count_parameters(program.shapes.params):,} parameters, {program.description}"
    )
    with (
        _stop_requested() as stopping,
        Checkpoints(
            run.folder, keep_last=config.keep_last, keep_best=config.keep_best
        ) as checkpoints,
        closing(_train_batches(run, config)) as batches,
    ):
        state, step = _start(program, checkpoints, batches, run, resume, progress)
        validation = None
        if step == config.steps:
            progress.say(f"{run.folder} is finished: all {step} steps are done")
        else:
            with (
                MetricsLog(run.folder, first_step=step, wandb_project=config.wandb_project) as log,
                progress.bar(config.steps, step, config.batch_size * config.data.length),
            ):
                session = _Session(
                    run=run,
                    config=config,
                    program=program,
                    objective=objective,
                    checkpoints=checkpoints,
                    batches=batches,
                    log=log,
                    progress=progress,
                    state=state,
                    step=step,
                )
                _run_steps(session, stopping)
                step, validation = session.step, session.validation
    finished, sample = step == config.steps, None
    if finished and (unreported := validation or _left_unreported(run.folder)):
        sample = _finish(run, unreported, program.description, progress)
    asked = None if finished or not stopping else stopping[0]
    return Result(run, step, finished, asked, validation, sample)


def _left_unreported(folder: Path) -> dict[str, Any] | None:
    """The last evaluation of a process that was killed before it wrote its report."""
    logged = read_metrics(folder, "validation")
    if not logged or (folder / REPORT_FILE).is_file():
        return None
    return {name: value for name, value in logged[-1].items() if name not in ("step", "split")}


def _finish(run: Run, validation: dict[str, Any], devices: str, progress: Progress) -> str | None:
    """Writes the report of a finished run; answers its sample."""
    config = run.config
    facts = {
        "steps": f"{config.steps:,} of {config.batch_size} × {config.data.length} tokens",
        "training data": f"{config.data.source}: {run.train.facts}",
        "devices": devices,
    }
    baseline = task_of(config.data).baseline
    if baseline is not None:
        compared, name, value = baseline(run.train)
        facts[name] = f"{value:.4f} nats per token"
        progress.say(f"validation {compared} {validation[compared]:.4f}; {name} {value:.4f}")
    write_report(run.folder, facts, validation, None)
    if config.sample_prompt is None:
        return None
    sample = final_sample(run.folder, config.sample_prompt, config.seed)
    write_report(run.folder, facts, validation, sample)
    return sample


def _train_batches(run: Run, config: TrainConfig) -> BatchIterator:
    return train_iterator(
        run.train.rows,
        batch_size=config.batch_size,
        seed=config.seed,
        num_steps=config.steps,
        num_workers=config.data.num_workers,
    )


def _start(
    program: Program,
    checkpoints: Checkpoints,
    batches: BatchIterator,
    run: Run,
    resume: bool,
    progress: Progress,
) -> tuple[Any, int]:
    """The first state: fresh, or that of the newest checkpoint."""
    newest = checkpoints.newest
    if newest is None:
        return _first_state(program, run.beginning, progress), 0
    if not resume:
        raise RunError(
            f"{run.folder} has checkpoints up to step {newest}: leave out --no-resume to go on "
            "from there, or give another --workdir"
        )
    state, data = checkpoints.restore(newest, program.shapes)
    batches.set_state(data)
    progress.say(f"resuming from step {newest} of {run.folder}")
    return program.from_global(state), newest


def _first_state(program: Program, beginning: Beginning | None, progress: Progress) -> Any:
    """Random parameters, or those of another run."""
    state = program.init()
    if beginning is None:
        return state
    whole = program.to_global(state)
    shardings = jax.tree.map(lambda x: x.sharding, program.shapes.params)
    params = begin(beginning, whole.params, shardings, progress.say)
    return program.from_global(dataclasses.replace(whole, params=params))


def _run_steps(s: _Session, stopping: list[int]) -> None:
    """Takes the remaining steps; the loss of a step is looked at while the next one runs."""
    config = s.config
    schedule = make_schedule(config.optimizer, config.steps)
    pending: tuple[int, dict[str, jax.Array]] | None = None
    started = time.monotonic()
    while s.step < config.steps and not stopping:
        s.state, metrics = s.program.step(s.state, next(s.batches))
        s.step += 1
        if pending is not None:
            _record(s, *pending, schedule)
        pending = (s.step, metrics)
        saving = s.step % config.checkpoint_every == 0 or s.step == config.steps
        if saving or s.step % config.evaluate_every == 0:
            # Nothing is kept of a state whose loss was not finite; every
            # checkpoint is evaluated, so that the best is among those kept.
            _record(s, *pending, schedule)
            pending = None
            _evaluate(s)
            if saving:
                _save(s)
    if pending is not None:
        _record(s, *pending, schedule)
    if stopping:
        _save(s)
        name = signal.Signals(stopping[0]).name
        s.progress.say(f"{name}: saved step {s.step}; the same command goes on from there")
    s.progress.say(f"{s.step} steps done; trained for {time.monotonic() - started:.0f} s")


def _record(s: _Session, step: int, metrics: dict[str, jax.Array], schedule: Any) -> None:
    numbers = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(numbers["loss"]) or not math.isfinite(numbers["gradient_norm"]):
        raise _not_finite(
            s,
            f"the loss of step {step} is {numbers['loss']} (gradient norm "
            f"{numbers['gradient_norm']})",
        )
    s.progress.advance(step, numbers["loss"])
    if step % s.config.log_every == 0:
        s.log.write(step, "train", {**numbers, "learning_rate": float(schedule(step - 1))})


def _not_finite(s: _Session, what: str) -> NonFiniteLoss:
    kept = s.checkpoints.newest
    rest = "no checkpoint was written yet" if kept is None else f"step {kept} is kept"
    return NonFiniteLoss(
        f"{what}; {rest}: lower --optimizer.peak-learning-rate, or "
        "lengthen --optimizer.warmup-steps"
    )


def _evaluate(s: _Session) -> None:
    """Measures loss and scores on the validation data."""
    split, data = s.run.validation, s.config.data
    evaluation = evaluate(
        s.program.evaluate,
        s.state,
        # As much at once as a step sees at once.
        evaluation_batches(split.rows, batch_size=s.config.batch_size // s.config.micro_batches),
        s.objective,
        split.rows.rows_per_epoch,
    )
    if not math.isfinite(evaluation.loss):
        raise _not_finite(s, f"the validation loss of step {s.step} is {evaluation.loss}")
    s.validation = score(data, evaluation, split)
    s.validated_step = s.step
    s.log.write(s.step, "validation", s.validation)
    s.progress.evaluated(s.step, s.validation, task_of(data).headline)


def _save(s: _Session) -> None:
    """Begins to write a checkpoint, with the validation loss if this step has one."""
    measured = s.validation if s.validated_step == s.step else None
    loss = None if measured is None else measured["loss"]
    s.checkpoints.save(s.program.to_global(s.state), s.batches.get_state(), loss)


SIGHUP: Any = getattr(signal, "SIGHUP", None)
"""A terminal was closed; Windows has no such signal."""


def _leave_closed_terminal() -> None:
    """Sends to nowhere what would fail to be written: saving comes with a message."""
    for file in (1, 2):
        if stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)


@contextmanager
def _stop_requested() -> Iterator[list[int]]:
    """A list that SIGTERM, SIGHUP and Ctrl-C put their number into; a second Ctrl-C interrupts."""
    received: list[int] = []
    previous = {}

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == SIGHUP:
            _leave_closed_terminal()

    try:
        for number in filter(None, (signal.SIGTERM, signal.SIGINT, SIGHUP)):
            previous[number] = signal.signal(number, note)
        if previous.get(SIGHUP) is signal.SIG_IGN:  # nohup: a closed terminal is not to stop it
            signal.signal(SIGHUP, signal.SIG_IGN)
    except ValueError:  # not in the main thread: signals are the caller's
        pass
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
