"""Phi-3 in the Hugging Face format."""

from ....data.common.fields import Rate
from ....data.common.json_text import JsonObject
from ...decoders.phi3 import Phi3Config
from ..config_mapping import ConfigMapping, Field, FixedField, Settings, take_field
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import NORMS, DecoderForm, size_fields

PADDING = 32_000
"""The ids of the padding token and the end token that transformers assumes if a file states none.
"""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the dropout rate, the trained length, and older names of the scaling."""
    rate = take_field(fields, "resid_pdrop", 0.0, source, kind=Rate)
    settings["residual_dropout"] = rate or None
    length = fields.pop("original_max_position_embeddings", 4096)
    # Older files name the scaling "su" or "yarn"; the trained length is a separate field.
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.get(name)
        if not isinstance(given, dict):
            continue
        kind = given.get("rope_type", given.get("type"))
        if kind in (None, "default"):
            continue
        rest = {key: value for key, value in given.items() if key not in ("type", "rope_type")}
        fields[name] = {
            **rest,
            "rope_type": "longrope" if kind in ("su", "yarn") else kind,
            "original_max_position_embeddings": length,
        }


def _own_fields(config: Phi3Config) -> JsonObject:
    scaling = config.rope_scaling
    length = None if scaling is None else scaling.original_length
    return {
        "original_max_position_embeddings": 4096 if length is None else length,
        "resid_pdrop": config.residual_dropout_rate("attention"),
    }


FORM = DecoderForm(
    config=Phi3Config,
    model_type="phi3",
    classes=head_classes(Phi3Config, "Phi3"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=32_064,
                hidden_size=3072,
                intermediate_size=8192,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=None,
                max_position_embeddings=4096,
                rms_norm_eps=1e-5,
            ),
            Field("sliding_window", "window", None, kind=int),
            FixedField("attention_bias", (False,)),
        ),
        # Fields of the authors' code, and a dropout that transformers does not apply. The fields
        # of biases need no check: if there is a bias, the files have its tensor.
        ignored=NAMES
        | {"embd_pdrop", "full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias"},
    ),
    layer={
        ("attention/query", "attention/key", "attention/value"): "self_attn.qkv_proj",
        "attention/output": "self_attn.o_proj",
        ("feed_forward/gate", "feed_forward/up"): "mlp.gate_up_proj",
        "feed_forward/down": "mlp.down_proj",
        **NORMS,
    },
    rotary_kinds=("longrope",),
    fractional=True,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"bos_token_id": 1, "eos_token_id": PADDING, "pad_token_id": PADDING},
)
MAPPING = FORM.mapping()
