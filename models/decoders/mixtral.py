"""Mixtral: a Mistral whose feed-forward layers are mixtures of experts.

Jiang et al. 2024, "Mixtral of experts", section 2: two of eight experts process each token. Each
expert is the feed-forward layer of a Llama, and the weights of the two experts add up to 1. The
layers of Mixtral attend to all tokens.
"""

import dataclasses

import flax.linen as nn

from ...data.common.fields import NonNegative, Positive
from ..config import Depth, MixtureConfig
from ..nn.dropout import RowKeys
from ..nn.experts import Experts, RouterStatistics
from ..nn.layers import RMSNorm
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ..nn.typing import Array, Float, Int
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder, WindowedDecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureDecoderConfig(MixtureConfig, WindowedDecoderConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A decoder whose feed-forward layers are mixtures of experts.

    Raises:
      UserError: a size or a rate is out of range.
    """

    num_experts: Depth = 8  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of experts in each feed-forward layer, E."""
    router_balance: NonNegative = 0.001  # pyright: ignore[reportIncompatibleVariableOverride]
    """Coefficient of the loss that balances the experts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(MixtureDecoderConfig):
    """A decoder-only transformer of the Mixtral family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    rope_base: Positive = 1_000_000.0
    """Base of the rotary wavelengths (theta)."""


class MixtureLayer(Layer[MixtureDecoderConfig]):
    """A pre-norm layer of self-attention and a mixture of experts."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Attention reads a normalized copy of the residual stream. The stream itself is not
        # normalized.
        y = RMSNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(y, attn)
        x = self.add(x, y, "attention", attn.rng)

        # Each token passes through a few of the experts. The router's losses need the statistics.
        y = RMSNorm(c, e, name="feed_forward_norm")(x)
        y, router = self.feed_forward(y, inputs.index, context, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights, router=router)

    def feed_forward(
        self,
        y: Float[Array, "B T D"],
        layer: int | Int[Array, ""],
        context: LayerContext,
        rng: RowKeys | None,
    ) -> tuple[Float[Array, "B T D"], RouterStatistics]:
        """Returns the output of the experts, and the statistics of the router."""
        del layer
        c = self.config
        return Experts(c, self.execution, c.init_std, name="experts")(y, context.real, rng)


class Mixtral(CausalDecoder):
    """The Mixtral model with its head."""

    layer = MixtureLayer


_preset = preset_maker(
    MixtralConfig,
    "Jiang et al. 2024",
    ("num_layers", "d_model", "num_heads", "d_ff"),
    num_kv_heads=8,
)

PRESETS: dict[str, Preset] = {
    "mixtral-8x7b": _preset("46.7B", (32, 4096, 32, 14_336), vocab_size=32_000, max_length=32_768),
    "mixtral-8x22b": _preset(
        "141B", (56, 6144, 48, 16_384), paper="model card", vocab_size=32_768, max_length=65_536
    ),
}

NUM_PARAMETERS = {"mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296}

FAMILY = Family(
    config=MixtralConfig,
    module=Mixtral,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.mixtral",
)
