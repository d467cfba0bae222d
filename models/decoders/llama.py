"""Llama: decoder-only transformers with pre-norm, rotary positions and gated feed-forward layers.

- LLaMA: Touvron et al. 2023, "LLaMA: open and efficient foundation language models", section 2.2.
  LLaMA has RMSNorm before each sublayer (as in GPT-3), a feed-forward layer of width 2/3 · 4 D
  gated by silu (as in PaLM), rotary positions (as in GPT-NeoX), and no biases.
- Llama 2: Touvron et al. 2023, "Llama 2: open foundation and fine-tuned chat models", section 2.2.
  In the largest model several query heads share a key/value head.
- Llama 3: Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.2. Llama 3 has a
  vocabulary of 128,256 tokens, and a larger base for the rotary wavelengths. From Llama 3.1 on,
  rotary frequencies are scaled for longer contexts.
"""

import dataclasses

import flax.linen as nn

from ...data.common.fields import Positive
from ..config import Settings, Size
from ..nn.layers import NORMS, GatedFeedForward
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ..nn.typing import Array, Float
from ..registry import Family, Preset, preset_maker
from ..rotary_scaling import RotaryScaling
from .causal_decoder import CausalDecoder, CausalDecoderConfig

WIDTH_MULTIPLE = 256
"""The authors round the width of feed-forward layers up to a multiple of 256."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(CausalDecoderConfig):
    """A decoder-only transformer of the Llama family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    d_ff: Size | None = None
    """Width of the feed-forward layer, F. Defaults to 8/3 D, rounded up to a multiple of 256."""
    norm_eps: Positive = 1e-5
    """Constant added to the mean square in normalization; 1e-6 in the first Llama."""
    rope_base: Positive = 10_000.0
    """Base of the rotary wavelengths (theta); 500,000 in Llama 3."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published Llama has them."""
    use_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the linear maps of the feed-forward layer have biases; no published Llama has
    them."""

    @property
    def feed_forward_dim(self) -> int:
        """Width of the feed-forward layer, F."""
        if self.d_ff is not None:
            return self.d_ff
        # Negating twice rounds up: -(-a // b) is ceil(a / b).
        return -(-(8 * self.d_model // 3) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class LlamaLayer(Layer[CausalDecoderConfig]):
    """A pre-norm layer of self-attention with rotary positions and a gated feed-forward block."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn, norm = context.self_attention(inputs), NORMS[c.norm_kind]

        # Attention reads a normalized copy of the residual stream. The stream itself is not
        # normalized.
        y = norm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(y, attn)
        x = self.add(x, y, "attention", attn.rng)

        # The gated feed-forward block applies the same map to every token.
        y = norm(c, e, name="feed_forward_norm")(x)
        y = GatedFeedForward(c, e, c.init_std, name="feed_forward")(y, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights)


class Llama(CausalDecoder):
    """The Llama model with its head: a token embedding, layers, a final norm, and the head."""

    layer = LlamaLayer


_preset = preset_maker(LlamaConfig, "model card", ("num_layers", "d_model", "num_heads"))

_LLAMA, _LLAMA_2 = "Touvron et al. 2023a", "Touvron et al. 2023b"
_LLAMA_3 = "Grattafiori et al. 2024"
_FIRST: Settings = {"vocab_size": 32_000, "max_length": 2048, "norm_eps": 1e-6}
_SECOND: Settings = {"vocab_size": 32_000, "max_length": 4096}
_THIRD: Settings = {
    "vocab_size": 128_256,
    "max_length": 8192,
    "num_kv_heads": 8,
    "rope_base": 500_000.0,
}

_LONGER: Settings = {
    **_THIRD,
    "max_length": 131_072,
    "rope_scaling": RotaryScaling(kind="llama3", factor=8.0, original_length=8192),
}
_SMALLER: Settings = {
    **_LONGER,
    "rope_scaling": RotaryScaling(kind="llama3", factor=32.0, original_length=8192),
}

PRESETS: dict[str, Preset] = {
    "llama-7b": _preset("6.7B", (32, 4096, 32), paper=_LLAMA, **_FIRST),
    "llama-13b": _preset("13.0B", (40, 5120, 40), paper=_LLAMA, **_FIRST),
    "llama-33b": _preset("32.5B", (60, 6656, 52), paper=_LLAMA, **_FIRST),
    "llama-65b": _preset(
        "65.2B",
        (80, 8192, 64),
        note="table 2 says 65.2B, computed from its sizes: 65.3B",
        paper=_LLAMA,
        **_FIRST,
    ),
    "llama2-7b": _preset("7B", (32, 4096, 32), paper=_LLAMA_2, **_SECOND),
    "llama2-13b": _preset("13B", (40, 5120, 40), paper=_LLAMA_2, **_SECOND),
    "llama2-70b": _preset(
        "70B",
        (80, 8192, 64),
        note="the paper says 70B, computed from its sizes: 69B",
        paper=_LLAMA_2,
        num_kv_heads=8,
        d_ff=28_672,
        **_SECOND,
    ),
    "llama3-8b": _preset("8B", (32, 4096, 32), paper=_LLAMA_3, d_ff=14_336, **_THIRD),
    "llama3-70b": _preset(
        "70B",
        (80, 8192, 64),
        note="the paper says 70B, computed from its sizes: 71B",
        paper=_LLAMA_3,
        d_ff=28_672,
        **_THIRD,
    ),
    "llama3.1-8b": _preset("8B", (32, 4096, 32), paper=_LLAMA_3, d_ff=14_336, **_LONGER),
    "llama3.1-70b": _preset(
        "70B",
        (80, 8192, 64),
        note="the paper says 70B, computed from its sizes: 71B",
        paper=_LLAMA_3,
        d_ff=28_672,
        **_LONGER,
    ),
    "llama3.2-1b": _preset(
        "1.23B",
        (16, 2048, 32),
        note="the card says 1.23B, computed from its sizes: 1.24B",
        d_ff=8192,
        tie_output=True,
        **_SMALLER,
    ),
    "llama3.2-3b": _preset("3.21B", (28, 3072, 24), d_ff=8192, tie_output=True, **_SMALLER),
}

# fmt: off
NUM_PARAMETERS = {
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}
# fmt: on

FAMILY = Family(
    config=LlamaConfig,
    module=Llama,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.llama",
)
