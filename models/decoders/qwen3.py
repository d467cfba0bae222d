"""Qwen3: a Llama that normalizes each query and each key.

Yang et al. 2025, "Qwen3 technical report", section 2: RMSNorm normalizes each head of the queries
and keys before they are rotated, and replaces Qwen2's biases; heads have size 128 for every width.

Zhang et al. 2025, "Qwen3 Embedding": embedding models with the same architecture, which use the
last hidden state as the vector of a text, and rerankers that answer "yes" or "no"
(`models.YesNoScorer`).
"""

import dataclasses
from typing import ClassVar

from ...data.common.fields import Positive
from ..config import QueryKeyNorm, Settings
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder, MixedDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(MixedDecoderConfig):
    """A decoder-only transformer of the Qwen3 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    query_key_norm: ClassVar[QueryKeyNorm | None] = "head"

    norm_eps: Positive = 1e-6
    """Constant added to the mean square in normalization."""
    rope_base: Positive = 1_000_000.0
    """Base of the rotary wavelengths (theta)."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the four attention projections have biases; no published Qwen3 has them."""


class Qwen3(CausalDecoder):
    """The Qwen3 model with its head, built from Llama layers with query and key normalization."""

    layer = LlamaLayer


_preset = preset_maker(
    Qwen3Config,
    "Yang et al. 2025",
    ("num_layers", "d_model", "num_heads", "d_ff"),
    vocab_size=151_936,
    max_length=40_960,
    num_kv_heads=8,
    d_head=128,
)
_EMBEDDER: Settings = {"tie_output": True, "paper": "Zhang et al. 2025"}
_RERANKER: Settings = {"vocab_size": 151_669, "paper": "Zhang et al. 2025"}


PRESETS: dict[str, Preset] = {
    "qwen3-0.6b": _preset("0.6B", (28, 1024, 16, 3072), tie_output=True),
    "qwen3-1.7b": _preset("1.7B", (28, 2048, 16, 6144), tie_output=True),
    "qwen3-4b": _preset("4.0B", (36, 2560, 32, 9728), tie_output=True),
    "qwen3-8b": _preset("8.2B", (36, 4096, 32, 12_288)),
    "qwen3-14b": _preset("14.8B", (40, 5120, 40, 17_408)),
    "qwen3-32b": _preset("32.8B", (64, 5120, 64, 25_600)),
    "qwen3-embedding-0.6b": _preset(
        "0.6B", (28, 1024, 16, 3072), vocab_size=151_669, max_length=32_768, **_EMBEDDER
    ),
    "qwen3-embedding-4b": _preset("4B", (36, 2560, 32, 9728), vocab_size=151_665, **_EMBEDDER),
    "qwen3-embedding-8b": _preset("8B", (36, 4096, 32, 12_288), vocab_size=151_665, **_EMBEDDER),
    "qwen3-reranker-0.6b": _preset("0.6B", (28, 1024, 16, 3072), tie_output=True, **_RERANKER),
    "qwen3-reranker-4b": _preset("4B", (36, 2560, 32, 9728), tie_output=True, **_RERANKER),
    "qwen3-reranker-8b": _preset("8B", (36, 4096, 32, 12_288), **_RERANKER),
}

# fmt: off
NUM_PARAMETERS = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-embedding-0.6b": 595_776_512, "qwen3-embedding-4b": 4_021_774_336,
    "qwen3-embedding-8b": 7_567_295_488, "qwen3-reranker-0.6b": 595_776_512,
    "qwen3-reranker-4b": 4_021_784_576, "qwen3-reranker-8b": 8_188_548_096,
}
# fmt: on

FAMILY = Family(
    config=Qwen3Config,
    module=Qwen3,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.qwen3",
)
