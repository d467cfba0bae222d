"""StableLM: a Llama with LayerNorm that rotates only a quarter of the dimensions of each head.

Bellagente et al. 2024, "Stable LM 2 1.6B technical report", section 3.2: LayerNorm with biases,
biases in the query, key and value projections, and rotary positions for the first 25 % of each
head. The 12-billion-parameter model runs both sublayers in parallel on the same normalized input,
and normalizes each head of queries and keys.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn

from ...data.common.fields import Rate, require
from ..config import NormKind, QueryKeyNorm, RotatedFraction
from ..nn.layers import GatedFeedForward, LayerNorm
from ..nn.parameter_axes import (
    EMBEDDING_AXES,
    FINAL_NORM_AXES,
    HEAD_AXES,
    LAYER_AXES,
    NORM_OF_HEADS_AXES,
)
from ..nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ..nn.typing import Array, Float
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder, CausalDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableLMConfig(CausalDecoderConfig):
    """A decoder-only transformer of the StableLM family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    norm_kind: ClassVar[NormKind] = "layer"
    attention_output_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    classifier_dropout: Rate | None = None
    """Dropout rate of the hidden states that token classification reads. Defaults to the rate of
    the output of the feed-forward layer."""
    rope_fraction: RotatedFraction = 0.25
    """The fraction of each head's dimensions that is rotated: the first H · fraction dimensions."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the projections to queries, keys and values have biases."""
    normalize_heads: bool = False
    """Whether each head of queries and keys is normalized before it is rotated."""
    parallel_residual: bool = False
    """Whether both sublayers read the same normalized residual stream. If False, the sublayers run
    in sequence.
    """

    feed_forward_dropout: Rate | None = None
    """Dropout rate of the output of the feed-forward layer. Defaults to `dropout_rate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"d_head {self.d_head} must be d_model / num_heads in this family"
        require(self.num_heads * self.head_dim == self.d_model, problem)

    @property
    def query_key_norm(self) -> QueryKeyNorm | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How queries and keys are normalized, or None."""
        return "layer" if self.normalize_heads else None

    def residual_dropout_rate(self, sublayer: str) -> float:
        """Returns the dropout rate of the output of a sublayer."""
        if sublayer == "feed_forward" and self.feed_forward_dropout is not None:
            return self.feed_forward_dropout
        return self.dropout_rate

    @property
    def classifier_dropout_rate(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Dropout rate of the hidden states that token classification reads."""
        default = self.residual_dropout_rate("feed_forward")
        return default if self.classifier_dropout is None else self.classifier_dropout


class ParallelLayer(Layer[StableLMConfig]):
    """A layer that computes x + attention(norm(x)) + gated-feed-forward(norm(x)) with one norm."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Both sublayers read the same normalized input.
        normed = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(normed, attn)
        z = GatedFeedForward(c, e, c.init_std, name="feed_forward")(normed, attn.rng)
        x = self.add_parallel(x, y, z, attn.rng)
        return x, LayerOutputs(cache, weights)


class StableLM(CausalDecoder):
    """The StableLM model with its head."""

    config: StableLMConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def layer(self) -> type[Layer]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The class of the model's layers."""
        return ParallelLayer if self.config.parallel_residual else LlamaLayer


_preset = preset_maker(
    StableLMConfig,
    "Bellagente et al. 2024",
    ("num_layers", "d_model", "d_ff"),
    vocab_size=100_352,
    max_length=4096,
    num_heads=32,
)

PRESETS: dict[str, Preset] = {
    "stablelm2-1.6b": _preset("1.64B", (24, 2048, 5632), attention_bias=True),
    "stablelm2-12b": _preset(
        "12.1B",
        (40, 5120, 13_824),
        num_kv_heads=8,
        normalize_heads=True,
        parallel_residual=True,
    ),
    "stablelm-3b": _preset("2.8B", (32, 2560, 6912), paper="model card", vocab_size=50_304),
}

# fmt: off
NUM_PARAMETERS = {
    "stablelm2-1.6b": 1_644_515_328, "stablelm2-12b": 12_143_185_920,
    "stablelm-3b": 2_795_443_200,
}
# fmt: on

FAMILY = Family(
    config=StableLMConfig,
    module=StableLM,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={
        **EMBEDDING_AXES,
        **LAYER_AXES,
        **NORM_OF_HEADS_AXES,
        **FINAL_NORM_AXES,
        **HEAD_AXES,
    },
    hf_module="decoders.stablelm",
)
