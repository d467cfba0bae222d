"""SmolLM3 in the Hugging Face format."""

from typing import Literal

from ....data.common.fields import PositiveInt, require
from ....data.common.json_text import JsonObject, JsonValue
from ...decoders.smollm3 import UNROTATED_EVERY, SmolLM3Config
from ..config_mapping import ConfigMapping, Field, Settings, take_field, typed_field
from ..form import head_classes
from ..generation_config import NAMES
from ..tensors.mapping import WeightsError
from .causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    DecoderForm,
    set_windows,
    size_fields,
    take_layer_types,
    windows_to_hf,
)


def _rotated_layers(fields: JsonObject, num_layers: int, source: str) -> list[bool]:
    """Removes the fields that list rotary layers; returns whether each layer is rotary."""
    name = "no_rope_layer_interval"
    every = take_field(fields, name, UNROTATED_EVERY, source, kind=PositiveInt)
    usual = [int((i + 1) % every != 0) for i in range(num_layers)]
    given = take_field(fields, "no_rope_layers", None, source, kind=tuple[Literal[0, 1], ...])
    given = usual if given is None else given
    require(
        len(given) >= num_layers,
        f"{source}: no_rope_layers {given!r} is not supported: give 0 or 1 for each of "
        f"{num_layers} layers",
        WeightsError,
    )
    # Despite its name, the field has 1 for each layer with rotary positions.
    return list(map(bool, given[:num_layers]))


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads which layers have no positions, and which (by default the same) have a window."""
    num_layers = typed_field(fields, "num_hidden_layers", 36, source)
    rotated = _rotated_layers(fields, num_layers, source)
    unrotated = tuple(i for i, x in enumerate(rotated) if not x)
    if unrotated != tuple(range(UNROTATED_EVERY - 1, num_layers, UNROTATED_EVERY)):
        settings["layers_without_positions"] = unrotated
    # The window has an effect only if `use_sliding_window` is true.
    used, window = fields.pop("use_sliding_window", False), fields.pop("sliding_window", None)
    is_used = used is True and window is not None
    windowed = take_layer_types(fields, num_layers, source)
    if windowed is None:
        windowed = [is_used and not x for x in rotated]
    require(
        not any(windowed) or is_used,
        f"{source}: layer_types has windows, but use_sliding_window and sliding_window state "
        "no window: make the fields agree",
        WeightsError,
    )
    set_windows(settings, window, windowed, source)


def _own_fields(config: SmolLM3Config) -> JsonObject:
    rotated: list[JsonValue] = [int(not unrotated) for unrotated in config.unrotated_layers]
    full: list[JsonValue] = ["full_attention"] * config.num_layers
    return {"layer_types": full, **windows_to_hf(config), "no_rope_layers": rotated}


FORM = DecoderForm(
    config=SmolLM3Config,
    model_type="smollm3",
    classes=head_classes(SmolLM3Config, "SmolLM3"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=128_256,
                hidden_size=2048,
                intermediate_size=11_008,
                num_hidden_layers=36,
                num_attention_heads=16,
                num_key_value_heads=4,
                max_position_embeddings=32_768,
                tie_word_embeddings=True,
            ),
            Field("attention_bias", "attention_bias", False),
            Field("mlp_bias", "use_bias", False),
        ),
        # `pretraining_tp` only changes the order of summation; transformers does not use the other
        # field.
        ignored=NAMES | {"pretraining_tp", "max_window_layers"},
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    rope_base=2_000_000.0,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={
        "pad_token_id": 128_004,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
)
MAPPING = FORM.mapping()
