"""Qwen2 in the Hugging Face format."""

from ...decoders.qwen2 import Qwen2Config
from ..config_mapping import ConfigMapping
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    DecoderForm,
    size_fields,
    take_late_windows,
    windows_to_hf,
)

FORM = DecoderForm(
    config=Qwen2Config,
    model_type="qwen2",
    classes=head_classes(Qwen2Config, "Qwen2"),
    fields=ConfigMapping(
        size_fields(
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=22_016,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=32_768,
        ),
        ignored=NAMES | {"use_mrope"},  # transformers does not use these fields either
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    own_settings=take_late_windows,
    own_fields=windows_to_hf,
)
MAPPING = FORM.mapping()
