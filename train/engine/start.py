"""Starts or resumes a run: checks the run, makes its folder, and returns its state."""

import dataclasses
import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...data.batching import BatchIterator, IteratorState, TrainBatches, train_iterator
from ...data.common.errors import RunError, counted
from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.mixture import MixedExamples
from ...models.adapters.lora import LoRA, join_params, make_lora, without_adapters
from ...models.nn.typing import Params
from ...models.registry import create
from ...models.run_files import CONFIG_FILE, TOKENIZER, steps
from ..config import Stage, TrainConfig, objective_of
from ..distributed.multiprocess import barrier, is_primary, primary_first
from ..losses.eval_step import evaluated_at_once
from ..losses.objective import Objective, joined
from ..objectives.online import OnlineConfig
from ..optim.ema import ema_of, with_ema
from ..runs.custom import Custom
from ..runs.init_from import InitFromPlan, init_from
from ..runs.run_folder import Run, create_folder, prepare_run
from ..runs.run_lock import LOCK_FILE, RunLock
from ..runs.stages import described_stages
from ..state import TrainState, count_parameters
from .bad_steps import SkipCounts
from .checkpoint import Checkpoints, set_aside_damaged
from .compile import CompiledTrainer, compile_trainer
from .memory_summary import check_batch_fits, check_state_fits, check_step_fits
from .policy.trainer import compile_policy_trainer

SKIPPED = "skipped"
"""The key of the counts of skipped steps in a checkpoint, which are stored next to the data
position."""
EVALUATION_DUE = "evaluation_due"
"""The key in a checkpoint that marks an evaluation that a signal interrupted."""


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run that passed all checks and has a folder."""

    run: Run
    objective: Objective
    trainer: CompiledTrainer
    is_new: bool
    """Whether this call of `open_run` made the folder."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The state that a run starts or resumes from."""

    state: TrainState
    step: int = 0
    skipped: SkipCounts = SkipCounts()
    evaluation_due: bool = False
    """Whether a signal interrupted the evaluation after this step, so that it must be repeated."""


def open_run(
    config: TrainConfig,
    folder: Path,
    lock: RunLock,
    log: LogFn,
    custom: Custom,
    *,
    extend: bool = False,
) -> OpenRun:
    """Opens the run of a folder, on process 0 first, and compiles its step.

    Raises:
        DataError, RunError, UserError: the data, the folder or the devices do not fit the
            configuration.
    """
    opened = primary_first(
        lambda: _open(config, folder, lock=lock, log=log, custom=custom, extend=extend)
    )
    run, trainer = opened.run, opened.trainer
    log(f"{_sizes(run.config, trainer)}, {trainer.description}")
    log(trainer.memory_summary)
    if run.extends:
        *_, stage = described_stages(run.folder, run.stated).values()
        log(f"new stage: {stage}")
    for name, part in mixture_lines(run):
        log(f"mixture until step {run.config.steps:,}: {name}: {part}")
    note = None if custom.names else run.config.objective.loss_note(run.config.data)
    if note is not None:
        log(note)
    # All processes compile together. A new folder is removed if the step does not compile.
    with _removed_on_failure(run.folder) if opened.is_new else nullcontext(), barrier():
        if custom.objective is not None:
            _warn_of_counted_filler(run, custom.objective, log)
        _foresee_memory(run, trainer, log)
    return opened


def _open(
    config: TrainConfig,
    folder: Path,
    *,
    lock: RunLock,
    log: LogFn,
    custom: Custom,
    extend: bool,
) -> OpenRun:
    """Checks the run, the data and the devices, and only then makes the run folder."""
    if is_primary() and (folder / CONFIG_FILE).is_file():
        lock.acquire()  # before data are read, to fail fast
        if extend:  # a new stage begins at the newest checkpoint, which must be intact
            set_aside_damaged(folder, log)
    run = prepare_run(config, folder, log, custom, extend=extend)
    objective = objective_of(run.config, custom.objective)
    # Making the batches raises DataError if the examples do not fill a batch.
    TrainBatches(run.train.examples, run.config.batch_size, run.config.seed, num_steps=1)
    if isinstance(run.config.objective, OnlineConfig):
        # Creating the trainer checks the mesh and the parameters, but does not compile a program.
        trainer = compile_policy_trainer(run, objective, custom.rewards)
    else:
        trainer = compile_trainer(run.config, objective)
    has_checkpoint = bool(steps(run.folder))
    check_state_fits(run.config, trainer.shapes, jax.local_devices(), resumed=has_checkpoint)
    is_new = not (run.folder / CONFIG_FILE).is_file()
    # Write to disk only now, after all checks.
    create_folder(run)
    if is_primary():
        lock.acquire()
    set_aside_damaged(run.folder, log)
    return OpenRun(run, objective, trainer, is_new)


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """If the step does not compile, removes the files that make a folder a run folder.

    The user can then repeat the command with other options.
    """
    try:
        yield
    except BaseException:
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
        # Release the lock last, because afterwards another process may make a run in this folder.
        (folder / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or a mount point
            folder.rmdir()
        raise


def _foresee_memory(run: Run, trainer: CompiledTrainer, log: LogFn) -> None:
    """Compiles the step, and raises UserError if it needs more memory than is available."""
    config, has_checkpoint = run.config, bool(steps(run.folder))
    # A single example determines the shapes of a batch, so a whole batch need not be read.
    example = run.train.examples.example(0, 0)
    batch = {
        name: jax.ShapeDtypeStruct((config.batch_size, *np.shape(x)), np.asarray(x).dtype)
        for name, x in example.items()
    }
    check_batch_fits(config, batch, resumed=has_checkpoint)
    check_step_fits(
        config,
        functools.partial(trainer.compile, batch),
        jax.local_devices(),
        resumed=has_checkpoint,
        log=log,
    )


def _warn_of_counted_filler(run: Run, objective: Objective, log: LogFn) -> None:
    """Warns if a custom objective counts the filler examples that pad the last batch."""
    examples, config = run.validation.examples, run.config
    size = evaluated_at_once(objective, config.batch_size, config.micro_batches)
    filler = -examples.num_examples % size
    zeros = {name: jnp.zeros_like(x)[None] for name, x in examples.example(0, 0).items()}
    # A filler example consists of zeros, so its counts must be 0.
    counts = objective.checked_counts(zeros)
    wrong = [name for name, count in counts.items() if float(count) != 0]
    if filler and wrong:
        log(
            f"scores will be wrong, because counts[{wrong[0]!r}] of the objective includes the "
            f"{counted(filler, 'example')} of zeros that fill up the last batch of an evaluation: "
            "exclude these examples in counts and terms"
        )


def mixture_lines(run: Run) -> list[tuple[str, str]]:
    """Describes each source of a mixture and its share of the run; empty for other data.

    If the last stage began with different data, the shares count only the batches of this stage.
    """
    examples, config = run.train.examples, run.config
    if not isinstance(examples, MixedExamples):
        return []
    stage = config.stage or Stage()
    return list(examples.lines(stage.examples + (config.steps - stage.start) * config.batch_size))


def train_batches(run: Run, shard: tuple[int, int]) -> BatchIterator:
    """Returns the batches of all steps; each process gets its share of each batch.

    Args:
        run: the run.
        shard: the index of this process's share of each batch, and the number of shares.
    """
    stage = run.config.stage or Stage()
    return train_iterator(
        run.train.examples,
        start=stage.start,
        examples_before=stage.examples,
        batch_size=run.config.batch_size,
        seed=run.config.seed,
        num_steps=run.config.steps,
        process_index=shard[0],
        process_count=shard[1],
        num_workers=run.config.data.num_workers,
    )


def start_or_resume(
    opened: OpenRun, checkpoints: Checkpoints, batches: BatchIterator, *, resume: bool, log: LogFn
) -> Start:
    """Returns the state of the newest checkpoint, or the initial state.

    Args:
        opened: the run.
        checkpoints: the checkpoints in its folder.
        batches: the data iterator, which is moved to the position of the checkpoint.
        resume: whether the folder may have checkpoints.
        log: called with a line about the checkpoint if the run is resumed.

    Raises:
        RunError: the folder has checkpoints, and `resume` is False.
    """
    run, shapes, newest = opened.run, opened.trainer.shapes, checkpoints.newest
    stage_start = (run.config.stage or Stage()).start
    require(
        stage_start <= (newest or 0),
        f"the last stage of {run.folder} begins at step {stage_start}, and its newest checkpoint "
        f"is {newest}: restore checkpoint {stage_start}, or give another --workdir",
        error=RunError,
    )
    if newest is None:
        return Start(_first_state(opened, log))
    require(
        resume,
        f"{run.folder} has checkpoints up to step {newest}: leave out --no-resume to resume from "
        "this step, or give another --workdir",
        RunError,
    )
    if run.config.lora is None:
        state, data = checkpoints.restore(newest, shapes)
    else:
        # A checkpoint of adapters does not contain the base model, which a resumed run reads from
        # `init_from`.
        base = _first_state(opened, log).frozen
        state, data = checkpoints.restore(newest, dataclasses.replace(shapes, frozen=None))
        state = dataclasses.replace(state, frozen=base)
    skipped, evaluation_due = SkipCounts(**data.pop(SKIPPED, {})), data.pop(EVALUATION_DUE, False)
    # The remaining entries of `data` are the position of the iterator.
    batches.set_state(data)
    log(f"resuming from step {newest} of {run.folder}")
    return Start(state, newest, skipped, evaluation_due)


def position_to_save(
    position: IteratorState, skipped: SkipCounts, *, evaluation_due: bool
) -> IteratorState:
    """Returns the JSON content of a checkpoint, which `start_or_resume` reads."""
    data: IteratorState = {**position, SKIPPED: dataclasses.asdict(skipped)}
    return {**data, EVALUATION_DUE: True} if evaluation_due else data


def _sizes(config: TrainConfig, trainer: CompiledTrainer) -> str:
    """Returns a description, for the user, of the model's number of parameters."""
    trained = count_parameters(trainer.shapes.params)
    if config.lora is None:
        return f"model: {trained:,} parameters"
    frozen = count_parameters(trainer.shapes.frozen or {})
    return f"model: {frozen:,} frozen parameters, {trained:,} trained with adapters"


def _first_state(opened: OpenRun, log: LogFn) -> TrainState:
    """Returns the initial state, with random parameters or the parameters of another run."""
    trainer, run = opened.trainer, opened.run
    plan = run.init_from
    if plan is None:
        return trainer.init()
    keep_initial = opened.objective.needs_initial
    if run.config.lora is not None:
        lora = make_lora(run.config.lora, create(run.config.model))
        return _with_base(trainer, plan, lora, keep_initial=keep_initial, log=log)
    state = trainer.init()
    # Read each parameter directly onto the devices that hold its shards.
    shardings = jax.tree.map(lambda x: x.sharding, trainer.shapes.params)
    params = init_from(plan, state.params, shardings, log)
    if state.auxiliary is not None:
        started = opened.objective.with_followed(state.auxiliary, params)
        placed = jax.tree.map(
            lambda x, old: jax.device_put(x, old.sharding), started, state.auxiliary
        )
        state = dataclasses.replace(state, auxiliary=placed)
    frozen, opt_state = state.frozen, _started_average(state, params)
    if keep_initial:  # a copy, because a step donates the arrays of `params`
        frozen = {**(frozen or {}), **jax.tree.map(jnp.copy, params)}
    return dataclasses.replace(state, params=params, opt_state=opt_state, frozen=frozen)


def _started_average(state: TrainState, params: Params) -> optax.OptState:
    """Returns the optimizer state; if it has a moving average, the average is set to `params`."""
    if ema_of(state.opt_state) is None:
        return state.opt_state
    # Copy the arrays, because a step donates both the parameters and the optimizer state.
    return with_ema(state.opt_state, jax.tree.map(jnp.copy, joined(params, state.auxiliary)))


def _with_base(
    trainer: CompiledTrainer, plan: InitFromPlan, lora: LoRA, *, keep_initial: bool, log: LogFn
) -> TrainState:
    """Returns the initial state of adapters, with the base model that `plan` describes.

    If `keep_initial`, the frozen base also has the initial values of the parameters that are
    trained without adapters.
    """
    shapes = trainer.shapes
    # Delete the random base model first, so that memory never holds two base models.
    state = dataclasses.replace(trainer.init(), frozen=None)
    assert shapes.frozen is not None
    # Parameters that are trained without adapters keep their dtype. If the base model lacks such a
    # parameter, the parameter keeps its random value.
    initial = join_params(shapes.frozen, without_adapters(state.params))
    placed = join_params(shapes.frozen, without_adapters(shapes.params))
    params = init_from(plan, initial, jax.tree.map(lambda x: x.sharding, placed), log)
    # Separate the trained parameters from the frozen base model again.
    without_adapter, frozen = lora.split(params, keep_initial=keep_initial)
    trained = join_params(state.params, without_adapter)
    opt_state = _started_average(state, trained)
    return dataclasses.replace(state, params=trained, opt_state=opt_state, frozen=frozen)
