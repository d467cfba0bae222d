"""Gemma 3: the Gemma 2 layer with normalized queries and keys, and with two rotary bases.

Gemma Team 2025, "Gemma 3 technical report", section 2: five windowed layers for each layer that
attends to all tokens. The rotary base is 10,000 in windowed layers and 1,000,000 in the other
layers, where the frequencies are scaled for longer contexts. Query and key normalization replaces
the cap of the attention scores. The vision encoder of the larger models is not implemented.

Vera et al. 2025, "EmbeddingGemma: powerful and lightweight text representations", section 2: a
Gemma 3 whose tokens also attend to later tokens. In an EmbeddingGemma, two linear maps follow the
pooling; separate files in the model's folder store these maps (`models/hf/sentence_embedding.py`).
"""

import dataclasses
from typing import ClassVar

from ....data.common.fields import Positive
from ...config import QueryKeyNorm
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...registry import Family, Preset, preset_maker
from ...rotary_scaling import RotaryScaling
from ..causal_decoder import CausalDecoder
from .gemma2 import Gemma2Config, Gemma2Layer

FULL_EVERY = 6
"""Every sixth layer attends to all tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """A decoder-only transformer of the Gemma 3 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    query_key_norm: ClassVar[QueryKeyNorm | None] = "head"
    score_cap: ClassVar[float | None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    causal: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a token attends only to itself and earlier tokens. If False, a token attends to all
    tokens or, in windowed layers, to all tokens at a distance below `window` (EmbeddingGemma). A
    model with `causal` set to False embeds texts and cannot generate text.
    """
    rope_base: Positive = 1_000_000.0
    """Base of the rotary wavelengths in the layers that attend to all tokens."""
    windowed_rope_base: Positive = 10_000.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Base of the rotary wavelengths in the windowed layers. Their frequencies are never scaled."""
    logit_cap: Positive | None = None
    """Cap of the logits: z becomes cap · tanh(z / cap). If None, as in every published Gemma 3,
    logits are not capped."""

    @property
    def usual_full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens: every sixth layer."""
        return tuple(range(FULL_EVERY - 1, self.num_layers, FULL_EVERY))


class Gemma3(CausalDecoder):
    """The Gemma 3 model with its head: Gemma 2 layers with normalized queries and keys."""

    layer = Gemma2Layer


_preset = preset_maker(
    Gemma3Config,
    "Gemma Team 2025",
    vocab_size=262_208,
    max_length=131_072,
    d_head=256,
    window=1024,
    rope_scaling=RotaryScaling(kind="linear", factor=8.0),
)
_TEXT = "without the vision encoder of 417M"

PRESETS: dict[str, Preset] = {
    "gemma3-1b": _preset(
        "1.0B",
        vocab_size=262_144,
        max_length=32_768,
        num_layers=26,
        d_model=1152,
        num_heads=4,
        num_kv_heads=1,
        d_ff=6912,
        window=512,
        rope_scaling=None,
    ),
    "gemma3-4b": _preset(
        "3.9B", note=_TEXT, num_layers=34, d_model=2560, num_heads=8, num_kv_heads=4, d_ff=10_240
    ),
    "gemma3-12b": _preset(
        "11.8B", note=_TEXT, num_layers=48, d_model=3840, num_heads=16, num_kv_heads=8, d_ff=15_360
    ),
    "gemma3-27b": _preset(
        "27.0B",
        note=_TEXT,
        num_layers=62,
        d_model=5376,
        num_heads=32,
        num_kv_heads=16,
        d_head=128,
        d_ff=21_504,
        score_divisor=168,
    ),
    "embeddinggemma-300m": Preset(
        Gemma3Config(
            vocab_size=262_144,
            max_length=2048,
            num_layers=24,
            d_model=768,
            num_heads=3,
            num_kv_heads=1,
            d_ff=1152,
            # A distance below 257 covers 256 tokens on either side.
            window=257,
            causal=False,
        ),
        "Vera et al. 2025",
        "308M",
        "303M, and 5M in the linear maps of its folder",
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304, "embeddinggemma-300m": 302_863_104,
}
# fmt: on

FAMILY = Family(
    config=Gemma3Config,
    module=Gemma3,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gemma.gemma3",
)
