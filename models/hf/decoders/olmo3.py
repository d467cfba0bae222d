"""OLMo 3 in the Hugging Face format."""

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...decoders.olmo3 import FULL_EVERY, Olmo3Config
from ..config_mapping import ConfigMapping, Field, Settings, typed_field
from ..generation_config import NAMES
from ..tensors.mapping import WeightsError
from .causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    QUERY_KEY_NORMS,
    DecoderForm,
    layer_types_to_hf,
    set_windows,
    take_layer_types,
)
from .olmo2 import OUTPUT_NORMS, SIZES
from .rotary import KINDS_OF_LAYERS, rotary_by_layers_to_hf, take_windowed_base

WINDOW = 4096
"""The window that transformers assumes if a file states no window."""
BASE = 500_000.0
"""The base of rotary positions that transformers assumes if a file states no base."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the windows, and the rotary base of windowed layers."""
    number = typed_field(fields, "num_hidden_layers", 32, source)
    window = fields.pop("sliding_window", WINDOW)
    windowed = take_layer_types(fields, number, source)
    if windowed is None:
        windowed = [bool((i + 1) % FULL_EVERY) for i in range(number)]
    if window is not None:
        set_windows(settings, window, windowed, source)
    # transformers ignores rotary fields that are not given for each kind of layer.
    given = fields.get("rope_parameters")
    require(
        not isinstance(given, dict) or given.keys() & KINDS_OF_LAYERS,
        f"{source}: rope_parameters {given!r} must have {' and '.join(KINDS_OF_LAYERS)}",
        WeightsError,
    )
    # Older files have one base for all layers.
    local: JsonObject = {"rope_theta": fields.get("rope_theta")}
    base = take_windowed_base(fields, local, source, default_base=BASE)
    settings["windowed_rope_base"] = base


def _own_fields(config: Olmo3Config) -> JsonObject:
    full: list[JsonValue] = ["full_attention"] * config.num_layers
    return {
        # transformers builds a window mask even if no layer uses it, so write a number.
        "sliding_window": config.window or WINDOW,
        "layer_types": layer_types_to_hf(config) if config.window else full,
        "rope_parameters": rotary_by_layers_to_hf(config),
    }


FORM = DecoderForm(
    config=Olmo3Config,
    model_type="olmo3",
    # transformers has no class for token classification in this family.
    classes={
        "causal_lm": "Olmo3ForCausalLM",
        "none": "Olmo3Model",
        "sequence_classification": "Olmo3ForSequenceClassification",
    },
    fields=ConfigMapping((*SIZES, Field("attention_bias", "attention_bias", False)), ignored=NAMES),
    layer={**ATTENTION, **QUERY_KEY_NORMS, **FEED_FORWARD, **OUTPUT_NORMS},
    rope_base=BASE,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"pad_token_id": 1, "eos_token_id": 50_279},
)
MAPPING = FORM.mapping()
