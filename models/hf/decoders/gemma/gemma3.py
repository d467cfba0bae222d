"""Gemma 3, the text model, in Hugging Face's format."""

from .....data.common.json_text import JsonObject
from ....decoders.gemma.gemma3 import FULL_EVERY, Gemma3Config
from ...config_mapping import ConfigMapping, Field, FixedField, Settings
from ...generation_config import NAMES
from ...tensor_mapping import WeightsError
from ..causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    QUERY_KEY_NORMS,
    DecoderForm,
    rotary_to_hf,
    size_fields,
    take_rotary,
)
from .gemma2 import ACTIVATION, FOUR_NORMS, own_fields, take_windows


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the windows and the rotary base of windowed layers."""
    take_windows(fields, settings, source, num_layers=26, every=FULL_EVERY)
    # The base of windowed layers is a separate field, or a nested object in newer files.
    local: JsonObject = {}
    if (base := fields.pop("rope_local_base_freq", None)) is not None:
        local["rope_theta"] = base
    given = fields.get("rope_parameters")
    if isinstance(given, dict) and given.keys() & {"sliding_attention", "full_attention"}:
        if unknown := sorted(given.keys() - {"sliding_attention", "full_attention"}):
            raise WeightsError(
                f"{source}: rope_parameters {unknown[0]} is unknown: only full_attention and "
                "sliding_attention"
            )
        fields["rope_parameters"] = given.get("full_attention")
        local["rope_parameters"] = given.get("sliding_attention")
    rotary = take_rotary(local, source, default_base=10_000.0)
    if rotary.keys() != {"rope_type", "rope_theta"} or rotary["rope_type"] != "default":
        raise WeightsError(
            f"{source}: rotary scaling of sliding_attention, {rotary}, is not supported: only the "
            "type 'default'"
        )
    settings["windowed_rope_base"] = rotary["rope_theta"]


def _own_fields(config: Gemma3Config) -> JsonObject:
    local: JsonObject = {"rope_type": "default", "rope_theta": config.windowed_rope_base}
    rotary: JsonObject = {
        "full_attention": rotary_to_hf(config.rope_base, config.rope_scaling),
        "sliding_attention": local,
    }
    return {**own_fields(config), "rope_parameters": rotary}


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
            FixedField("attn_logit_softcapping", (None,)),
            FixedField("use_bidirectional_attention", (False, None)),
        ),
        ignored=NAMES | {"cache_implementation"},
    ),
    layer={**ATTENTION, **QUERY_KEY_NORMS, **FEED_FORWARD, **FOUR_NORMS},
    rope_base=1_000_000.0,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
)
MAPPING = FORM.mapping()
