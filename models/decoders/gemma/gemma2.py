"""Gemma 2: four norms per layer, capped attention scores, and a window in every other layer.

Gemma Team 2024, "Gemma 2: improving open language models at a practical size", section 2: layers
alternately attend to 4,096 tokens and to all tokens; tanh caps the attention scores and the logits;
both the input and the output of each sublayer are normalized; query heads share key/value heads.
Attention scores are divided by the square root of `score_divisor`, which differs from the head size
in the largest model.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn

from ....data.common.fields import Positive
from ...config import Activation, Size
from ...nn.layers import GatedFeedForward, RMSNorm
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ...nn.typing import Array, Float
from ...registry import Family, Preset, preset_maker
from ..causal_decoder import CausalDecoder, MixedDecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(MixedDecoderConfig):
    """A decoder-only transformer of the Gemma 2 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    norm_offset: ClassVar[float] = 1.0

    activation: Activation = "gelu_tanh"
    """Non-linearity of the gate in the feed-forward layers."""
    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published Gemma has them."""
    tie_output: bool = True
    """Whether the output projection shares its matrix with the token embedding."""
    score_divisor: Size = 256
    """Attention scores are divided by the square root of `score_divisor`."""
    score_cap: Positive | None = 50.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Cap of the attention scores: s becomes cap · tanh(s / cap). If None, scores are not
    capped."""
    logit_cap: Positive | None = 30.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Cap of the logits: z becomes cap · tanh(z / cap). If None, logits are not capped."""

    def score_scale(self, layer: int | Array) -> float:
        """Returns the attention scale, which is the same in every layer."""
        del layer
        return self.score_divisor**-0.5

    @property
    def embedding_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The factor that multiplies the token embeddings, √D."""
        return self.d_model**0.5

    @property
    def usual_full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens: every second layer."""
        return tuple(range(1, self.num_layers, 2))


class Gemma2Layer(Layer[Gemma2Config]):
    """A layer that normalizes the input and the output of both sublayers."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Each sublayer has two norms: one for its input, and one for its output before the residual
        # sum.
        y = RMSNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(y, attn)
        y = RMSNorm(c, e, name="attention_output_norm")(y)
        x = self.add(x, y, "attention", attn.rng)

        # The gated feed-forward layer is also between two norms.
        y = RMSNorm(c, e, name="feed_forward_norm")(x)
        y = GatedFeedForward(c, e, c.init_std, name="feed_forward")(y, attn.rng)
        y = RMSNorm(c, e, name="feed_forward_output_norm")(y)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights)


class Gemma2(CausalDecoder):
    """The Gemma 2 model with its head."""

    layer = Gemma2Layer


_preset = preset_maker(
    Gemma2Config, "Gemma Team 2024b", vocab_size=256_000, max_length=8192, d_head=256, window=4096
)

PRESETS: dict[str, Preset] = {
    "gemma2-2b": _preset(
        "2.6B", num_layers=26, d_model=2304, num_heads=8, num_kv_heads=4, d_ff=9216
    ),
    "gemma2-9b": _preset(
        "9.2B", num_layers=42, d_model=3584, num_heads=16, num_kv_heads=8, d_ff=14_336
    ),
    "gemma2-27b": _preset(
        "27.2B",
        num_layers=46,
        d_model=4608,
        num_heads=32,
        num_kv_heads=16,
        d_head=128,
        d_ff=36_864,
        score_divisor=144,
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320,
}
# fmt: on

FAMILY = Family(
    config=Gemma2Config,
    module=Gemma2,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gemma.gemma2",
)
