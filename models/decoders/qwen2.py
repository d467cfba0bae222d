"""Qwen2: a Llama with biases in the projections to queries, keys and values.

- Yang et al. 2024, "Qwen2 technical report", section 2.2: grouped key/value heads, biases in the
  query, key and value projections, and a rotary base of 1,000,000; small models tie the output
  projection to the token embedding.
- Qwen2.5 (Yang et al. 2024, "Qwen2.5 technical report") has the same layers in other sizes.
"""

import dataclasses
from typing import ClassVar

from ...data.common.fields import Positive
from ..config import Settings
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder, MixedDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(MixedDecoderConfig):
    """A decoder-only transformer of the Qwen2 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    attention_bias: ClassVar[bool] = True
    attention_output_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    rope_base: Positive = 1_000_000.0
    """Base of the rotary wavelengths (theta)."""


class Qwen2(CausalDecoder):
    """The Qwen2 model with its head, built from Llama layers with biases."""

    layer = LlamaLayer


_preset = preset_maker(
    Qwen2Config,
    "Yang et al. 2024a",
    ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff"),
    max_length=32_768,
)

_SMALL: Settings = {"vocab_size": 151_936, "tie_output": True}
_LARGE: Settings = {"vocab_size": 152_064}
_NEXT = "Yang et al. 2024b"

PRESETS: dict[str, Preset] = {
    "qwen2-0.5b": _preset("0.49B", (24, 896, 14, 2, 4864), **_SMALL),
    "qwen2-1.5b": _preset("1.54B", (28, 1536, 12, 2, 8960), **_SMALL),
    "qwen2-7b": _preset("7.62B", (28, 3584, 28, 4, 18_944), **_LARGE),
    "qwen2-72b": _preset("72.7B", (80, 8192, 64, 8, 29_568), **_LARGE),
    "qwen2.5-3b": _preset("3.09B", (36, 2048, 16, 2, 11_008), paper=_NEXT, **_SMALL),
    "qwen2.5-14b": _preset("14.7B", (48, 5120, 40, 8, 13_824), paper=_NEXT, **_LARGE),
    "qwen2.5-32b": _preset("32.5B", (64, 5120, 40, 8, 27_648), paper=_NEXT, **_LARGE),
}

# fmt: off
NUM_PARAMETERS = {
    "qwen2-0.5b": 494_032_768, "qwen2-1.5b": 1_543_714_304, "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648, "qwen2.5-3b": 3_085_938_688, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
}
# fmt: on

FAMILY = Family(
    config=Qwen2Config,
    module=Qwen2,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.qwen2",
)
