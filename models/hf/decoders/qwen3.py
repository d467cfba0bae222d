"""Qwen3 in the Hugging Face format."""

from ...decoders.qwen3 import Qwen3Config
from ..config_mapping import ConfigMapping, Field
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    QUERY_KEY_NORMS,
    DecoderForm,
    size_fields,
    take_late_windows,
    windows_to_hf,
)

FORM = DecoderForm(
    config=Qwen3Config,
    model_type="qwen3",
    classes=head_classes(Qwen3Config, "Qwen3"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=151_936,
                hidden_size=4096,
                intermediate_size=22_016,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
                max_position_embeddings=32_768,
                head_dim=128,
            ),
            Field("attention_bias", "attention_bias", False),
        ),
        ignored=NAMES,
    ),
    layer={**ATTENTION, **QUERY_KEY_NORMS, **FEED_FORWARD, **NORMS},
    own_settings=take_late_windows,
    own_fields=windows_to_hf,
)
MAPPING = FORM.mapping()
