"""SmolLM3: a Llama without positions in every fourth layer.

Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; Yang et al. 2025, "Rope
to nope and back again: a new hybrid attention strategy". The other layers have rotary positions.
"""

import dataclasses

from ...data.common.fields import Positive
from ..config import require_layers
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..registry import Family, Preset
from .causal_decoder import CausalDecoder, MixedDecoderConfig
from .llama import LlamaLayer

UNROTATED_EVERY = 4
"""Every fourth layer has no positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(MixedDecoderConfig):
    """A decoder-only transformer of the SmolLM3 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    rope_base: Positive = 5_000_000.0
    """Base of the rotary wavelengths (theta)."""
    layers_without_positions: tuple[int, ...] | None = None
    """Zero-based indices of the layers that do not rotate queries and keys. If None, every fourth
    layer does not rotate them.
    """
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published SmolLM has them."""
    use_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the linear maps of the feed-forward layer have biases; no published SmolLM has
    them."""
    tie_output: bool = True
    """Whether the output projection shares its matrix with the token embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "layers_without_positions"
        require_layers(name, self.layers_without_positions, self.num_layers)

    @property
    def unrotated_layers(self) -> tuple[bool, ...]:
        """Whether each layer leaves queries and keys unrotated."""
        unrotated = self.layers_without_positions
        if unrotated is None:
            unrotated = range(UNROTATED_EVERY - 1, self.num_layers, UNROTATED_EVERY)
        return tuple(i in unrotated for i in range(self.num_layers))

    @property
    def usual_full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens: every layer that has positions."""
        return tuple(i for i, unrotated in enumerate(self.unrotated_layers) if not unrotated)


class SmolLM3(CausalDecoder):
    """The SmolLM3 model with its head, built from Llama layers."""

    layer = LlamaLayer


PRESETS: dict[str, Preset] = {
    "smollm3-3b": Preset(
        SmolLM3Config(
            vocab_size=128_256,
            max_length=65_536,
            num_layers=36,
            d_model=2048,
            num_heads=16,
            num_kv_heads=4,
            d_ff=11_008,
        ),
        "Bakouch et al. 2025",
        "3.08B",
    ),
}

NUM_PARAMETERS = {"smollm3-3b": 3_075_098_624}

FAMILY = Family(
    config=SmolLM3Config,
    module=SmolLM3,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.smollm3",
)
