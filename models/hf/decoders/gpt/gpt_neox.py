"""GPT-NeoX and Pythia in the Hugging Face format."""

from .....data.common.json_text import JsonObject
from ....decoders.gpt.gpt_neox import GPTNeoXConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, FixedField, Settings
from ...form import head_classes
from ...generation_config import NAMES
from ..rotary import SCALINGS, rotary_settings, rotary_to_hf, take_rotary
from .gpt_form import GPTForm


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the rotary fields, including their names in older files."""
    for old, name in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        if (value := fields.pop(old, None)) is not None:
            fields.setdefault(name, value)
    settings |= rotary_settings(
        take_rotary(fields, source, default_base=10_000.0),
        source,
        kinds=SCALINGS,
        max_length=fields.get("max_position_embeddings", 2048),
    )
    settings["position_base"] = float(settings.pop("rope_base"))
    settings.setdefault("rope_fraction", 0.25)


def _own_fields(config: GPTNeoXConfig) -> JsonObject:
    rotary = rotary_to_hf(config.position_base, config.rope_scaling)
    return {"rope_parameters": {**rotary, "partial_rotary_factor": config.rope_fraction}}


FORM = GPTForm(
    config=GPTNeoXConfig,
    model_type="gpt_neox",
    classes=head_classes(GPTNeoXConfig, "GPTNeoX"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 50_432),
            Field("max_position_embeddings", "max_length", 2048),
            Field("num_hidden_layers", "num_layers", 44),
            Field("hidden_size", "d_model", 6144),
            Field("num_attention_heads", "num_heads", 64),
            Field("intermediate_size", "d_ff", 24_576),
            Field("hidden_act", "activation", "gelu", ACTIVATIONS),
            Field("layer_norm_eps", "norm_eps", 1e-5),
            Field("hidden_dropout", "dropout_rate", 0.0),
            Field("attention_dropout", "attention_dropout", 0.0),
            Field("classifier_dropout", "classifier_dropout_rate", 0.1),
            Field("use_parallel_residual", "parallel_residual", True),
            Field("attention_bias", "attention_bias", True),
            Field("tie_word_embeddings", "tie_output", False),
            FixedField("is_decoder", (False, True)),
        ),
        # gpt-neox-20b has dropout rates under names that transformers does not read.
        ignored=NAMES | {"attention_probs_dropout_prob", "hidden_dropout_prob"},
    ),
    allowed={"position_base": (), "embedding_dropout": (None,)},
    prefix="gpt_neox.",
    tokens="embed_in",
    layers="layers.{i}",
    joined="attention.query_key_value",
    parts={
        "attention/output": "attention.dense",
        "feed_forward/up": "mlp.dense_h_to_4h",
        "feed_forward/down": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    },
    body={"final_norm": "final_layer_norm"},
    output="embed_out",
    ignored=(
        *("layers.*.attention.bias", "layers.*.attention.masked_bias"),
        "layers.*.attention.rotary_emb.inv_freq",
    ),
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"bos_token_id": 0, "eos_token_id": 2},
)
MAPPING = FORM.mapping()
