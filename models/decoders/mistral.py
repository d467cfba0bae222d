"""Mistral: a Llama whose layers attend to a window of tokens.

Jiang et al. 2023, "Mistral 7B", section 2: sliding-window attention over 4,096 tokens (version 0.1;
later versions attend to all tokens), eight key/value heads, and Llama layers.
"""

import dataclasses

from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ..registry import Family, Preset, preset_maker
from .causal_decoder import CausalDecoder, WindowedDecoderConfig
from .llama import LlamaLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(WindowedDecoderConfig):
    """A decoder-only transformer of the Mistral family.

    Raises:
      UserError: a size or a rate is out of range.
    """


class Mistral(CausalDecoder):
    """The Mistral model with its head, built from Llama layers with an attention window."""

    layer = LlamaLayer


_preset = preset_maker(
    MistralConfig,
    "Jiang et al. 2023",
    vocab_size=32_000,
    max_length=32_768,
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    d_ff=14_336,
)

PRESETS: dict[str, Preset] = {
    "mistral-7b": _preset("7.24B", window=4096),
    "mistral-7b-v0.3": _preset("7.25B", paper="model card", vocab_size=32_768, rope_base=1e6),
    "mistral-nemo-12b": _preset(
        "12.2B",
        paper="model card",
        vocab_size=131_072,
        max_length=131_072,
        num_layers=40,
        d_model=5120,
        d_head=128,
        rope_base=1e6,
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "mistral-7b": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
}
# fmt: on

FAMILY = Family(
    config=MistralConfig,
    module=Mistral,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.mistral",
)
