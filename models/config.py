"""The fields that every model's configuration shares, and how a model is run.

A configuration describes the model: its sizes, its activation, the position of its norms. An
`Execution` describes how the model is run (precision, scanned or unrolled layers,
rematerialization); it may change from one machine to the next without changing the model.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from ..data.common.errors import UserError, check_choices, check_types
from .rotary_scaling import RotaryScaling

if TYPE_CHECKING:
    import jax

Settings: TypeAlias = dict[str, Any]
"""Fields of a configuration by name. They are checked when the configuration is made."""

PositionKind: TypeAlias = Literal[
    "learned",
    "sinusoidal",
    "rotary",
    "relative",
    "buckets",
    "alibi",
    "counter",
    "binary",
    "table",
    "none",
]
"""The kinds of positions; see `models.nn.positions`."""
PositionPlace: TypeAlias = Literal["input", "every_layer", "queries_keys", "projections"]
"""The places where a vector of each position can be added."""

FIXED_TABLES = ("learned", "table")
"""The kinds of positions that are rows of a table, and end with it."""
BY_DISTANCE = ("relative", "buckets", "alibi")
"""The kinds of positions that change the scores of attention by the distance of two tokens."""
NOT_ADDED = (*BY_DISTANCE, "rotary", "none")
"""The kinds of positions that are no vectors to add."""
_POSITION_OPTIONS = {
    "position_base": ("sinusoidal", "rotary"),
    "position_layout": ("sinusoidal",),
    "position_distance": ("relative", "buckets"),
    "position_buckets": ("buckets",),
}
"""Options of positions, and the kinds that read each."""
MOST_BITS = 31
"""The most binary digits of a position."""
MOST = 2**27
"""The largest size, in any direction; a larger one in a file would occupy whoever reads it."""
MOST_REPEATED = 2**13
"""The most layers, and the most experts of one."""
MOST_POSITIONS = 2**31
"""The most numbers in a table of positions."""
REPEATED = ("num_layers", "num_decoder_layers", "num_experts", "num_shared_experts")
UNBOUNDED = ("window", "local_window")
"""Integers that are only compared."""


Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]
"""The non-linearities of feed-forward layers: the names of `models.nn.layers.ACTIVATIONS`."""


def divisors(number: int) -> list[int]:
    """Returns all positive divisors of a number, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The fields of every transformer.

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
    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layer; "gelu" is the exact one (erf), "relu_squared"
    max(0, x)² (Primer)."""
    attention: Literal["learned", "simple"] = "learned"
    """learned: queries, keys, values and outputs are linear maps. simple: attention without
    parameters; the input, in N parts of size D / N, is query, key and value at once."""
    norm_eps: float = 1e-5
    """Added to the variance in layer normalization."""
    norm_affine: bool = True
    """Whether normalization has learned scales and biases; else it only normalizes."""
    residual_scalar: bool = False
    """Whether each sublayer's output is multiplied by one learned number, which begins at 1."""
    d_k: int | None = None
    """Size of queries and keys in a head, if not that of a head."""
    d_v: int | None = None
    """Size of values in a head, if not that of a head."""
    scale_scores: bool = True
    """Whether attention scores are divided by √d_k."""
    head_convolution: int | None = None
    """If given, the width of the causal convolution over the tokens that follows the projections
    of causal self-attention to queries, keys and values (3 in Primer)."""
    dropout_rate: float = 0.0
    """Dropout rate, at the places that the paper names."""
    init_std: float | None = 0.02
    """Standard deviation of initial kernels. The papers' 0.02 is close to 1 / √D at their
    widths; a narrow model needs its own 1 / √D. None: each kernel is initialized uniformly, over
    an interval that follows from its sizes (Glorot and Bengio 2010, equation 16). The standard
    deviation of initial embeddings is always 0.02."""
    positions: PositionKind = "learned"
    """The kind of positions. learned: a table of embeddings. sinusoidal: sines and cosines. rotary:
    queries and keys are rotated. relative: learned vectors of each clipped distance, added to keys
    and values (Shaw et al. 2018). buckets: learned biases of ranges of distances (T5). alibi:
    biases that fall with the distance, by a slope of each head (Press et al. 2022). counter: 1, 2,
    3, … in the last dimension. binary: binary digits in the last dimensions. table: given by
    hand, in `position_table`. none: the model does not see the order of its tokens."""
    positions_at: PositionPlace = "input"
    """Where vectors of positions are added. input: to the embeddings, once. every_layer: to the
    input of every layer. queries_keys: to the inputs of the query and key projections, in every
    layer. projections: to queries, keys and values themselves, D cut into heads."""
    position_base: float = 10_000.0
    """Base of the wavelengths of sinusoidal and rotary positions."""
    position_layout: Literal["interleaved", "halves", "per_dimension"] = "interleaved"
    """Sinusoidal positions with sines and cosines in turn, as published, or all sines first
    (Marian), or in turn with a wavelength for each dimension, base^(i/D)."""
    position_distance: int | None = None
    """Distance at which relative positions are clipped (16 if not given), or from which on all
    tokens share a bucket (128)."""
    position_buckets: int = 32
    """Number of buckets of distances, over both directions if tokens attend to later ones."""
    position_table: tuple[float, ...] | None = None
    """The vectors of positions "table", max_length · D numbers row by row; of an array
    float32[max_length, D] they are `tuple(array.ravel().tolist())`."""

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        self._check_bounds()
        for name in (
            *("vocab_size", "max_length", "num_layers", "d_model", "num_heads", "d_ff"),
            *("d_k", "d_v", "head_convolution"),
        ):
            value = getattr(self, name)
            least = self.fewest_layers if name == "num_layers" else 1
            if value is not None and value < least:
                problem = "is not positive" if least else "is negative"
                raise UserError(f"{name} {value} {problem}: choose at least {least}")
        if not 0 <= self.dropout_rate < 1:
            raise UserError(f"dropout_rate {self.dropout_rate} is not in [0, 1)")
        if self.init_std is not None and not self.init_std > 0:
            raise UserError(f"init_std {self.init_std} must be above 0, for example 0.02")
        if not self.norm_eps > 0:
            raise UserError(f"norm_eps {self.norm_eps} must be above 0, for example 1e-5")
        if self.d_model % self.num_heads and getattr(self, "d_head", None) is None:
            choices = ", ".join(map(str, divisors(self.d_model)))
            raise UserError(
                f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}: "
                f"choose num_heads from {choices}"
            )
        if self.attention == "simple":
            if self.head_convolution is not None:
                raise UserError(
                    f"head_convolution {self.head_convolution} follows projections, and attention "
                    '"simple" has none: leave it out'
                )
            # Parts of one input have one size, and there are as many of each.
            part = self.d_model // self.num_heads
            if (self.kv_heads, self.key_dim, self.value_dim) != (self.num_heads, part, part):
                raise UserError(
                    'attention "simple" has no maps that could give keys or values sizes of their '
                    f"own: leave heads of size {part}, one key and one value for each of "
                    f"num_heads {self.num_heads}"
                )
        self._check_positions()

    def _check_bounds(self) -> None:
        """Raises UserError if a size is beyond any model, before work of that size begins."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            most = MOST_REPEATED if field.name in REPEATED else MOST
            if isinstance(value, int) and value > most and field.name not in UNBOUNDED:
                raise UserError(f"{field.name} {value} is too large: choose at most {most:,}")
        if self.positions not in NOT_ADDED and self.max_length * self.d_model > MOST_POSITIONS:
            raise UserError(
                f"max_length {self.max_length} times d_model {self.d_model} is too large for "
                f"positions {self.positions!r}: choose a product of at most {MOST_POSITIONS:,}"
            )

    def _check_positions(self) -> None:
        """Raises UserError if the options of positions contradict each other."""
        kind, place = self.positions, self.positions_at
        if kind in NOT_ADDED and place != "input":
            raise UserError(
                f"positions_at {place!r} does not suit positions {kind!r}, which are not added to "
                "anything: leave positions_at out"
            )
        sizes = {self.key_dim * self.num_heads, self.value_dim * self.num_heads}
        if place == "projections" and sizes != {self.d_model}:
            raise UserError(
                f"positions_at 'projections' cuts {self.d_model} dimensions into {self.num_heads} "
                f"heads, but keys have size {self.key_dim} and values {self.value_dim}: choose "
                "another place or D / N"
            )
        if not self.position_base > 0:
            raise UserError(f"position_base {self.position_base} must be above 0")
        if kind == "rotary" and self.key_dim % 2:
            size = "d_head" if hasattr(self, "d_head") else "d_model / num_heads"
            size = size if self.d_k is None else "d_k"
            raise UserError(
                f"heads of size {self.key_dim} cannot be rotated in pairs: choose an even {size}"
            )
        if self.position_buckets < 4:
            raise UserError(f"position_buckets {self.position_buckets} must be at least 4")
        if self.position_distance is not None:
            least = self.position_buckets // 2 + 1 if kind == "buckets" else 1
            if self.position_distance < least:
                raise UserError(
                    f"position_distance {self.position_distance} must be at least {least}"
                )
        if kind == "binary" and self.max_length > 2 ** min(self.d_model, MOST_BITS):
            raise UserError(
                f"max_length {self.max_length} has more positions than {self.d_model} binary "
                "digits: raise d_model or choose other positions"
            )
        for field in dataclasses.fields(self):
            read_by = _POSITION_OPTIONS.get(field.name, (kind,))
            value = getattr(self, field.name)
            if kind not in read_by and value != field.default:
                raise UserError(
                    f"{field.name} {value!r} belongs to positions {' or '.join(read_by)}, and "
                    f"these are {kind}: leave it out"
                )
        if (kind == "table") != (self.position_table is not None):
            raise UserError(
                "positions 'table' and position_table belong together: give both or neither"
            )
        if self.position_table is not None:
            object.__setattr__(self, "position_table", tuple(map(float, self.position_table)))
            if len(self.position_table) != self.max_length * self.position_dim:
                raise UserError(
                    f"position_table has {len(self.position_table)} numbers, not max_length "
                    f"{self.max_length} times {self.position_dim}: give one row per position"
                )

    @property
    def longest_input(self) -> int | None:
        """The longest input in tokens; None: any, as positions do not come from a table.

        Trained were at most `max_length`, and beyond it a model may predict badly.
        """
        return self.max_length if self.positions in FIXED_TABLES else None

    def with_max_length(self, max_length: int) -> "TransformerConfig":
        """Returns the configuration of the same model that reads another number of tokens.

        The parameters stay as they are: `models.create(config.with_max_length(n))`.

        Raises:
          UserError: The positions are a table, which ends at `max_length`.
        """
        if self.longest_input not in (None, max_length):
            raise UserError(
                f"max_length {max_length} differs from the {self.max_length} rows of the model's "
                f"table of positions ({self.positions}): leave it out, or use a model with other "
                "positions, such as sinusoidal or relative"
            )
        changes: dict[str, object] = {"max_length": max_length}
        if self.rope_scaling is not None:
            changes["rope_scaling"] = self.rope_scaling.of_length(self.max_length)
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    @property
    def position_dim(self) -> int:
        """Width of the vectors of positions."""
        return self.d_model

    @property
    def scores_by_distance(self) -> bool:
        """Whether scores of attention depend on the distance of query and key."""
        return self.positions in BY_DISTANCE

    def score_scale(self, layer: "int | jax.Array") -> "float | jax.Array":
        """Returns the factor of the attention scores of a layer, counted from 0."""
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

    # Properties in which families differ. A family whose models differ in one makes it a field.

    fewest_layers: ClassVar[int] = 1
    """The least number of layers; 0 if the family has a use for embeddings alone."""
    head: ClassVar[str] = "none"
    """The kind of output: the name of a record in `models.nn.heads.HEADS`."""
    causal: ClassVar[bool] = True
    """Whether a model that predicts next tokens hides later tokens; else it cannot generate."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Names of the labels, in order of their ids."""
    num_token_types: ClassVar[int] = 0
    """Number of token types; 0: the model has none."""
    rope_scaling: ClassVar[RotaryScaling | None] = None
    """How rotary frequencies are scaled for sequences longer than the trained."""
    rotary_interleaved: ClassVar[bool] = False
    """Whether a plane of rotation is that of neighboring dimensions (GPT-J)."""
    position_offset: ClassVar[int] = 0
    """Number of rows of the position table before the row of position 0."""
    source_vocab_size: ClassVar[int | None] = None
    """Number of tokens of the source language, if not `vocab_size`."""
    query_key_norm: ClassVar[bool] = False
    """Whether each query and each key is normalized before it is rotated (RMSNorm, Qwen3)."""
    norm_offset: ClassVar[float] = 0.0
    """Added to the learned scales of RMSNorm: 1 in Gemma, whose scales are stored less 1."""
    score_cap: ClassVar[float | None] = None
    """If given, attention scores s become cap · tanh(s / cap) (Gemma 2)."""
    num_experts: ClassVar[int] = 0
    """Number of experts of each feed-forward layer, E; 0: there is no mixture. The families that
    can have one derive `MixtureConfig`, which documents the fields of a mixture."""
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
        """The heads that the model can have: the choices of the field `head`."""
        return self.__dataclass_fields__["head"].metadata.get("choices", (self.head,))

    def with_head(self, head: str, labels: tuple[str, ...]) -> "TransformerConfig":
        """Returns the configuration of the same body below another head.

        Raises:
          UserError: The family has no such head.
        """
        del labels
        if head != self.head:
            raise UserError(f"head {head!r} is unknown: choose {', '.join(self.heads)}")
        return self

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The number of tokens to which a token of each layer attends, its own included; or all."""
        return (None,) * self.num_layers

    @property
    def reread_length(self) -> int | None:
        """Number of tokens beyond which a growing text is read anew; None: it never is.

        Up to it, and from there on, the text is continued from the cache.
        """
        return None

    @property
    def decoder(self) -> "TransformerConfig":
        """The configuration of the layers that generate tokens."""
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
    def query_init_std(self) -> float | None:
        """Standard deviation of the initial projection to queries."""
        return self.init_std

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate of attention weights."""
        return self.dropout_rate

    @property
    def activation_dropout_rate(self) -> float:
        """Dropout rate inside the feed-forward layer, after the activation."""
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """The fields of a model whose feed-forward layers can be mixtures of experts.

    A configuration derives it before another one: `GPTConfig(MixtureConfig, TransformerConfig)`.

    Raises:
      UserError: a size or a rate is out of range.
    """

    num_experts: int = 0
    """Number of experts of each feed-forward layer, E; 0: there is no mixture."""
    experts_per_token: int = 2
    """Number of experts that each token goes through, k."""
    num_shared_experts: int = 0
    """Number of further experts that every token goes through, with weight 1."""
    expert_capacity: float | None = None
    """If given, an expert takes at most T · k / E · capacity tokens of a sequence of T real tokens,
    and drops the others; None: no token is dropped, nor is one in a call with a cache."""
    router_jitter: float = 0.0
    """In training the router's input is multiplied by random numbers from 1 - jitter to 1 +
    jitter."""
    router_balance: float = 0.01
    """Coefficient of the loss that balances the experts (0.01 in Switch)."""
    router_balance_over: Literal["sequence", "batch"] = "sequence"
    """The tokens that this loss balances: those of each sequence and layer, or of all sequences and
    layers together, as in transformers; a batch cannot be cut into micro-batches then."""
    router_z: float = 0.0
    """Coefficient of the loss of the router's logits (0.001 in ST-MoE)."""

    def __post_init__(self) -> None:
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]
        if self.num_experts < 0:
            raise UserError(f"num_experts {self.num_experts} must not be negative")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"experts_per_token {self.experts_per_token} must be from 1 to num_experts "
                f"{self.num_experts}"
            )
        if self.num_shared_experts < 0:
            raise UserError(f"num_shared_experts {self.num_shared_experts} must not be negative")
        if self.expert_capacity is not None and not self.expert_capacity > 0:
            raise UserError(f"expert_capacity {self.expert_capacity} must be above 0, or None")
        if not 0 <= self.router_jitter < 1:
            raise UserError(f"router_jitter {self.router_jitter} is not in [0, 1)")
        for name in ("router_balance", "router_z"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} {getattr(self, name)} must not be negative")
        if not self.num_experts:
            self._check_dense()

    def _check_dense(self) -> None:
        """Raises UserError if a field of mixtures is set, which would be without effect."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in EFFECTIVE_IN_MIXTURES and value != field.default:
                raise UserError(
                    f"{field.name} {value} is for a mixture of experts: give num_experts, or leave "
                    f"it at {field.default}"
                )


EFFECTIVE_IN_MIXTURES = frozenset(
    field.name for field in dataclasses.fields(MixtureConfig) if field.name != "num_experts"
)
"""The fields that a configuration without experts leaves at their defaults."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a model is run."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; softmax, norms and losses stay in float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which parameters are stored."""
    layers: Literal["scan", "unroll", "separate"] = "scan"
    """scan: one compiled layer in a loop, so that the compile time does not depend on the depth.
    unroll: the same stacked parameters, and L copies of the layer in the program. separate: one
    parameter subtree per layer, in a layout for decoding (`models.unstack_layers`)."""
    remat: Literal["none", "dots", "full"] = "none"
    """The activations that the backward pass recomputes. none: nothing. dots: everything but
    matrix products. full: every layer from its input."""
    attention: Literal["auto", "xla", "cudnn", "splash", "flash", "triton", "blocks"] = "auto"
    """xla, or a fused kernel where it supports the call: cudnn (GPUs), splash (TPUs), with dropout
    of attention weights flash (TPUs) and triton (GPUs), or blocks, block by block on any device,
    with dropout too. auto: the kernel for the devices of `train`, elsewhere XLA; `train` prints the
    choice."""
    experts: Literal["auto", "blocked", "ragged"] = "auto"
    """How a mixture of experts without a capacity is computed, see `models.nn.experts`. auto:
    ragged on TPUs, else blocked."""
