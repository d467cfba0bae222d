"""RoBERTa-PreLayerNorm: a RoBERTa that normalizes the inputs of its sublayers.

Ott et al. 2019, "fairseq: a fast, extensible toolkit for sequence modeling" (its option
`encoder_normalize_before`). Wettig et al. 2023, "Should you mask 15% in masked language modeling?",
published a RoBERTa-PreLayerNorm for each masking rate. The model also normalizes the sum of the
embeddings and the output of the last layer.
"""

import dataclasses

import flax.linen as nn

from ..nn.layers import FeedForward, LayerNorm
from ..nn.parameter_axes import FINAL_NORM_AXES
from ..nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ..nn.typing import Array, Float
from ..registry import Family, Preset
from .encoder import ENCODER_AXES, EncoderConfig, smallest_inputs
from .roberta import RoBERTa, RobertaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaPreLayerNormConfig(RobertaConfig):
    """The configuration of a RoBERTa-PreLayerNorm and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """


class PreNormLayer(Layer[EncoderConfig]):
    """A layer of self-attention and feed-forward, which normalizes the input of each sublayer."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention; only a causal model has a cache.
        y = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(y, attn)
        x = self.add(x, y, "attention", attn.rng)

        # The feed-forward block applies the same map to every token.
        y = LayerNorm(c, e, name="feed_forward_norm")(x)
        y = FeedForward(c, e, c.init_std, name="feed_forward")(y, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights)


class RoBERTaPreLayerNorm(RoBERTa):
    """The RoBERTa-PreLayerNorm model with its head."""

    layer = PreNormLayer

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the normalized output of the last layer."""
        return LayerNorm(self.config, self.execution, name="final_norm")(x)


PRESETS: dict[str, Preset] = {
    "roberta-prelayernorm-large": Preset(
        RobertaPreLayerNormConfig(
            vocab_size=50_265, max_length=512, num_layers=24, d_model=1024, num_heads=16
        ),
        "Wettig et al. 2023",
        "355M",
    )
}

FAMILY = Family(
    config=RobertaPreLayerNormConfig,
    module=RoBERTaPreLayerNorm,
    presets=PRESETS,
    num_parameters={"roberta-prelayernorm-large": 355_414_105},
    smallest_inputs=smallest_inputs,
    parameter_axes={**ENCODER_AXES, **FINAL_NORM_AXES},
    hf_module="encoders.roberta_prelayernorm",
)
