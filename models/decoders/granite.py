"""Granite 3: a Llama that scales embeddings, attention scores, sublayer outputs and logits.

Granite Team 2024, "Granite 3.0 language models", section 3. The factors follow the maximal update
parametrization (Yang et al. 2022), which makes the size of activations independent of the width.
"""

import dataclasses

from ...data.common.fields import Positive
from ..config import Settings
from ..nn.dropout import RowKeys
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..nn.typing import Array, Float
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder, CausalDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(CausalDecoderConfig):
    """A decoder-only transformer of the Granite family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    embedding_scale: Positive = 12.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """The factor that multiplies the token embeddings."""
    attention_scale: Positive = 1 / 64
    """The attention scale, which replaces 1 / √H."""
    residual_scale: Positive = 0.22
    """The factor that multiplies the output of each sublayer before the residual sum."""
    logit_divisor: Positive = 8.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """The logits are divided by this value."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published Granite 3 has them."""
    use_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the linear maps of the feed-forward layer have biases; no published Granite 3 has
    them."""
    tie_output: bool = True
    """Whether the output projection shares its matrix with the token embedding."""

    def score_scale(self, layer: int | Array) -> float:
        """Returns the attention scale, which is the same in every layer."""
        del layer
        return self.attention_scale


class GraniteLayer(LlamaLayer):
    """A Llama layer that multiplies the output of each sublayer by a constant."""

    config: GraniteConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def add(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], name: str, rng: RowKeys | None
    ) -> Float[Array, "B T D"]:
        """Returns the sum of the residual stream and the scaled output of a sublayer."""
        return super().add(x, y * self.config.residual_scale, name, rng)


class Granite(CausalDecoder):
    """The Granite model with its head."""

    layer = GraniteLayer


_preset = preset_maker(
    GraniteConfig, "Granite Team 2024", num_layers=40, num_heads=32, num_kv_heads=8
)
_SMALL: Settings = {"d_model": 2048, "d_ff": 8192}
_LARGE: Settings = {
    **{"d_model": 4096, "d_ff": 12_800},
    **{"attention_scale": 1 / 128, "logit_divisor": 16.0},
}
_FIRST: Settings = {"vocab_size": 49_155, "max_length": 4096}
_LATER: Settings = {"vocab_size": 49_159, "max_length": 131_072, "rope_base": 1e7}
_EIGHT = "the card says 8.1B, computed from its sizes: 8.2B"

PRESETS: dict[str, Preset] = {
    "granite3.0-2b": _preset("2.5B", **_SMALL, **_FIRST),
    "granite3.0-8b": _preset("8.1B", note=_EIGHT, **_LARGE, **_FIRST),
    "granite3.3-2b": _preset("2.5B", **_SMALL, **_LATER),
    "granite3.3-8b": _preset("8.1B", note=_EIGHT, **_LARGE, **_LATER),
}

# fmt: off
NUM_PARAMETERS = {
    "granite3.0-2b": 2_533_531_648, "granite3.0-8b": 8_170_848_256,
    "granite3.3-2b": 2_533_539_840, "granite3.3-8b": 8_170_864_640,
}
# fmt: on

FAMILY = Family(
    config=GraniteConfig,
    module=Granite,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.granite",
)
