"""Falcon: a GPT with few key/value heads and no biases.

Almazrouei et al. 2023, "The Falcon series of open language models", section 4: rotary positions;
attention and feed-forward in parallel. The 7-billion-parameter model has one norm for both
sublayers and one key/value head. Larger models have several key/value heads, and some have two
norms. The earlier models of Penedo et al. 2023, "The RefinedWeb dataset for Falcon LLM", run the
sublayers in sequence, with biases and ALiBi. Dropout of attention weights applies with both kinds
of positions. With rotary positions, transformers applies this dropout only in FlashAttention.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from ....data.common.fields import Rate, require
from ...config import Activation, Execution, PositionKind, Size, TransformerConfig, divisors_of
from ...nn.cache import Cache
from ...nn.masks import AnyArray
from ...nn.masks import Size as Length
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...nn.positions import Positions, make_positions, query_and_key_positions
from ...nn.relative_positions import alibi_slopes
from ...nn.stack import Layer
from ...nn.typing import Array, Float, Int
from ...registry import Family, Preset, preset_maker
from ...rotary_scaling import RotaryScaling
from ..causal_lm import DECODER_HEADS, head_field
from .gpt import GPT, GPTConfig, PreNormLayer
from .gpt_neox import ParallelLayer
from .gptj import GPTJLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconConfig(GPTConfig):
    """A decoder-only transformer of the Falcon family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layer."""
    num_kv_heads: Size | None = None
    """Number of key/value heads, K. Defaults to `num_heads`."""
    residual: Literal["one_norm", "two_norms", "sequential"] = "one_norm"
    """How the sublayers read the residual stream. one_norm: both sublayers read the same normalized
    input. two_norms: each sublayer has a separate norm. sequential: the feed-forward layer reads
    the residual stream after attention.
    """
    positions: PositionKind = "rotary"
    """How the model represents positions: rotary or alibi."""
    rope_scaling: RotaryScaling | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """How rotary frequencies are scaled for sequences longer than the trained length."""
    use_bias: bool = False
    """Whether the affine maps have biases."""
    dropout_rate: Rate = 0.0
    """Dropout rate of the sum of the outputs of both sublayers. In sequential layers, the output
    of attention has the rate of attention weights instead."""
    embedding_dropout: Rate | None = 0.0
    """Dropout rate of the embeddings. Defaults to `dropout_rate`."""
    scale_residual_init: bool = False
    """Whether the initial kernels that project to the residual stream are multiplied by 1/√(2L)."""
    classifier_dropout_rate: Rate = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Dropout rate of the hidden states that token classification reads."""
    head: str = head_field(DECODER_HEADS)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_heads % self.kv_heads == 0,
            f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}: "
            f"choose num_kv_heads from {divisors_of(self.num_heads)}",
        )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K; a divisor of `num_heads`."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def residual_dropout_rate(self, sublayer: str) -> float:
        """Returns the dropout rate of the output of a sublayer, as in the published code."""
        return self.attention_dropout_rate if sublayer == "attention" else self.dropout_rate


class OneNormLayer(GPTJLayer):
    """A parallel layer with one norm."""

    drops_sum = True


class TwoNormsLayer(ParallelLayer):
    """A parallel layer with two norms."""

    drops_sum = True


LAYERS: dict[str, type[Layer]] = {
    "one_norm": OneNormLayer,
    "two_norms": TwoNormsLayer,
    "sequential": PreNormLayer,
}
"""The layer class for each value of `residual`."""


def _bfloat16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds values to the precision of bfloat16."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def make_falcon_positions(
    config: TransformerConfig,
    execution: Execution,
    position_ids: Int[AnyArray, "#B #T"],
    length: Length,
    *,
    cache: Cache | None,
    causal: bool,
) -> Positions:
    """Returns the positions of tokens, with ALiBi biases as in the published code.

    The bias of a key is slope · position / √H. As in the published code, the slope, the position
    and their product are rounded to bfloat16, which gives some neighboring positions above 256 the
    same value.
    """
    if config.positions != "alibi":
        return make_positions(config, execution, position_ids, length, cache=cache, causal=causal)
    _, keys, written = query_and_key_positions(position_ids, length, cache)
    slopes = _bfloat16(jnp.asarray(alibi_slopes(config.num_heads)))
    products = _bfloat16(slopes[:, None, None] * _bfloat16(keys.astype(jnp.float32))[:, None, None])
    return Positions(bias=products * config.key_dim**-0.5, key_positions=written)


class Falcon(GPT):
    """The Falcon model with its head, built from the layers of GPT-J, GPT-NeoX or GPT-2."""

    config: FalconConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    make_positions = staticmethod(make_falcon_positions)

    @property
    def layer(self) -> type[Layer]:
        """The class of the model's layers."""
        return LAYERS[self.config.residual]


_preset = preset_maker(
    FalconConfig,
    "Almazrouei et al. 2023",
    ("num_layers", "d_model", "num_heads", "num_kv_heads"),
    vocab_size=65_024,
    max_length=2048,
)

PRESETS: dict[str, Preset] = {
    "falcon-7b": _preset("7B", (32, 4544, 71, 1)),
    "falcon-40b": _preset(
        "40B",
        (60, 8192, 128, 8),
        note="the paper says 40B, computed from its sizes: 41B",
        residual="two_norms",
    ),
    "falcon-rw-1b": Preset(
        FalconConfig(
            vocab_size=50_304,
            max_length=2048,
            num_layers=24,
            d_model=2048,
            num_heads=32,
            residual="sequential",
            positions="alibi",
            use_bias=True,
        ),
        "Penedo et al. 2023",
        "1.3B",
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "falcon-7b": 6_921_720_704, "falcon-40b": 41_303_293_952, "falcon-rw-1b": 1_311_625_216,
}
# fmt: on

FAMILY = Family(
    config=FalconConfig,
    module=Falcon,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gpt.falcon",
)
