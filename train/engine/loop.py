"""The training loop: host side only."""

import dataclasses
import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax

from ...data.batching import BatchIterator, evaluation_batches, train_iterator
from ..config import TrainConfig
from ..distributed.multiprocess import agreement, first_and_then_others, is_first, together
from ..errors import NonFiniteLoss, RunError
from ..inference.final_sample import final_sample
from ..objectives.eval_step import evaluate
from ..objectives.objectives import Objective
from ..objectives.tasks import objective_of, score, task_of
from ..optim.schedules import make_schedule
from ..progress import Progress
from ..runs.init_from import InitFromPlan, init_from
from ..runs.run_folder import Run, create_folder, prepare_run
from ..state import count_parameters
from .checkpoint import Checkpoints, set_aside_damaged
from .compile import Program, make_program
from .metrics_log import MetricsLog, read_metrics
from .report import REPORT_FILE, write_report

SKIPPED = "skipped"
"""Where a checkpoint keeps, beside the data position, what was skipped."""


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


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Steps that changed nothing, for their loss or gradient was not finite."""

    total: int = 0
    in_a_row: int = 0
    """How many of them are the last ones."""


@dataclasses.dataclass
class _Session:
    """What the loop carries from step to step."""

    run: Run
    config: TrainConfig
    program: Program
    objective: Objective
    checkpoints: Checkpoints
    batches: BatchIterator
    log: MetricsLog | None
    """Of several processes the first alone has one."""
    progress: Progress
    state: Any
    step: int
    skipped: Skipped
    validation: dict[str, Any] | None = None
    validated_step: int | None = None


def train(
    config: TrainConfig, workdir: str | Path, *, resume: bool = True, quiet: bool = False
) -> Result:
    """Trains, or goes on training, in a run folder.

    Stopped at any step and called again, it ends with bit for bit the
    parameters of a run never stopped. SIGTERM, SIGHUP and Ctrl-C save and return.
    Of several processes (`jax.distributed`) all must call it alike; a signal to one
    stops all.

    Args:
      config: the run.
      workdir: its folder.
      resume: whether to go on from the newest checkpoint; with False a folder
        that has checkpoints is refused.
      quiet: no progress bar.

    Raises:
      DataError, RunError, UserError: the data, the folder or the devices do
        not fit; before any training.
      NonFiniteLoss: the loss stopped being finite, for more steps than may be
        skipped; the last checkpoint stands.
    """
    progress = Progress(quiet or not is_first())
    run, objective, program = first_and_then_others(
        lambda: _open(config, Path(workdir), progress.say)
    )
    config = run.config
    progress.say(
        f"model: {count_parameters(program.shapes.params):,} parameters, {program.description}"
    )
    progress.say(program.footprint)
    with (
        _stop_requested() as stopping,
        Checkpoints(
            run.folder, keep_last=config.keep_last, keep_best=config.keep_best
        ) as checkpoints,
        closing(_train_batches(run, config, program.part)) as batches,
    ):
        state, step, skipped = _start(program, checkpoints, batches, run, resume, progress)
        validation, asked = None, None
        if step == config.steps:
            progress.say(f"{run.folder} is finished: all {step} steps are done")
        else:
            with (
                _metrics_log(run.folder, step, config) as log,
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
                    skipped=skipped,
                )
                asked = _run_steps(session, stopping)
                step, validation = session.step, session.validation
    finished, sample = step == config.steps, None
    with together():
        if finished and is_first() and (last := validation or _left_unreported(run.folder)):
            sample = _finish(run, last, program.description, progress)
    return Result(run, step, finished, None if finished else asked, validation, sample)


@contextmanager
def _metrics_log(folder: Path, step: int, config: TrainConfig) -> Iterator[MetricsLog | None]:
    """The log of a run at `step`; None where another process writes it."""
    with together():
        log = (
            MetricsLog(folder, first_step=step, wandb_project=config.wandb_project)
            if is_first()
            else None
        )
    with log or nullcontext():
        yield log


def _open(
    config: TrainConfig, folder: Path, say: Callable[[str], None]
) -> tuple[Run, Objective, Program]:
    """Checks all that can be wrong, and makes the run folder."""
    run = prepare_run(config, folder, say)
    objective = objective_of(run.config)
    program = make_program(run.config, objective)
    create_folder(run)
    set_aside_damaged(run.folder, say)
    return run, objective, program


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
        "training data": f"{config.data.source}: {run.train.summary}",
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


def _train_batches(run: Run, config: TrainConfig, part: tuple[int, int]) -> BatchIterator:
    return train_iterator(
        run.train.examples,
        batch_size=config.batch_size,
        seed=config.seed,
        num_steps=config.steps,
        process_index=part[0],
        process_count=part[1],
        num_workers=config.data.num_workers,
    )


def _start(
    program: Program,
    checkpoints: Checkpoints,
    batches: BatchIterator,
    run: Run,
    resume: bool,
    progress: Progress,
) -> tuple[Any, int, Skipped]:
    """The first state, its step and what was skipped: fresh, or of the newest checkpoint."""
    newest = checkpoints.newest
    if newest is None:
        return _first_state(program, run.init_from, progress), 0, Skipped()
    if not resume:
        raise RunError(
            f"{run.folder} has checkpoints up to step {newest}: leave out --no-resume to go on "
            "from there, or give another --workdir"
        )
    state, data = checkpoints.restore(newest, program.shapes)
    skipped = Skipped(**data.pop(SKIPPED, {}))
    batches.set_state(data)
    progress.say(f"resuming from step {newest} of {run.folder}")
    return program.from_global(state), newest, skipped


def _first_state(program: Program, plan: InitFromPlan | None, progress: Progress) -> Any:
    """Random parameters, or those of another run."""
    state = program.init()
    if plan is None:
        return state
    whole = program.to_global(state)
    shardings = jax.tree.map(lambda x: x.sharding, program.shapes.params)
    params = init_from(plan, whole.params, shardings, progress.say)
    return program.from_global(dataclasses.replace(whole, params=params))


def _run_steps(s: _Session, stopping: list[int]) -> int | None:
    """Takes the remaining steps; the loss of a step is looked at while the next one runs.

    Answers the number of the signal that asked one of the processes to stop.
    """
    config = s.config
    schedule = make_schedule(config.optimizer, config.steps)
    pending: tuple[int, dict[str, jax.Array]] | None = None
    started = time.monotonic()
    agreed, asked = agreement(), 0
    while s.step < config.steps and not (asked := agreed(stopping[0] if stopping else 0)):
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
    if asked:
        _save(s)
        name = signal.Signals(asked).name
        s.progress.say(f"{name}: saved step {s.step}; the same command goes on from there")
    s.progress.say(f"{s.step} steps done; trained for {time.monotonic() - started:.0f} s")
    return asked or None


def _record(s: _Session, step: int, metrics: dict[str, jax.Array], schedule: Any) -> None:
    numbers = {name: float(value) for name, value in metrics.items()}
    loss, norm = numbers["loss"], numbers["gradient_norm"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        _skip(s, f"the loss of step {step} is {loss} (gradient norm {norm})")
        return
    s.skipped = dataclasses.replace(s.skipped, in_a_row=0)
    s.progress.advance(step, loss)
    if s.log is not None and step % s.config.log_every == 0:
        updates = step - s.skipped.total  # which the schedule counts
        rate = float(schedule(updates - 1))
        counted = {"learning_rate": rate, "skipped_steps": s.skipped.total}
        s.log.write(step, "train", {**numbers, **counted})


def _skip(s: _Session, what: str) -> None:
    """Counts a step that changed nothing; raises NonFiniteLoss after too many in a row."""
    most = s.config.skip_bad_steps
    s.skipped = Skipped(s.skipped.total + 1, s.skipped.in_a_row + 1)
    if s.skipped.in_a_row > most:
        raise _not_finite(s, f"{what}, after {most} skipped steps" if most else what)
    s.progress.say(f"{what}: skipped, {s.skipped.in_a_row} of at most {most} in a row")


def _not_finite(s: _Session, what: str) -> NonFiniteLoss:
    kept = s.checkpoints.newest
    rest = "no checkpoint was written yet" if kept is None else f"step {kept} is kept"
    return NonFiniteLoss(
        f"{what}; {rest}: lower --optimizer.peak-learning-rate, or "
        "lengthen --optimizer.warmup-steps"
    )


def _evaluate(s: _Session) -> None:
    """Measures loss and scores on the validation data."""
    split, data, (index, count) = s.run.validation, s.config.data, s.program.part
    evaluation = evaluate(
        s.program.evaluate,
        s.state,
        # As much at once as a step sees at once.
        evaluation_batches(
            split.examples,
            batch_size=s.config.batch_size // s.config.micro_batches,
            process_index=index,
            process_count=count,
        ),
        s.objective,
        split.examples.num_examples,
    )
    if not math.isfinite(evaluation.loss):
        raise _not_finite(s, f"the validation loss of step {s.step} is {evaluation.loss}")
    s.validation = score(data, evaluation, split)
    s.validated_step = s.step
    if s.log is not None:
        s.log.write(s.step, "validation", s.validation)
    s.progress.evaluated(s.step, s.validation, task_of(data).headline)


def _save(s: _Session) -> None:
    """Begins to write a checkpoint, with the validation loss if this step has one."""
    measured = s.validation if s.validated_step == s.step else None
    loss = None if measured is None else measured["loss"]
    data = {**s.batches.get_state(), SKIPPED: dataclasses.asdict(s.skipped)}
    s.checkpoints.save(s.program.to_global(s.state), data, loss)


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

    # In another thread than the main one signals are the caller's.
    ours = threading.current_thread() is threading.main_thread()
    for number in filter(None, (signal.SIGTERM, signal.SIGINT, SIGHUP) if ours else ()):
        previous[number] = signal.signal(number, note)
    if previous.get(SIGHUP) is signal.SIG_IGN:  # nohup: a closed terminal is not to stop it
        signal.signal(SIGHUP, signal.SIG_IGN)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
