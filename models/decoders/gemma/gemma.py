"""Gemma: a Llama with wide heads, scaled embeddings, and GELU in its gates.

Gemma Team 2024, "Gemma: open models based on Gemini research and technology", section 2: heads of
size 256, one key/value head in the smaller model, GeGLU feed-forward layers, RMSNorm, and an output
projection tied to the token embedding. As in the published code, embeddings are multiplied by √D,
and norms store their scale minus 1.
"""

import dataclasses
from typing import ClassVar

from ....data.common.fields import Positive
from ...config import Activation
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...registry import Family, Preset, preset_maker
from ..causal_decoder import CausalDecoder, CausalDecoderConfig
from ..llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(CausalDecoderConfig):
    """A decoder-only transformer of the first Gemma family.

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

    @property
    def embedding_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The factor that multiplies the token embeddings, √D."""
        return self.d_model**0.5


class Gemma(CausalDecoder):
    """The Gemma model with its head, built from Llama layers."""

    layer = LlamaLayer


_preset = preset_maker(GemmaConfig, "Gemma Team 2024a", vocab_size=256_000, max_length=8192)

PRESETS: dict[str, Preset] = {
    "gemma-2b": _preset(
        "2.5B", num_layers=18, d_model=2048, num_heads=8, num_kv_heads=1, d_ff=16_384
    ),
    "gemma-7b": _preset("8.5B", num_layers=28, d_model=3072, num_heads=16, d_head=256, d_ff=24_576),
}

NUM_PARAMETERS = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}

FAMILY = Family(
    config=GemmaConfig,
    module=Gemma,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gemma.gemma",
)
