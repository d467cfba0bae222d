"""The typed configuration of a training run. Its fields are options of the command line."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from ..data.common.fields import (
    Checked,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Seed,
    require,
)
from ..data.tasks.base import DataConfig
from ..models.adapters.lora import LoRAConfig
from ..models.config import Execution, TransformerConfig
from ..models.registry import config_to_dict
from .evaluate_config import EvaluateConfig
from .losses.objective import Batch, Inputs, Objective
from .losses.router import with_router
from .mesh import Gather, MeshConfig, Parallel
from .objective_config import ObjectiveConfig
from .objectives.table import check_learns_from, default_objective
from .optimizer_config import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Checked):
    """Where the last stage of an extended run begins."""

    start: NonNegativeInt = 0
    """The number of steps before the stage."""
    examples: NonNegativeInt = 0
    """The number of examples that the run had already read from the same data before the stage."""
    examples_of_sources: tuple[NonNegativeInt, ...] = ()
    """The number of examples that the run had already read from each source of a mixture, before
    the first stage with this mixture. Empty if the run had read none."""
    schedule_start: NonNegativeInt = 0
    """The number of steps that precede the learning-rate schedule of the stage."""
    warmup: NonNegativeInt = 0
    """The number of warm-up steps in the stage's learning-rate schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The entire configuration of a training run."""

    model: TransformerConfig
    data: DataConfig
    objective: ObjectiveConfig[Any] = cast(ObjectiveConfig[Any], None)
    """The training objective. Defaults to the first objective that supports the kind of data."""
    optimizer: OptimizerConfig
    execution: Execution = Execution()
    mesh: MeshConfig = MeshConfig()
    parallel: Parallel = "jit"
    """jit: supports any mesh. pmap: data parallelism over the devices of one process."""
    gather: Gather = "auto"
    """Determines when parameters that are sharded over `mesh.fsdp` are all-gathered. layer: the
    parameters of each layer are gathered in the forward and the backward pass of each micro-batch,
    and its gradients are scattered. step: all parameters are gathered once per step, and the summed
    gradients are scattered once. auto: chooses step if the mesh uses only data and fsdp, and if the
    compiled step fits into the memory of a device (whose size must be known); otherwise chooses
    layer."""
    init_from: str | None = None
    """Source of the initial parameters: a run folder, a folder in the Hugging Face format, or a
    name on the Hugging Face hub. The run takes the sizes, the tokenizer and the body from the
    initial model. It also takes the layers of the initial model's head that exist in its own head.
    Of the field `model`, the run then uses only `dropout_rate`, and `pooling` unless it is cls. The
    run ignores `data.tokenizer`."""
    init_step: NonNegativeInt | None = None
    """The checkpoint of `init_from`. Defaults to the newest checkpoint."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters on the model of `init_from`, whose parameters are frozen."""
    steps: NonNegativeInt = 0
    """Number of parameter updates; 0: derived from `epochs`."""
    epochs: NonNegative = 0.0
    """Number of passes over the training examples, if `steps` is 0."""
    batch_size: PositiveInt
    """Number of sequences in each update, B, over all devices together."""
    micro_batches: PositiveInt = 1
    """Number of equal parts of each batch that run one by one, to save memory."""
    seed: Seed = 0
    """The seed for the initial parameters, for dropout, and for the order of the examples."""
    log_every: PositiveInt = 10
    """Number of steps between two logged lines of metrics."""
    evaluate_every: NonNegativeInt = 0
    """Steps between two evaluations; 0: once per epoch. Every checkpoint is also evaluated."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Tasks that evaluations run in addition to the validation data."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between two checkpoints; 0: once per epoch."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """How many of the best checkpoints to keep. The best checkpoints have the lowest validation
    loss, or the highest nDCG@10 if the run trains an embedding model."""
    best_metric: str | None = None
    """The metric that determines the best checkpoints: min: or max:, followed by the name of a
    metric, such as max:accuracy, min:ema_loss or max:hellaswag/acc (a task of `evaluate.tasks`).
    Defaults to the loss, or to nDCG@10 if the run trains an embedding model."""
    skip_bad_steps: NonNegativeInt = 3
    """Number of consecutive steps that may be skipped because their loss or gradient is not
    finite."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs the `wandb` extra)."""
    sample_prompt: str | None = None
    """Prompt of the sample at the end of the run; for BERT, a text with [MASK] tokens to fill."""
    stage: Stage | None = None
    """The last stage of an extended run, which `train.train(…, extend=True)` sets. If None, the run
    has a single stage."""

    @property
    def schedule_start(self) -> int:
        """The number of steps that precede the learning-rate schedule."""
        return 0 if self.stage is None else self.stage.schedule_start

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.steps or self.epochs,
            f"steps {self.steps} and epochs {self.epochs} must not both be 0: give one of them "
            "above 0",
        )
        if self.objective is None or self.objective.is_default:
            # The dataclass is frozen, so set the default with `object.__setattr__`.
            object.__setattr__(self, "objective", default_objective(self.data))
        check_learns_from(self.objective, self.data)
        if self.init_from is None:  # with `init_from`, the sizes of the model are not known yet
            check_length(self)
        require(
            self.execution.param_dtype == "float32",
            f"execution.param_dtype {self.execution.param_dtype} would lose small updates: "
            "train with float32 parameters and execution.dtype bfloat16",
        )
        problem = "execution.layers separate is for decoding: choose scan or unroll to train"
        require(self.execution.layers != "separate", problem)
        require(
            re.fullmatch("(min|max):.+", self.best_metric or "min:loss"),
            f"best_metric must be min: or max: and the name of a metric, got {self.best_metric!r}",
        )
        require(
            self.batch_size % self.micro_batches == 0,
            f"batch_size {self.batch_size} is not divisible by micro_batches "
            f"{self.micro_batches}: choose a divisor of {self.batch_size}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration with its help text."""

    summary: str
    """A single line of help, for the list of recipes."""
    details: str
    """The rest of the help text: the command, the expected result and the source of the
    settings."""
    config: TrainConfig
    of_preset: Callable[[str], TrainConfig] | None = None
    """Returns the configuration for a given preset. None if the recipe cannot train all published
    sizes of a family."""
    preset: str | None = None
    """The name of the preset that `config` uses, if the recipe belongs to a family."""
    of_model: Callable[[TransformerConfig], TrainConfig] | None = None
    """Returns the configuration for a given model. None if the recipe cannot train the published
    sizes of all families."""


def check_length(config: TrainConfig) -> None:
    """Checks that the model supports the longest sequences of the data.

    Raises:
        UserError: The sequences exceed the model's maximum length.
    """
    longest = config.data.longest_side
    longer = "raise model.max_length" if config.init_from is None else "choose another init_from"
    names = ("length", "row_length")
    side = next((x for x in names if getattr(config.data, x, None) == longest), "target_length")
    require(
        longest <= config.model.max_length,
        f"data.{side} {longest} exceeds model.max_length {config.model.max_length}: "
        f"lower data.{side}, or {longer}",
    )


def objective_of(config: TrainConfig, custom: Objective | None = None) -> Objective:
    """Returns `custom` or else the configured objective, without inputs that the model lacks."""
    objective = custom
    if objective is None:
        built = config.objective.build(config.data)
        objective = config.objective.with_models(built, config.model, config.execution)
    # A mixture of experts adds router losses to any objective.
    objective = with_router(objective, config.model)
    if config.model.num_token_types > 1:
        return objective

    # RoBERTa and DistilBERT have no token types. Only separator tokens mark the segments of a
    # sequence.
    def without_types(inputs: Inputs) -> Inputs:
        return {name: x for name, x in inputs.items() if name != "token_type_ids"}

    def inputs(batch: Batch) -> Inputs | tuple[Inputs, ...]:
        model_inputs = objective.inputs(batch)
        if isinstance(model_inputs, tuple):
            return tuple(map(without_types, model_inputs))
        return without_types(model_inputs)

    return dataclasses.replace(objective, inputs=inputs)


def in_steps(config: TrainConfig, num_examples: int) -> TrainConfig:
    """Returns `config` with all lengths and intervals in steps instead of epochs.

    A warm-up that is at least as long as the run is shortened to a tenth of the run.
    """
    steps_per_epoch = math.ceil(num_examples / config.batch_size)
    steps = config.steps or math.ceil(config.epochs * num_examples / config.batch_size)
    stage = config.stage
    warmup = warmup_of(config.optimizer, steps) if stage is None else stage.warmup
    return dataclasses.replace(
        config,
        steps=steps,
        epochs=0.0,
        objective=config.objective.in_steps(steps),
        evaluate_every=config.evaluate_every or steps_per_epoch,
        checkpoint_every=config.checkpoint_every or steps_per_epoch,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup, warmup_fraction=0.0),
    )


def warmup_of(optimizer: OptimizerConfig, steps: int) -> int:
    """Returns the number of warm-up steps, reduced if the run is not longer than the warm-up."""
    warmup = optimizer.warmup_steps or int(optimizer.warmup_fraction * steps)
    # A run with few steps may be shorter than the warm-up of its recipe.
    return warmup if warmup < steps else min(max(steps // 10, 1), steps - 1)


# The fields that affect only how a run is executed. A resumed run may change them.
OPERATIONAL_FIELDS = (
    "micro_batches",
    "mesh",
    "parallel",
    "gather",
    "execution.layers",
    "execution.remat",
    "execution.attention",
    "data.num_workers",
    "log_every",
    "evaluate_every",
    "evaluate",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "skip_bad_steps",
    "wandb_project",
    "sample_prompt",
)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Returns `config` as JSON values; `runs.config_json.from_dict` is the inverse."""
    fields = {
        **dataclasses.asdict(config),
        "model": config_to_dict(config.model),
        "data": {"kind": config.data.kind, **dataclasses.asdict(config.data)},
        "objective": {"kind": config.objective.kind, **dataclasses.asdict(config.objective)},
    }
    # Leave out newer fields if they are None, because older runs do not have these fields.
    for name in ("lora", "stage"):
        if fields[name] is None:
            del fields[name]
    return json.loads(json.dumps(fields))  # JSON has lists, not tuples


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested fields to `{"optimizer.beta1": 0.9, …}`."""
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def is_below(name: str, entries: Iterable[str]) -> bool:
    """Returns whether a field is an entry or is nested in one, like `data.length` in `data`."""
    return f"{name}.".startswith(tuple(f"{entry}." for entry in entries))


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the fields that differ between two configurations as `{name: (old, new)}`.

    `OPERATIONAL_FIELDS` are left out.
    """
    a, b = flatten(to_dict(old)), flatten(to_dict(new))
    return {
        name: (a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and not is_below(name, OPERATIONAL_FIELDS)
    }
