"""Conversion shared by Nomic BERT and GTE: encoders with rotary positions and gated layers."""

from typing import Any, TypeVar

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...encoders.nomic_bert import NomicBertConfig
from ..config_mapping import ConfigMapping, Field, FixedField, Settings, with_defaults
from ..decoders.rotary import rotary_settings, rotary_to_hf, take_rotary
from ..form import head_classes
from ..tensors.mapping import WeightsError
from .encoder_form import BERT_FIELDS, CLASSIFIER_RATE, EncoderForm

Config = TypeVar("Config", bound=NomicBertConfig)

SCALINGS = ("linear", "dynamic", "llama3", "yarn")
LAYERS = "layers.{i}"
"""The name of a layer in the models of transformers 5."""
MODULES = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "attention_norm": "post_attention_layernorm",
    "feed_forward/up": "mlp.up_proj",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward_norm": "post_mlp_layernorm",
}
"""The name of each module in a layer of transformers 5. Both families have the same names."""


def take_older_values(fields: JsonObject, values: dict[str, JsonValue], source: str) -> None:
    """Removes the fields of older files that have only one supported value.

    Raises:
      WeightsError: A field has a different value.
    """
    for name, value in values.items():
        given = fields.pop(name, value)
        problem = f"{source}: {name} {given!r} is not supported: only {value!r}"
        require(given == value, problem, WeightsError)


def take_positions(fields: JsonObject, settings: Settings, source: str, base: float) -> None:
    """Reads the rotary base and the scaling of its frequencies.

    Raises:
      WeightsError: The kind of scaling, or a field, is not supported.
    """
    rotary = take_rotary(fields, source, default_base=base)
    length = fields.get("max_position_embeddings")
    rotary = rotary_settings(rotary, source, kinds=SCALINGS, max_length=length)
    settings["position_base"] = float(rotary["rope_base"])
    settings["rope_scaling"] = rotary.get("rope_scaling")
    fraction = rotary.get("rope_fraction", 1.0)
    problem = f"{source}: partial_rotary_factor {fraction} is not supported: only 1.0"
    require(fraction == 1, problem, WeightsError)


def _own_fields(config: NomicBertConfig) -> JsonObject:
    """Returns the object `rope_parameters`."""
    return {"rope_parameters": rotary_to_hf(config.position_base, config.rope_scaling)}


def rotary_fields(**defaults: JsonValue) -> tuple[Field | FixedField, ...]:
    """Returns the fields of BERT that a rotary encoder also has, with the given defaults."""
    rows = with_defaults(BERT_FIELDS, **defaults)
    return tuple(
        row for row in rows if row.hf not in ("position_embedding_type", "add_cross_attention")
    )


def rotary_form(
    config: type[Config], model_type: str, name: str, *, fields: ConfigMapping, **more: Any
) -> EncoderForm[Config]:
    """Returns the conversion of an encoder with rotary positions and gated feed-forward layers.

    Args:
      config: The configuration of the family.
      model_type: The name of the family in transformers.
      name: The prefix of the class names, such as "NomicBert".
      fields: The fields of `config.json`.
      **more: Other fields of the conversion.
    """
    return EncoderForm(
        config=config,
        model_type=model_type,
        classes=head_classes(config, name),
        fields=fields,
        classifier_rates=dict.fromkeys(
            ("sequence_classification", "token_classification"), CLASSIFIER_RATE
        ),
        own_fields=_own_fields,
        allowed={
            "positions": ("rotary",),
            "num_token_types": (),
        },
        **more,
    )
