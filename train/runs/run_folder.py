"""Creates and checks run folders. They contain everything that is needed to resume a run.

A run folder contains `config.json`, `tokenizer/`, `checkpoints/<step>/`, `metrics.jsonl`,
`tensorboard/` and, after training, `report.md`.
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from ...data.common.atomic_io import build_folder
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.json_text import to_json
from ...data.common.progress import LogFn
from ...data.dataset import DataSplit
from ...data.mixture import MixedExamples
from ...data.tokenizers.base import Tokenizer
from ...models.adapters.base import BASE, Base
from ...models.adapters.lora import make_lora
from ...models.config import TransformerConfig
from ...models.encoders.encoder import EncoderConfig
from ...models.heads.specs import HEADS
from ...models.hf.cross_encoder import PairScoring, read_pair_scoring, write_pair_scoring
from ...models.hf.sentence_embedding import EmbeddingSettings
from ...models.hf.sentence_modules import IN_RUN
from ...models.hf.sparse_encoder import (
    SparseSettings,
    read_vector_settings,
    write_vector_settings,
)
from ...models.hub import local_folder
from ...models.loading import model_config
from ...models.registry import create, family_name
from ...models.run_files import (
    CONFIG_FILE,
    TOKENIZER,
    chosen_step,
    read_config,
    steps,
)
from ..config import TrainConfig, check_length, differences, in_steps, to_dict
from .custom import CUSTOM, Custom
from .init_from import InitFromPlan, first_few, head_parameters, plan_init_from
from .load_run import check_sample_prompt, open_run
from .params_only_run import check_trainable
from .reference import check_guide, prepared_data
from .stages import (
    add_stage,
    check_extension,
    data_position,
    last_trained,
    next_stage,
)

T = TypeVar("T")
COVERED = ("data.source", "data.validation", "data.validation_fraction")
"""The fields whose changes to the training texts also change the fingerprint of the data."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder, configuration, tokenizer and data of a run, for the training loop."""

    folder: Path
    stated: TrainConfig
    """The configuration as requested and as stored in the folder."""
    tokenizer: Tokenizer
    train: DataSplit
    validation: DataSplit
    init_from: InitFromPlan | None = None
    """The source of the initial parameters, or None if they are random."""
    custom: Custom = Custom()
    """The caller's custom objective, examples and rewards."""
    extends: bool = False
    """Whether the run begins a new stage that is not in the folder's `config.json` yet."""

    @property
    def base(self) -> Base | None:
        """The base model of the run's adapters, or None without adapters."""
        if self.stated.lora is None:
            return None
        source = cast(str, self.stated.init_from)  # `prepare_run` has checked it
        return Base.describe(source, self.stated.init_step, self.folder)

    @property
    def config(self) -> TrainConfig:
        """The configuration with all lengths and intervals in steps."""
        return in_steps(self.stated, self.train.examples.num_examples)


def prepare_run(
    config: TrainConfig,
    folder: Path,
    log: LogFn,
    custom: Custom = Custom(),
    *,
    extend: bool = False,
) -> Run:
    """Reads the data, creates the tokenizer, and inspects the run folder.

    All errors in the data, the tokenizer and the folder are found here, before training starts.
    This function does not write to the folder.

    Args:
        config: The configuration from the recipe and the command line.
        folder: The run folder. The folder may exist if it contains the same run.
        log: Called with lines about the tokenizer, the data and the initial model.
        custom: The caller's custom objective, examples and rewards. If there are custom examples,
            the source in the configuration is read only to train a new vocabulary, and the model
            keeps its configured head and labels.
        extend: Whether to add a stage to an existing run if its configuration differs from
          `config`.

    Raises:
        DataError: The data cannot be downloaded, read or split into examples.
        RunError: The folder contains a different run, or is not a run folder.
    """
    problem = "lora trains adapters to an existing model: give its folder or name (--init-from)"
    require(config.lora is None or config.init_from is not None, problem, RunError)
    existing = (folder / CONFIG_FILE).is_file()
    problem = f"{folder} has no run to extend: give the folder of a run"
    require(existing or not extend, problem, RunError)
    # If the folder contains a run, the configuration must match this run. Otherwise, the folder
    # must be empty.
    if existing:
        config, tokenizer, plan = _continued(config, folder, custom, log, extend=extend)
    else:
        config, tokenizer, plan = _begun(config, folder, custom, log)
    if plan is not None:
        log(
            f"sizes and vocabulary are taken from {plan.folder}; model options other than "
            "dropout_rate and pooling are ignored"
        )
    # First run all checks that do not need the data, because reading the data may take long.
    check_length(config)
    check_guide(config.objective.guide_model, tokenizer)
    check_sample_prompt(config.model, tokenizer, config.sample_prompt)
    # Do not put these data into `config`, because the folder stores `config`, and the data may
    # contain an open model.
    data, labels = prepared_data(config, log), config.model.labels
    log(f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens")
    if (splits := custom.splits(tokenizer)) is not None:
        train, validation = splits
    else:
        # Make the smaller validation split first, so that an error in the data is raised before a
        # reference model scores the training split.
        validation = data.validation_split(tokenizer, labels)
        train = data.train_split(tokenizer, labels, config.seed)
    _log_split("training data", train, log)
    _log_split("validation data", validation, log)
    run = Run(folder, config, tokenizer, train, validation, plan, custom)
    # Only a new stage may have different data. Otherwise, the run must continue with the same data.
    if extend:
        run = _with_stage(run)
    run = _continuing_sources(run)
    if existing and not run.extends:
        _check_same_data(run)
    warmup, fitting = config.optimizer.warmup_steps, run.config.optimizer.warmup_steps
    if fitting < warmup and run.stated.stage is None:
        log(
            f"warm-up: {fitting} of the {run.config.steps} steps, because {warmup} steps do not fit"
        )
    return run


def _continued(
    config: TrainConfig, folder: Path, custom: Custom, log: LogFn, *, extend: bool
) -> tuple[TrainConfig, Tokenizer, InitFromPlan | None]:
    """Returns the configuration, the tokenizer and the initial parameters of an existing run."""
    writer, version = read_config(folder).get("flaxzoo"), importlib.metadata.version("flaxzoo")
    if writer not in (None, version):
        log(f"{folder} was made by flaxzoo {writer} (this is {version})")
    config, tokenizer = _existing_run(config, folder, custom, extend=extend)
    # Checkpoints of adapters do not contain the base model, so a run with adapters reads the base
    # model at every start.
    begins = not steps(folder) or config.lora is not None
    return config, tokenizer, _init_from_plan(config) if begins else None


def _begun(
    config: TrainConfig, folder: Path, custom: Custom, log: LogFn
) -> tuple[TrainConfig, Tokenizer, InitFromPlan | None]:
    """Returns the configuration, the tokenizer and the initial parameters of a new run."""
    _check_empty(folder)
    given = config.model.vocab_size
    # The configuration may be copied from another run. The last stage of that run does not apply to
    # this run.
    config = dataclasses.replace(config, stage=None)
    # The vocabulary determines the shapes of parameters, so make the tokenizer before planning
    # which parameters to copy.
    config, tokenizer = _new_run(config, own_examples=custom.examples is not None)
    plan = _init_from_plan(config)
    config = _with_new_parameters(config, plan)
    if plan is None and 1 < given < config.model.vocab_size:
        log(
            f"model.vocab_size {given:,} is too small for the vocabulary: the model has "
            f"{config.model.vocab_size:,}"
        )
    return config, tokenizer, plan


def _log_split(name: str, split: DataSplit, log: LogFn) -> None:
    """Logs the summary of a split, and a line for each of its notes."""
    for line in (split.summary, *split.notes):
        log(f"{name}: {line}")


def _with_stage(run: Run) -> Run:
    """Returns the run, with a new stage if its configuration differs from the stored values."""
    old, new = open_run(run.folder)[0], run.stated
    if not differences(old, new):
        return run
    # If the stored stage has no checkpoint yet, compare with the stage before it.
    old, fingerprints = last_trained(run.folder, old)
    changed = differences(old, new)
    # A fingerprint may cover only the texts, not the settings that turn texts into examples, such
    # as the length.
    data = {name for name in changed if name.startswith("data.")}
    same_texts = fingerprints.get("train") == run.train.fingerprint
    position = data_position(
        old,
        new,
        run.folder,
        run.train.examples,
        same_data=same_texts and data <= {*COVERED},
        same_settings=data <= {"data.source", "data.mix_by", "data.validation"},
    )
    stage = next_stage(old, new, position, run.train.examples.num_examples)
    return dataclasses.replace(run, stated=dataclasses.replace(new, stage=stage), extends=True)


def _continuing_sources(run: Run) -> Run:
    """Returns the run; its mixture skips the examples that earlier stages have read."""
    stage, examples = run.config.stage, run.train.examples
    if stage is None or not isinstance(examples, MixedExamples):
        return run
    rest = dataclasses.replace(examples, skipped=stage.examples_of_sources)
    return dataclasses.replace(run, train=dataclasses.replace(run.train, examples=rest))


def _existing_run(
    config: TrainConfig, folder: Path, custom: Custom, *, extend: bool
) -> tuple[TrainConfig, Tokenizer]:
    """Returns the run in `folder` after checking that `config` requests the same run.

    With `extend`, `config` may differ in the fields that a new stage may change.
    """
    check_trainable(read_config(folder), folder)
    custom.check_same(folder)
    old, tokenizer = open_run(folder)
    config = dataclasses.replace(config, stage=old.stage)
    # The folder of `init_from` may now have newer checkpoints, but the run keeps the checkpoint
    # that it started from.
    if config.init_from == old.init_from and config.init_step is None:
        config = dataclasses.replace(config, init_step=old.init_step)
    labels = None if custom.examples is not None else old.model.labels
    # Before comparing, adjust the configuration in the same way as the stored configuration was
    # adjusted.
    config = _initialized_from(config, folder, own_examples=custom.examples is not None)
    config = fit_model(config, old.model, tokenizer.target.vocab_size, labels)
    if config.lora is not None and old.lora is not None:
        Base.from_fields(read_config(folder), folder).find(folder)
        config = _with_new_parameters(config, _init_from_plan(config))
    changed = differences(old, config)
    if changed and extend:
        check_extension(old, changed, folder, config.steps)
    elif changed:
        listed = first_few([f"{name} {a!r} → {b!r}" for name, (a, b) in changed.items()])
        longer = changed.keys() & {"steps", "epochs"}
        remedy = f" (to train longer: flaxzoo train {folder} --extend-to STEPS)" if longer else ""
        raise RunError(
            f"{folder} contains a run with another configuration ({listed}): give the same "
            f"configuration, or another --workdir{remedy}"
        )
    return config, tokenizer


def _new_run(config: TrainConfig, *, own_examples: bool) -> tuple[TrainConfig, Tokenizer]:
    """Completes the configuration of a new run, and trains or opens its tokenizer."""
    model = tokenizer = None
    # Open the initial model before the data, which may take long, so that errors are raised early.
    if config.init_from is not None:
        source, tokenizer = open_run(config.init_from)
        model = source.model
        step = chosen_step(local_folder(config.init_from), config.init_step)
        config = dataclasses.replace(config, init_step=step)
    config = _initialized_from(config, config.init_from, own_examples=own_examples)
    labels = None if own_examples else config.data.labels()
    if tokenizer is None:
        tokenizer = config.data.make_tokenizer()
    tokenizer = config.data.with_chat_template(tokenizer)
    return fit_model(config, model, tokenizer.target.vocab_size, labels), tokenizer


def _initialized_from(
    config: TrainConfig, folder: str | Path | None, *, own_examples: bool
) -> TrainConfig:
    """Completes the embedding settings from the run folder, or from the initial model."""
    settings = _read_from(folder, read_vector_settings) or EmbeddingSettings()
    is_default = config.objective.is_default
    objective, data = config.objective.initialized_from(config.data, settings)
    if not own_examples:
        objective = objective.of_data(data, is_default=is_default)
    # Replace objective and data together, because the data determine a default objective.
    return dataclasses.replace(config, objective=objective, data=data)


def _read_from(folder: str | Path | None, read: Callable[[Path], T]) -> T | None:
    """Reads settings of an initial model, if there is one."""
    return None if folder is None else read(local_folder(folder))


def _init_from_plan(config: TrainConfig) -> InitFromPlan | None:
    """Determines which parameters to copy from `init_from`; None if all parameters are random."""
    if config.init_from is None:
        return None
    folder = local_folder(config.init_from)
    step = chosen_step(folder, config.init_step)
    return plan_init_from(folder, step, model_config(folder), config.model)


def _with_new_parameters(config: TrainConfig, plan: InitFromPlan | None) -> TrainConfig:
    """Makes a run with adapters also train classifiers and new parameters directly."""
    if plan is None or config.lora is None:
        return config
    new = (*plan.new(config.model), *head_parameters(config.model))
    also = dict.fromkeys((*config.lora.also_trained, *new))
    lora = dataclasses.replace(config.lora, also_trained=tuple(also))
    # Raise errors about patterns that match no parameter now, before the data are read.
    make_lora(lora, create(config.model))
    return dataclasses.replace(config, lora=lora)


def fit_model(
    config: TrainConfig,
    initial_model: TransformerConfig | None,
    vocab_size: int,
    labels: tuple[str, ...] | None,
) -> TrainConfig:
    """Returns a run whose model has the required sizes, vocabulary and head.

    Args:
        config: The configuration of the run.
        initial_model: The model that initializes the run, or None for a new model.
        vocab_size: The number of tokens in the vocabulary.
        labels: The names of the labels in the data. If None, the model keeps the configured head
          and labels.

    Raises:
        RunError: The model has no head for this kind of data.
    """
    model = config.model
    if config.init_from is not None and initial_model is not None:
        model = dataclasses.replace(initial_model, dropout_rate=model.dropout_rate)
    # The embedding table may have more rows than the vocabulary has tokens, for example for
    # padding.
    size = max(model.vocab_size, vocab_size)
    heads = [config.model.head]
    if labels is None:
        labels = config.model.labels
    else:
        heads = list(filter(model.heads.__contains__, config.objective.heads(config.data)))
    require(
        heads,
        f"{family_name(model)} has no head for {config.data.kind} data (it has "
        f"{', '.join(model.heads)}): choose a recipe of such data (flaxzoo list)",
        error=RunError,
    )
    if config.objective.scores_pairs and model.head == heads[0] and len(model.labels) == 1:
        labels = model.labels
    model = dataclasses.replace(model.with_head(heads[0], labels), vocab_size=size)
    # Set the pooling after the head, because not every head can pool.
    pooling = getattr(config.model, "pooling", "cls")
    if pooling != "cls" and isinstance(model, EncoderConfig):
        model = dataclasses.replace(model, pooling=pooling)
    return dataclasses.replace(config, model=model)


def _check_empty(folder: Path) -> None:
    require(
        not folder.is_file() and not any(folder.glob("*")),
        f"{folder} exists and is not a run folder: give another --workdir, or empty it",
        error=RunError,
    )


def _fingerprints(run: Run) -> dict[str, str]:
    return {"train": run.train.fingerprint, "validation": run.validation.fingerprint}


def create_folder(run: Run) -> None:
    """Creates the run folder unless it exists, and writes a new stage into an existing folder.

    Call this function after all other checks.

    Raises:
        RunError: In the meantime, another process has created the folder for a different run.
    """
    if run.extends:
        add_stage(run.folder, run.stated, _fingerprints(run))
    fields = to_dict(run.stated)
    content = {
        "flaxzoo": importlib.metadata.version("flaxzoo"),
        "model": fields.pop("model"),
        "train": fields,
        "data_fingerprints": _fingerprints(run),
        **({CUSTOM: run.custom.names} if run.custom.names else {}),
    }

    def fill(folder: Path) -> None:
        run.tokenizer.save(folder / TOKENIZER)
        model, source = run.stated.model, run.stated.init_from
        settings = _read_from(source, read_vector_settings)
        vectors = run.stated.objective.vector_settings(run.stated.data, settings)
        # Sparse vectors need the head of a masked language model. With a different head, drop their
        # settings.
        is_lost = isinstance(vectors, SparseSettings) and not HEADS[model.head].predicts_masked
        if vectors is not None and not is_lost:
            write_vector_settings(
                folder / IN_RUN, vectors, d_model=model.d_model, max_length=model.max_length
            )
        if run.stated.objective.scores_pairs:
            known = _read_from(source, read_pair_scoring)
            # In training, only the tokenizer lowercases texts, so the cross-encoder must not
            # lowercase them either.
            scoring = dataclasses.replace(known or PairScoring(), lowercase=False)
            write_pair_scoring(folder / IN_RUN, scoring, max_length=model.max_length)
        if (base := run.base) is not None:
            content[BASE] = dataclasses.asdict(base)
        (folder / CONFIG_FILE).write_text(to_json(content, indent=2) + "\n", encoding="utf-8")

    # If the folder is neither a run nor empty, `prepare_run` has already raised an error.
    build_folder(run.folder, fill)
    # Another process may have created the folder after `prepare_run` checked it.
    made, _ = open_run(run.folder)
    require(
        not differences(made, run.stated),
        f"{run.folder} was created by another process at the same time, with another "
        "configuration: give another --workdir",
        error=RunError,
    )
    run.custom.check_same(run.folder)
    _check_same_data(run)


def _check_same_data(run: Run) -> None:
    """Raises RunError if the data have changed since the run started."""
    source = run.custom.names.get("examples", run.stated.data.source_name)
    # `builtin:python-docs` reads texts from the Python installation, so it depends on Python's
    # version.
    builtin = source.startswith("builtin:")
    require(
        read_config(run.folder).get("data_fingerprints") == _fingerprints(run),
        f"the data of {source} have changed since {run.folder} was created: "
        f"{'use the Python version of the run' if builtin else 'restore them'}, or give another "
        "--workdir",
        error=RunError,
    )
