"""The typed configuration of a training run; its fields are the command line's flags."""

import dataclasses
from typing import Any, Literal

from ..data.tokenizer_training import TokenizerConfig
from ..models.config import Execution, TransformerConfig, config_from_dict, config_to_dict
from .optimizer_config import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text and how it becomes rows of tokens."""

    source: str
    """builtin:python-docs, text:GLOB[#line|#block], jsonl:GLOB#field or tfds:NAME/CONFIG#field."""
    validation: str | None = None
    """A source to validate on; by default a part of the documents of `source`."""
    validation_fraction: float = 0.05
    """The part of the documents that is held out when `validation` is not given."""
    length: int
    """Tokens in a row, T."""
    packing: Literal["concat", "first-fit"] = "concat"
    """concat: fill every row, cutting documents; first-fit: keep documents whole."""
    tokenizer: TokenizerConfig
    num_workers: int = 0
    """Processes that prepare batches; 0 prepares them in a thread."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices stand along each axis of the mesh; -1: all that are left."""

    data: int = -1
    """Copies of the model, each with its part of the batch."""
    fsdp: int = 1
    """Parts into which parameters and optimizer state are cut, each with its part of the batch."""
    tensor: int = 1
    """Parts into which heads, feed-forward layers and vocabulary are cut."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that makes a training run what it is."""

    model: TransformerConfig
    data: DataConfig
    optimizer: OptimizerConfig
    execution: Execution = Execution()
    mesh: MeshConfig = MeshConfig()
    parallel: Literal["jit", "pmap"] = "jit"
    """jit: any mesh. pmap: plain data parallelism over this machine's devices."""
    steps: int
    """Updates of the parameters."""
    batch_size: int
    """Rows in an update, over all devices, B."""
    micro_batches: int = 1
    """Parts that a batch is cut into, one after the other, to save memory."""
    seed: int = 0
    log_every: int = 10
    """Steps between two lines of metrics."""
    evaluate_every: int
    """Steps between two evaluations on the validation text (every checkpoint is one too)."""
    checkpoint_every: int
    """Steps between two checkpoints."""
    keep_last: int = 2
    """Checkpoints kept for being the newest."""
    keep_best: int = 1
    """Checkpoints kept for their validation loss."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs the `wandb` extra)."""
    sample_prompt: str | None = None
    """What a sample at the end of the run begins with; without it none is taken."""

    def __post_init__(self) -> None:
        self._check_positive()
        if self.data.length > self.model.max_length:
            raise ValueError(
                f"data.length {self.data.length} exceeds model.max_length "
                f"{self.model.max_length}: lower the first or raise the second"
            )
        if self.execution.param_dtype != "float32":
            raise ValueError(
                f"execution.param_dtype {self.execution.param_dtype} would lose small updates: "
                "train with float32 parameters and --execution.dtype bfloat16"
            )
        if self.execution.layers == "separate":
            raise ValueError(
                "execution.layers separate is for decoding: choose scan or unroll to train"
            )
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by micro_batches "
                f"{self.micro_batches}: choose a divisor of {self.batch_size}"
            )

    def _check_positive(self) -> None:
        positive = "steps batch_size micro_batches log_every evaluate_every checkpoint_every"
        for name in (*positive.split(), "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.data.length < 1:
            raise ValueError(f"data.length {self.data.length} must be at least 1")
        if self.keep_best < 0:
            raise ValueError(f"keep_best {self.keep_best} must be at least 0")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed {self.seed} must be at least 0 and below 2³²")


# Fields that say how a run is carried out and not what comes out of it: a run
# may be resumed with others.
OPERATIONAL_FIELDS = (
    "mesh",
    "parallel",
    "execution.layers",
    "execution.remat",
    "data.num_workers",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep_last",
    "keep_best",
    "wandb_project",
    "sample_prompt",
)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """`config` as JSON-ready values; `from_dict` is the inverse."""
    return {**dataclasses.asdict(config), "model": config_to_dict(config.model)}


def from_dict(fields: dict[str, Any]) -> TrainConfig:
    """The configuration that `to_dict` wrote.

    Raises:
      ValueError: a field is missing or unknown.
    """
    try:
        return _from_dict(fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"config.json does not fit this version of flaxzoo ({error}): use the one that wrote it"
        ) from error


def _from_dict(fields: dict[str, Any]) -> TrainConfig:
    data = dict(fields["data"])
    data["tokenizer"] = TokenizerConfig(**data["tokenizer"])
    return TrainConfig(
        **{
            **fields,
            "model": config_from_dict(fields["model"]),
            "data": DataConfig(**data),
            "optimizer": OptimizerConfig(**fields["optimizer"]),
            "execution": Execution(**fields["execution"]),
            "mesh": MeshConfig(**fields["mesh"]),
        }
    )


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields as `{"optimizer.beta1": 0.9, …}`."""
    flat = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields, other than operational ones, in which two runs differ: `{name: (old, new)}`."""
    a, b = flatten(to_dict(old)), flatten(to_dict(new))
    return {
        name: (a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
        and not any(name == o or name.startswith(f"{o}.") for o in OPERATIONAL_FIELDS)
    }
