"""What every model's configuration shares, and the registry of published sizes.

A configuration says what a model *is*: sizes, activation, where the norms
stand.  How it is run (precision, scanned or unrolled layers, rematerialisation)
is an `Execution`, which may change from one machine to the next without
changing the model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..data.errors import UserError, suggest


def divisors(number: int) -> list[int]:
    """All positive divisors of `number`, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes common to every transformer here.

    Raises:
      UserError: a size is not positive, `dropout_rate` or `norm_eps` is out of range, or
        `d_model` is not divisible by `num_heads`.
    """

    vocab_size: int
    """Number of tokens, V."""
    max_length: int
    """Longest sequence, in tokens."""
    num_layers: int
    """Number of layers, L."""
    d_model: int
    """Width of the residual stream, D."""
    num_heads: int
    """Number of attention heads, N, each of size D / N."""
    d_ff: int | None = None
    """Width of the feed-forward layer, F; 4 D if not given."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Non-linearity of the feed-forward layer; "gelu" is the exact one (erf)."""
    norm_eps: float = 1e-5
    """Added to the variance in layer normalisation."""
    dropout_rate: float = 0.0
    """Probability that an element is dropped, wherever the paper drops."""
    init_std: float | None = 0.02
    """Standard deviation of initial kernels. The papers' 0.02 is close to 1 / √D at their
    widths; a narrow model wants its own 1 / √D. None: uniform, as wide as each kernel's own
    sizes ask for (Glorot and Bengio 2010, equation 16). Embeddings begin at 0.02."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_length", "num_layers", "d_model", "num_heads", "d_ff"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value} is not positive: choose at least 1")
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"dropout_rate {self.dropout_rate} is not in [0, 1)")
        if self.init_std is not None and not self.init_std > 0:
            raise UserError(f"init_std {self.init_std} must be above 0, for example 0.02")
        if not self.norm_eps > 0:
            raise UserError(f"norm_eps {self.norm_eps} must be above 0, for example 1e-5")
        if self.d_model % self.num_heads:
            choices = ", ".join(map(str, divisors(self.d_model)))
            raise UserError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}: "
                f"choose num_heads from {choices}"
            )

    @property
    def head_dim(self) -> int:
        """Size of one head, H = D / N."""
        return self.d_model // self.num_heads

    @property
    def feed_forward_dim(self) -> int:
        """Width of the feed-forward layer, F."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    # Where architectures may differ from what is usual.

    @property
    def decoder(self) -> "TransformerConfig":
        """Sizes of the layers that decode."""
        return self

    @property
    def key_dim(self) -> int:
        """Size of a query and of a key in one head; a value has `head_dim`."""
        return self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K; a divisor of `num_heads`."""
        return self.num_heads

    @property
    def use_bias(self) -> bool:
        """Whether the affine maps have biases."""
        return True

    @property
    def attention_bias(self) -> bool:
        """Whether the projections of attention have biases."""
        return self.use_bias

    @property
    def attention_dropout_rate(self) -> float:
        """Probability that an attention weight is dropped."""
        return self.dropout_rate

    @property
    def activation_dropout_rate(self) -> float:
        """Probability that an element inside the feed-forward layer is dropped."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model is run; never part of what it is."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; softmax, norms and losses stay in float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which parameters are stored."""
    layers: Literal["scan", "unroll", "separate"] = "scan"
    """scan: one compiled layer, looped (compile time flat in depth). unroll: the
    same stored parameters, L copies in the program. separate: one parameter
    subtree per layer, laid out for decoding (`models.separate_layers`)."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or
    every layer from its input."""
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """What computes attention: a kernel that works block by block, cudnn (GPUs) or splash (TPUs),
    where it can serve; else XLA. auto: XLA, or what suits the devices that a
    program compiles for, which `train` knows and says."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published model size."""

    config: TransformerConfig
    paper: str
    published: str
    """The parameter count as the paper prints it."""
    note: str = ""
    """Where the paper's own numbers disagree, and what was taken."""


def one_token(config: Any) -> dict[str, np.ndarray]:
    """The smallest input of a model that takes rows of tokens."""
    return {"input_ids": np.zeros((1, 1), np.int32)}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family: its configuration, its module, its published sizes."""

    config: type[TransformerConfig]
    module: Callable[..., Any]
    presets: dict[str, Preset]
    smallest_inputs: Callable[[Any], dict[str, np.ndarray]] = one_token
    """From a configuration to the smallest arrays that such a model can be called with."""


_ARCHITECTURES: dict[str, Architecture] = {}


def register(name: str, architecture: Architecture) -> None:
    """Makes a family known to `create`, `load` and `flaxzoo list`."""
    _ARCHITECTURES[name] = architecture


def architecture_of(config: TransformerConfig) -> str:
    """The registered name of the family that `config` belongs to."""
    return next(name for name, a in _ARCHITECTURES.items() if type(config) is a.config)


def smallest_inputs(config: TransformerConfig) -> dict[str, np.ndarray]:
    """The smallest arrays that a model can be called with."""
    return _ARCHITECTURES[architecture_of(config)].smallest_inputs(config)


def presets() -> dict[str, Preset]:
    """Every published size, by name."""
    return {name: p for a in _ARCHITECTURES.values() for name, p in a.presets.items()}


def preset(name: str) -> TransformerConfig:
    """The configuration of a published size, e.g. `preset("gpt2")`.

    Raises:
      UserError: no such preset; the message names the nearest.
    """
    known = presets()
    if name not in known:
        raise UserError(f"no preset named {name!r}: {suggest(name, list(known))}")
    return known[name].config


def create(config: TransformerConfig, execution: Execution | None = None) -> Any:
    """The Flax module for `config`: `create(preset("gpt2")).init(key, input_ids=…)`."""
    module = _ARCHITECTURES[architecture_of(config)].module
    return module(config, execution or Execution())


def config_to_dict(config: TransformerConfig) -> dict[str, Any]:
    """`config` as JSON-ready values, with its family under "architecture"."""
    return {"architecture": architecture_of(config), **dataclasses.asdict(config)}


def config_from_dict(fields: dict[str, Any]) -> TransformerConfig:
    """The inverse of `config_to_dict`.

    Raises:
      UserError: the family is unknown or a field does not belong to it.
    """
    fields = dict(fields)
    name = fields.pop("architecture", None)
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"unknown architecture {name!r}: this version knows {known}")
    cls = _ARCHITECTURES[name].config
    unknown = set(fields) - {f.name for f in dataclasses.fields(cls)}
    if unknown:
        raise UserError(f"{name} configuration has unknown fields {sorted(unknown)}")
    # JSON has no tuples.
    values: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items()}
    return cls(**values)
