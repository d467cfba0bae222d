"""The configuration fields that all models share, and the execution settings.

A configuration describes the model: its sizes, its activation and the placement of its norms. An
`Execution` describes how the model is run (precision, scanned or unrolled layers,
rematerialization); it may differ between machines without changing the model.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from ..data.common.errors import UserError
from ..data.common.fields import (
    Checked,
    NonNegative,
    Positive,
    Range,
    Rate,
    check_value,
    require,
    require_default,
)
from .rotary_scaling import RotaryScaling

if TYPE_CHECKING:
    import jax

Settings: TypeAlias = dict[str, Any]
"""Values of a configuration's fields, by name. The configuration's constructor checks them."""

PositionKind: TypeAlias = Literal["learned", "sinusoidal", "rotary", "buckets", "alibi", "none"]
"""The kinds of positions; see `models.nn.positions`."""
MOST_POSITIONS = 2**31
"""Maximum number of elements in a position table."""

# No model exceeds these bounds. They serve to reject files whose sizes would exhaust the memory.
Size: TypeAlias = Annotated[int, Range(least=1, most=2**27)]
"""The type of array sizes, such as widths."""
Count: TypeAlias = Annotated[int, Range(least=0, most=2**27)]
"""The type of row counts, token counts and token ids."""
Depth: TypeAlias = Annotated[int, Range(least=1, most=2**13)]
"""The type of layer counts."""
NumExperts: TypeAlias = Annotated[int, Range(least=0, most=2**13)]
"""The type of the number of experts in a layer."""
RotatedFraction: TypeAlias = Annotated[float, Range(above=0, most=1)]
"""The fraction of a head's dimensions that rotary positions rotate."""

NormKind: TypeAlias = Literal["rms", "layer"]
"""The normalization of the residual stream: RMSNorm, or LayerNorm."""
QueryKeyNorm: TypeAlias = Literal["head", "projection", "layer"]
"""How queries and keys are normalized. head: RMSNorm of each head, with the same scales for all
heads (Qwen3). projection: RMSNorm over all heads together (OLMo 2). layer: LayerNorm of each head
without biases, with different scales for each head (StableLM)."""

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
"""The non-linearities of feed-forward layers: the names of `models.nn.layers.ACTIVATIONS`."""


def divisors(number: int) -> list[int]:
    """Returns all positive divisors of a number, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def divisors_of(number: int) -> str:
    """Returns all positive divisors of a number as text, for a message."""
    return ", ".join(map(str, divisors(number)))


def require_pairs(rotated: int, of: int, setting: str) -> None:
    """Checks that the number of rotated dimensions is even and at most the size of a head.

    Args:
      rotated: Number of rotated dimensions.
      of: Number of dimensions of a head.
      setting: Name and value of the setting that determines `rotated`.
    """
    problem = f"{setting} must rotate an even number of dimensions up to {of}, got {rotated}"
    require(0 < rotated <= of and rotated % 2 == 0, problem)


def require_layers(name: str, layers: Sequence[int] | None, num_layers: int) -> None:
    """Checks that all layer indices in a field are indices of the model's layers."""
    for layer in layers or ():
        check_value(name, layer, Annotated[int, Range(least=0, below=num_layers)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(Checked):
    """The fields of every transformer.

    Raises:
      UserError: a size is not positive, `dropout_rate` or `norm_eps` is out of range, or
        `d_model` is not divisible by `num_heads`.
    """

    vocab_size: Size
    """Number of tokens, V."""
    max_length: Size
    """Maximum sequence length, in tokens."""
    num_layers: Depth
    """Number of layers, L."""
    d_model: Size
    """Width of the residual stream, D."""
    num_heads: Size
    """Number of attention heads, N, each of size D / N."""
    d_ff: Size | None = None
    """Width of the feed-forward layer, F. If None, 4 D."""
    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layer; "gelu" is the exact GELU (erf), and "relu_squared"
    is max(0, x)² (Primer).
    """
    norm_eps: Positive = 1e-5
    """Added to the variance in layer normalization."""
    d_k: Size | None = None
    """Size of the queries and keys in a head. If None, the head size."""
    d_v: Size | None = None
    """Size of the values in a head. If None, the head size."""
    scale_scores: bool = True
    """Whether attention scores are divided by √d_k."""
    dropout_rate: Rate = 0.0
    """Dropout rate. Dropout is applied in the same places as in the paper."""
    init_std: Positive | None = 0.02
    """Standard deviation of initial kernels. The papers use 0.02, which is close to 1 / √D at the
    papers' widths; a narrow model needs a larger value, 1 / √D. If None, each kernel is initialized
    uniformly, in an interval that depends on its sizes (Glorot and Bengio 2010, equation 16). The
    standard deviation of initial embeddings is always 0.02.
    """
    positions: PositionKind = "learned"
    """The kind of positions. learned: a table of embeddings. sinusoidal: sines and cosines. rotary:
    queries and keys are rotated. buckets: a learned bias for each range of distances (T5). alibi:
    biases that decrease linearly with the distance, with one slope per head (Press et al. 2022).
    none: the model has no information about the order of its tokens.
    """
    position_base: Positive = 10_000.0
    """Base of the wavelengths of sinusoidal and rotary positions."""
    position_layout: Literal["interleaved", "halves", "per_dimension"] = "interleaved"
    """The order of sines and cosines in sinusoidal positions. interleaved: alternating, as
    published. halves: all sines first (Marian). per_dimension: alternating, with a separate
    wavelength, base^(i/D), for each dimension."""
    position_distance: Size | None = None
    """The smallest distance that falls into the last bucket. If None, 128."""
    position_buckets: Annotated[int, Range(least=4, most=2**27)] = 32
    """Number of distance buckets. If tokens also attend to later tokens, this is the total for both
    directions."""

    position_options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "position_base": ("sinusoidal", "rotary"),
        "position_layout": ("sinusoidal",),
        "position_distance": ("buckets",),
        "position_buckets": ("buckets",),
    }
    """For each position option, the kinds of positions that use it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.d_model % self.num_heads == 0 or getattr(self, "d_head", None) is not None,
            f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}: "
            f"choose num_heads from {divisors_of(self.d_model)}",
        )
        self._check_positions()

    def _check_positions(self) -> None:
        """Checks that the position options do not contradict each other."""
        kind = self.positions
        require(
            not self.adds_positions or self.max_length * self.d_model <= MOST_POSITIONS,
            f"max_length {self.max_length} times d_model {self.d_model} is too large for "
            f"positions {kind!r}: choose a product of at most {MOST_POSITIONS:,}",
        )
        # Rotary positions rotate pairs of dimensions. The error message names the setting that
        # determines the number of rotated dimensions.
        if kind == "rotary" and self.key_dim % 2:
            size = "d_head" if hasattr(self, "d_head") else "d_model / num_heads"
            size = size if self.d_k is None else "d_k"
            raise UserError(
                f"heads of size {self.key_dim} cannot be rotated in pairs: choose an even {size}"
            )
        if kind == "rotary" and self.rope_scaling is not None:
            self.rope_scaling.check_factors(self.rotated_dim)
        # Half of the buckets have a single distance each. The last bucket begins after these
        # distances.
        least = self.position_buckets // 2 + 1 if kind == "buckets" else 1
        problem = f"position_distance must be at least {least}, got {self.position_distance}"
        require(self.position_distance is None or self.position_distance >= least, problem)
        # An option that the chosen kind of positions does not use has no effect, so it must have
        # its default.
        for name, kinds in self.position_options.items():
            if kind not in kinds:
                belongs = f"requires positions {' or '.join(kinds)}, got {kind}"
                require_default(self, [name], belongs)

    @property
    def longest_input(self) -> int | None:
        """The longest input in tokens, or None if positions do not come from a table.

        Training uses at most `max_length` tokens. Predictions for longer inputs may be poor.
        """
        return self.max_length if self.positions == "learned" else None

    def with_max_length(self, max_length: int) -> "TransformerConfig":
        """Returns the configuration of the same model with a different `max_length`.

        The parameters do not change: `models.create(config.with_max_length(n))`.

        Raises:
          UserError: The positions come from a table of `max_length` rows.
        """
        require(
            self.longest_input in (None, max_length),
            f"max_length {max_length} differs from the {self.max_length} rows of the model's "
            f"table of positions ({self.positions}): leave max_length out, or use a model with "
            "other positions, such as sinusoidal or rotary",
        )
        changes: dict[str, object] = {"max_length": max_length}
        if self.rope_scaling is not None:
            # The defaults of the scaling depend on `max_length`, so compute them from the trained
            # length.
            changes["rope_scaling"] = self.rope_scaling.of_length(self.max_length)
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    @property
    def input_vocab_size(self) -> int:
        """The vocabulary size of `input_ids`, which encoder-decoders read as the source."""
        return self.source_vocab_size or self.vocab_size

    @property
    def position_dim(self) -> int:
        """Width of the position vectors."""
        return self.d_model

    @property
    def scores_by_distance(self) -> bool:
        """Whether the attention scores depend on the distance between query and key."""
        return self.positions in ("buckets", "alibi")

    @property
    def adds_positions(self) -> bool:
        """Whether positions are vectors that are added to embeddings."""
        return self.positions in ("learned", "sinusoidal")

    @property
    def recent_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the recent-token arrays that a layer caches in addition to keys and values.

        Each beam has separate arrays, and decoding cannot remove tokens from them.
        """
        return ()

    def score_scale(self, layer: "int | jax.Array") -> "float | jax.Array":
        """Returns the attention scale of a layer; `layer` counts from 0."""
        del layer
        return self.key_dim**-0.5 if self.scale_scores else 1.0

    @property
    def head_dim(self) -> int:
        """Size of one head, H = D / N."""
        return self.d_model // self.num_heads

    @property
    def feed_forward_dim(self) -> int:
        """Width of the feed-forward layer, F."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    @property
    def expert_dim(self) -> int:
        """Width of one expert, F."""
        return self.feed_forward_dim

    # Properties that differ between families. If a property differs between the models of one
    # family, it is a field of the family's configuration.

    head: ClassVar[str] = "none"
    """The name of the model's head, a key of `models.heads.specs.HEADS`."""
    causal: ClassVar[bool] = True
    """Whether a model that predicts next tokens masks later tokens. If False, it cannot generate
    text.
    """
    labels: ClassVar[tuple[str, ...]] = ()
    """Names of the labels, in order of their ids."""
    head_transform: ClassVar[bool] = False
    """Whether every head begins with the transform of the head for masked words: a linear map, an
    activation and a norm. A model with this transform has no pooler (ModernBERT)."""
    transform_bias: ClassVar[bool] = True
    """Whether the linear map in a head's transform has a bias."""
    num_token_types: ClassVar[int] = 0
    """Number of token types, or 0 if the model has none."""
    rope_scaling: ClassVar[RotaryScaling | None] = None
    """How rotary frequencies are scaled for sequences longer than the training sequences."""
    rotary_interleaved: ClassVar[bool] = False
    """Whether rotary positions rotate pairs of neighboring dimensions (GPT-J)."""
    position_offset: ClassVar[int] = 0
    """Number of rows that precede the row of position 0 in the position table."""
    source_vocab_size: ClassVar[int | None] = None
    """Vocabulary size of the source language. Defaults to `vocab_size`."""
    query_key_norm: ClassVar[QueryKeyNorm | None] = None
    """How queries and keys are normalized before they are rotated. If None, they are not
    normalized."""
    norm_affine: ClassVar[bool] = True
    """Whether LayerNorm has learned scales and biases. If False, it only normalizes."""
    norm_bias: ClassVar[bool] = True
    """Whether LayerNorm adds a learned bias. False in ModernBERT."""
    norm_offset: ClassVar[float] = 0.0
    """Added to the learned scales of RMSNorm. 1 in Gemma, which stores each scale minus 1."""
    score_cap: ClassVar[float | None] = None
    """If not None, attention scores s become cap · tanh(s / cap) (Gemma 2)."""
    num_experts: ClassVar[int] = 0
    """Number of experts in each feed-forward layer, E, or 0 for no mixture of experts. Families
    that support mixtures derive `MixtureConfig`, which documents the fields."""
    experts_per_token: ClassVar[int] = 1
    num_shared_experts: ClassVar[int] = 0
    gated_experts: ClassVar[bool] = True
    normalize_experts: ClassVar[bool] = True
    expert_capacity: ClassVar[float | None] = None
    router_jitter: ClassVar[float] = 0.0
    router_balance: ClassVar[float] = 0.0
    router_balance_over: ClassVar[str] = "sequence"
    router_z: ClassVar[float] = 0.0

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the family supports, which are the choices of the field `head`."""
        return self.__dataclass_fields__["head"].metadata.get("choices", (self.head,))

    def with_head(self, head: str, labels: tuple[str, ...]) -> "TransformerConfig":
        """Returns the configuration of the same body with a different head.

        Raises:
          UserError: The family does not support the head.
        """
        del labels
        require(head == self.head, f"head {head!r} is unknown: choose {', '.join(self.heads)}")
        return self

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens including the current one; None means all tokens."""
        return (None,) * self.num_layers

    @property
    def layer_order(self) -> tuple[int, ...]:
        """For each layer in the order of execution, the index of its stored parameters.

        Several layers may share parameters (ALBERT).
        """
        return tuple(range(self.num_layers))

    @property
    def has_two_sided_windows(self) -> bool:
        """Whether any layer attends to a window on both sides of each token."""
        return False

    @property
    def reread_length(self) -> int | None:
        """Length beyond which the cache is recomputed (LongRoPE), or None.

        The cache is recomputed once, when the sequence crosses this length.
        """
        return None

    @property
    def decoder(self) -> "TransformerConfig":
        """The configuration of the layers that generate tokens, such as the decoder."""
        return self

    @property
    def key_dim(self) -> int:
        """Size of a query and of a key in one head."""
        return self.head_dim if self.d_k is None else self.d_k

    @property
    def value_dim(self) -> int:
        """Size of a value in one head."""
        return self.head_dim if self.d_v is None else self.d_v

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K; a divisor of `num_heads`."""
        return self.num_heads

    @property
    def use_bias(self) -> bool:
        """Whether the affine maps have biases."""
        return True

    @property
    def rotated_dim(self) -> int:
        """Number of dimensions of a head that rotary positions rotate, R."""
        return self.key_dim

    @property
    def attention_bias(self) -> bool:
        """Whether the projections of attention have biases."""
        return self.use_bias

    @property
    def attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.attention_bias

    @property
    def feed_forward_output_bias(self) -> bool:
        """Whether the last map of a gated feed-forward layer has a bias."""
        return self.use_bias

    @property
    def query_init_std(self) -> float | None:
        """Standard deviation of the initial query projection."""
        return self.init_std

    @property
    def transform_init_std(self) -> float | None:
        """Standard deviation of the initial kernel in a head's transform."""
        return self.init_std

    @property
    def score_init_std(self) -> float | None:
        """Standard deviation of the initial kernels that compute the scores of a head."""
        return self.init_std

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate of attention weights."""
        return self.dropout_rate

    @property
    def activation_dropout_rate(self) -> float:
        """Dropout rate inside the feed-forward layer, after the activation."""
        return 0.0

    def residual_dropout_rate(self, sublayer: str) -> float:
        """Returns the dropout rate of the output of a sublayer, such as "attention"."""
        del sublayer
        return self.dropout_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(Checked):
    """The fields of a model whose feed-forward layers can be mixtures of experts.

    In a configuration class, `MixtureConfig` is the first base class, as in
    `GPTConfig(MixtureConfig, CausalLMConfig)`.

    Raises:
      UserError: a size or a rate is out of range.
    """

    num_experts: NumExperts = 0
    """Number of experts of each feed-forward layer, E, or 0 for no mixture of experts."""
    experts_per_token: Size = 2
    """Number of experts that process each token, k."""
    num_shared_experts: NumExperts = 0
    """Number of additional experts that process every token, with weight 1."""
    expert_capacity: Positive | None = None
    """Capacity factor: an expert processes at most T · k / E · capacity tokens of a sequence of T
    real tokens, and drops the other tokens. If None, or in a call with a cache, no token is
    dropped."""
    router_jitter: Rate = 0.0
    """In training, the router's input is multiplied by random numbers between 1 - jitter and 1 +
    jitter."""
    router_balance: NonNegative = 0.01
    """Coefficient of the loss that balances the experts (0.01 in Switch)."""
    router_balance_over: Literal["sequence", "batch"] = "sequence"
    """Whether the loss balances the experts per sequence or per batch. sequence: for each sequence
    and layer separately. batch: over all sequences and layers together, as in transformers. The
    option batch does not support micro-batches.
    """
    router_z: NonNegative = 0.0
    """Coefficient of the router z-loss, which penalizes large router logits (0.001 in ST-MoE)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_experts:
            problem = "requires a mixture of experts, got num_experts 0"
            require_default(self, EFFECTIVE_IN_MIXTURES, problem)
            return
        require(
            self.experts_per_token <= self.num_experts,
            f"experts_per_token {self.experts_per_token} must be at most num_experts "
            f"{self.num_experts}",
        )


EFFECTIVE_IN_MIXTURES = tuple(
    field.name for field in dataclasses.fields(MixtureConfig) if field.name != "num_experts"
)
"""The fields that must have their default values in a configuration without experts."""


@dataclasses.dataclass(frozen=True)
class Execution(Checked):
    """How a model is run."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; softmax, norms and losses stay in float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the stored parameters."""
    layers: Literal["scan", "unroll", "separate"] = "scan"
    """How the layers are compiled and stored. scan: one compiled layer in a loop, so that the
    compile time does not depend on the depth. unroll: the same stacked parameters, with L copies of
    the layer in the program. separate: one parameter subtree per layer, in a layout for decoding
    (`models.unstack_layers`)."""
    remat: Literal["none", "dots", "full"] = "none"
    """The activations that the backward pass recomputes. none: no activations. dots: all
    activations except the results of matmuls. full: all activations in a layer, from the layer's
    input."""
    attention: Literal["auto", "xla", "cudnn", "splash", "flash", "triton", "blocks"] = "auto"
    """The implementation of attention. xla: no fused kernel. cudnn: a kernel for GPUs. splash: a
    kernel for TPUs. triton, flash: kernels for GPUs and TPUs that support dropout of attention
    weights. blocks: blockwise computation on any device, also with dropout. auto: `train` chooses a
    kernel for the devices and logs its name; elsewhere, auto means xla. Calls that a kernel does
    not support use xla."""
    experts: Literal["auto", "blocked", "ragged"] = "auto"
    """How a mixture of experts without a capacity is computed; see `models.nn.experts`. auto:
    ragged on TPUs, blocked elsewhere."""
