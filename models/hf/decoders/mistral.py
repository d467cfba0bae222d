"""Mistral in the Hugging Face format."""

from ....data.common.json_text import JsonObject
from ...decoders.mistral import MistralConfig
from ..config_mapping import ConfigMapping, Field, Settings
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import ATTENTION, FEED_FORWARD, NORMS, DecoderForm, size_fields


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the window; transformers defaults to 4,096, and null means no window."""
    del settings, source
    fields.setdefault("sliding_window", 4096)


FORM = DecoderForm(
    config=MistralConfig,
    model_type="mistral",
    classes=head_classes(MistralConfig, "Mistral"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                max_position_embeddings=131_072,
            ),
            Field("sliding_window", "window", None, kind=int),
        ),
        ignored=NAMES,
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    own_settings=_own_settings,
    generation_defaults={"bos_token_id": 1, "eos_token_id": 2},
)
MAPPING = FORM.mapping()
