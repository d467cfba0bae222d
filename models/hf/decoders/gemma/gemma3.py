"""Gemma 3, the text model, in the Hugging Face format."""

from .....data.common.json_text import JsonObject
from ....decoders.gemma.gemma3 import FULL_EVERY, Gemma3Config
from ...config_mapping import ConfigMapping, Field, Settings, take_field
from ...generation_config import NAMES
from ..causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    QUERY_KEY_NORMS,
    DecoderForm,
    size_fields,
)
from ..rotary import rotary_by_layers_to_hf, take_windowed_base
from .gemma2 import ACTIVATION, FOUR_NORMS, own_fields, take_windows


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the windows and the rotary base of windowed layers."""
    take_windows(fields, settings, source, num_layers=26, every=FULL_EVERY)
    bidirectional = take_field(fields, "use_bidirectional_attention", None, source, kind=bool)
    settings["causal"] = not bidirectional
    # For windows on both sides of a token, files state the whole width. Half of the width is on
    # either side.
    if not settings["causal"] and "window" in settings:
        settings["window"] = settings["window"] // 2 + 1
    # The base of windowed layers is a separate field, or a nested object in newer files.
    local: JsonObject = {"rope_theta": fields.pop("rope_local_base_freq", None)}
    base = take_windowed_base(fields, local, source, default_base=10_000.0)
    settings["windowed_rope_base"] = base


def _own_fields(config: Gemma3Config) -> JsonObject:
    fields = {**own_fields(config), "rope_parameters": rotary_by_layers_to_hf(config)}
    if not config.causal:
        fields["use_bidirectional_attention"] = True
    if not config.causal and config.window is not None:
        fields["sliding_window"] = 2 * (config.window - 1)
    return fields


FORM = DecoderForm(
    config=Gemma3Config,
    model_type="gemma3_text",
    classes={
        "causal_lm": "Gemma3ForCausalLM",
        "none": "Gemma3TextModel",
        "sequence_classification": "Gemma3TextForSequenceClassification",
    },
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=262_208,
                hidden_size=2304,
                intermediate_size=9216,
                num_hidden_layers=26,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=131_072,
                head_dim=256,
                tie_word_embeddings=True,
                activation=ACTIVATION,
            ),
            Field("attention_bias", "attention_bias", False),
            Field("query_pre_attn_scalar", "score_divisor", 256),
            Field("final_logit_softcapping", "logit_cap", None, kind=float),
        ),
        # transformers does not read `attn_logit_softcapping` in this family.
        ignored=NAMES | {"cache_implementation", "attn_logit_softcapping"},
    ),
    layer={**ATTENTION, **QUERY_KEY_NORMS, **FEED_FORWARD, **FOUR_NORMS},
    rope_base=1_000_000.0,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
)
MAPPING = FORM.mapping()
