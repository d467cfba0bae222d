"""OLMo 2: a Llama that normalizes the output of each sublayer instead of its input.

OLMo Team 2024, "2 OLMo 2 Furious", section 3: RMSNorm normalizes the outputs of attention and
feed-forward before the residual sum. It also normalizes the whole query and key projections, before
they are split into heads. The rotary base is 500,000.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn

from ...data.common.fields import Positive
from ..config import QueryKeyNorm
from ..nn.layers import GatedFeedForward, RMSNorm
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(CausalDecoderConfig):
    """A decoder-only transformer of the OLMo 2 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    query_key_norm: ClassVar[QueryKeyNorm | None] = "projection"

    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    rope_base: Positive = 500_000.0
    """Base of the rotary wavelengths (theta)."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published OLMo has them."""


class Olmo2Layer(Layer[CausalDecoderConfig]):
    """A layer that normalizes the outputs of self-attention and of a gated feed-forward block."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Attention reads the residual stream itself; its output is normalized before the sum.
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(x, attn)
        y = RMSNorm(c, e, name="attention_output_norm")(y)
        x = self.add(x, y, "attention", attn.rng)

        # The gated feed-forward layer also reads the stream itself, and its output is normalized.
        y = GatedFeedForward(c, e, c.init_std, name="feed_forward")(x, attn.rng)
        y = RMSNorm(c, e, name="feed_forward_output_norm")(y)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights)


class Olmo2(CausalDecoder):
    """The OLMo 2 model with its head."""

    layer = Olmo2Layer


_preset = preset_maker(
    Olmo2Config,
    "OLMo Team 2024",
    ("num_layers", "d_model", "num_heads", "d_ff"),
    vocab_size=100_352,
    max_length=4096,
)

PRESETS: dict[str, Preset] = {
    "olmo2-1b": _preset("1.48B", (16, 2048, 16, 8192)),
    "olmo2-7b": _preset("7.3B", (32, 4096, 32, 11_008)),
    "olmo2-13b": _preset("13.7B", (40, 5120, 40, 13_824)),
    "olmo2-32b": _preset("32.2B", (64, 5120, 40, 27_648), num_kv_heads=8),
}

# fmt: off
NUM_PARAMETERS = {
    "olmo2-1b": 1_484_916_736, "olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
}
# fmt: on

FAMILY = Family(
    config=Olmo2Config,
    module=Olmo2,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={
        **EMBEDDING_AXES,
        **LAYER_AXES,
        **NORM_OF_HEADS_AXES,
        **FINAL_NORM_AXES,
        **HEAD_AXES,
    },
    hf_module="decoders.olmo2",
)
