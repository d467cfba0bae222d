"""OLMo 3: an OLMo 2 with an attention window in three out of four layers.

OLMo Team 2025, "Olmo 3": layers attend to 4,096 tokens, but every fourth layer attends to all
tokens. For longer contexts, YaRN scales the rotary frequencies of the layers that attend to all
tokens.
"""

import dataclasses
from typing import ClassVar

from ...data.common.fields import Positive
from ..config import QueryKeyNorm
from ..nn.parameter_axes import (
    EMBEDDING_AXES,
    FINAL_NORM_AXES,
    HEAD_AXES,
    LAYER_AXES,
    NORM_OF_HEADS_AXES,
)
from ..registry import Family, Preset, preset_maker
from ..rotary_scaling import RotaryScaling
from .causal_decoder import CausalDecoder, MixedDecoderConfig
from .olmo2 import Olmo2Layer

FULL_EVERY = 4
"""Every fourth layer attends to all tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(MixedDecoderConfig):
    """A decoder-only transformer of the OLMo 3 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    query_key_norm: ClassVar[QueryKeyNorm | None] = "projection"

    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published OLMo has them."""
    rope_base: Positive = 500_000.0
    """Base of the rotary wavelengths in the layers that attend to all tokens."""
    windowed_rope_base: Positive = 500_000.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Base of the rotary wavelengths in the windowed layers. Their frequencies are never scaled."""

    @property
    def usual_full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens: every fourth layer."""
        return tuple(range(FULL_EVERY - 1, self.num_layers, FULL_EVERY))


class Olmo3(CausalDecoder):
    """The OLMo 3 model with its head, built from OLMo 2 layers."""

    layer = Olmo2Layer


_preset = preset_maker(
    Olmo3Config,
    "OLMo Team 2025",
    ("num_layers", "d_model", "num_heads", "d_ff"),
    vocab_size=100_278,
    max_length=65_536,
    window=4096,
    rope_scaling=RotaryScaling(kind="yarn", factor=8.0, original_length=8192),
)

PRESETS: dict[str, Preset] = {
    "olmo3-7b": _preset("7.3B", (32, 4096, 32, 11_008)),
    "olmo3-32b": _preset("32.2B", (64, 5120, 40, 27_648), num_kv_heads=8),
}

NUM_PARAMETERS = {"olmo3-7b": 7_298_011_136, "olmo3-32b": 32_233_522_176}

FAMILY = Family(
    config=Olmo3Config,
    module=Olmo3,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={
        **EMBEDDING_AXES,
        **LAYER_AXES,
        **NORM_OF_HEADS_AXES,
        **FINAL_NORM_AXES,
        **HEAD_AXES,
    },
    hf_module="decoders.olmo3",
)
