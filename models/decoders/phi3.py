"""Phi-3: a Llama whose checkpoints store fewer, larger matrices.

Abdin et al. 2024, "Phi-3 technical report", section 2: the layer of a Llama. Versions for 128,000
tokens scale the rotary frequencies by LongRoPE; Phi-4-mini rotates three quarters of each head.
"""

import dataclasses
from typing import Any

from ..config import Settings
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..registry import Family, Preset
from .causal_decoder import CausalDecoder, WindowedDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(WindowedDecoderConfig):
    """A decoder-only transformer of the Phi-3 family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    @property
    def reread_length(self) -> int | None:
        """Returns the length beyond which the cache is recomputed (LongRoPE), or None.

        Keys cached before a sequence reaches this length were rotated with the factors of short
        sequences. The authors' code recomputes the cache as well.
        """
        scaling = self.rope_scaling
        return scaling.original_length if scaling and scaling.kind == "longrope" else None


class Phi3(CausalDecoder):
    """A Phi-3 with its head: the layers of a Llama."""

    layer = LlamaLayer


def _preset(published: str, paper: str = "Abdin et al. 2024a", **fields: Any) -> Preset:
    return Preset(Phi3Config(**{**_COMMON, **fields}), paper, published)


_COMMON: Settings = {"vocab_size": 32_064, "max_length": 4096, "window": 2047}

PRESETS: dict[str, Preset] = {
    "phi3-mini": _preset("3.8B", num_layers=32, d_model=3072, num_heads=32, d_ff=8192),
    "phi3-medium": _preset(
        "14B", num_layers=40, d_model=5120, num_heads=40, num_kv_heads=10, d_ff=17_920
    ),
    "phi4": _preset(
        "14B",
        "Abdin et al. 2024b",
        vocab_size=100_352,
        max_length=16_384,
        num_layers=40,
        d_model=5120,
        num_heads=40,
        num_kv_heads=10,
        d_ff=17_920,
        rope_base=250_000.0,
        window=None,
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "phi3-mini": 3_821_079_552, "phi3-medium": 13_960_238_080, "phi4": 14_659_507_200,
}
# fmt: on

FAMILY = Family(
    config=Phi3Config,
    module=Phi3,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.phi3",
)
