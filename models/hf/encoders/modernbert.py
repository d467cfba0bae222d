"""ModernBERT in the Hugging Face format."""

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...encoders.modernbert import FULL_EVERY, ModernBertConfig
from ..config_mapping import ACTIVATIONS, ConfigMapping, Field, Settings, typed_field
from ..decoders.causal_decoder import take_layer_types
from ..decoders.rotary import SCALINGS, rotary_settings, rotary_to_hf, take_rotary
from ..form import head_classes
from ..generation_config import NAMES
from ..tensors.mapping import WeightsError
from .encoder_form import EncoderForm, TokenLogits

BASES = {
    "full_attention": ("position_base", "global_rope_theta", 160_000.0, SCALINGS),
    "sliding_attention": ("windowed_position_base", "local_rope_theta", 10_000.0, ()),
}
"""For each kind of layer: the field of the rotary base in flaxzoo, the field in older files, the
default of transformers, and the supported scalings of frequencies.
"""
CLASSIFIER_RATE = "classifier_dropout", 0.0
PAD_ID = 50283
"""The padding id that transformers assumes if a file states no id."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the windows and rotary bases of both kinds of layers, from older and newer fields."""
    window = typed_field(fields, "local_attention", 128, source)
    fields.pop("local_attention", None)
    settings["window"] = window // 2 + 1
    # Older files state n if every n-th layer attends to all tokens; newer files state the kind of
    # each layer.
    number = typed_field(fields, "num_hidden_layers", 22, source)
    every = typed_field(fields, "global_attn_every_n_layers", FULL_EVERY, source)
    fields.pop("global_attn_every_n_layers", None)
    windowed = take_layer_types(fields, number, source)
    if windowed is None:
        windowed = [i % every != 0 for i in range(number)]
    if windowed != [i % FULL_EVERY != 0 for i in range(number)]:
        settings["full_layers"] = tuple(i for i, x in enumerate(windowed) if not x)
    # Each kind of layer has one rotary base. The fields of older files are for both kinds.
    given, scaling = fields.pop("rope_parameters", None) or {}, fields.pop("rope_scaling", None)
    if not isinstance(given, dict) or given.keys() - BASES.keys():
        raise WeightsError(
            f"{source}: rope_parameters {given!r} is not supported: only an object with "
            f"{' and '.join(BASES)}"
        )
    length = typed_field(fields, "max_position_embeddings", 8192, source)
    for kind, (name, older, default, scalings) in BASES.items():
        parts = {"rope_parameters": given.get(kind), "rope_scaling": scaling}
        rotary = take_rotary(
            {**parts, "rope_theta": fields.pop(older, None)}, source, default_base=default
        )
        rotary = rotary_settings(rotary, f"{source}: {kind}", kinds=scalings, max_length=length)
        settings[name] = float(rotary.pop("rope_base"))
        problem = f"{source}: partial_rotary_factor of {kind} is not supported"
        require(rotary.pop("rope_fraction", 1.0) == 1, problem, WeightsError)
        settings |= rotary


def _own_fields(config: ModernBertConfig) -> JsonObject:
    types: list[JsonValue] = [
        "sliding_attention" if windowed else "full_attention" for windowed in config.windowed_layers
    ]
    rotary: JsonObject = {
        kind: rotary_to_hf(getattr(config, name), config.rope_scaling if scalings else None)
        for kind, (name, _, _, scalings) in BASES.items()
    }
    # transformers refuses a padding id outside of the vocabulary.
    padding: JsonObject = {} if config.vocab_size > PAD_ID else {"pad_token_id": None}
    return {
        **padding,
        "local_attention": 2 * (config.window - 1),
        "layer_types": types,
        "rope_parameters": rotary,
    }


FORM = EncoderForm(
    config=ModernBertConfig,
    model_type="modernbert",
    classes=head_classes(ModernBertConfig, "ModernBert"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 50368),
            Field("hidden_size", "d_model", 768),
            Field("num_hidden_layers", "num_layers", 22),
            Field("num_attention_heads", "num_heads", 12),
            Field("intermediate_size", "d_ff", 1152),
            Field("hidden_activation", "activation", "gelu", ACTIVATIONS),
            Field("classifier_activation", "head_activation", "gelu", ACTIVATIONS),
            Field("max_position_embeddings", "max_length", 8192),
            Field("norm_eps", "norm_eps", 1e-5),
            Field("embedding_dropout", "dropout_rate", 0.0),
            Field("attention_dropout", "attention_dropout", 0.0),
            Field("mlp_dropout", "activation_dropout_rate", 0.0),
            Field("attention_bias", "attention_bias", False),
            Field("mlp_bias", "use_bias", False),
            Field("classifier_bias", "transform_bias", False),
            Field("classifier_pooling", "pooling", "cls", {"cls": "cls", "mean": "mean"}),
            Field("tie_word_embeddings", "tie_output", True),
            Field("norm_bias", "norm_bias", False),
            Field("decoder_bias", "output_bias", True),
        ),
        # Ignore fields that only affect how transformers computes, and fields that transformers
        # does not read.
        ignored=NAMES
        | {"reference_compile", "repad_logits_with_grad", "deterministic_flash_attn"}
        | {"sparse_prediction", "sparse_pred_ignore_index", "initializer_cutoff_factor"}
        | {"cls_token_id", "layer_norm_eps", "position_embedding_type"},
    ),
    body="model",
    embeddings={
        "token_embedding": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "attention_norms": "layers.{i}.attn_norm",
        "final_norm": "final_norm",
    },
    layers="layers.{i}",
    parts={
        ("attention/query", "attention/key", "attention/value"): "attn.Wqkv",
        "attention/output": "attn.Wo",
        "feed_forward_norm": "mlp_norm",
        ("feed_forward/gate", "feed_forward/up"): "mlp.Wi",
        "feed_forward/down": "mlp.Wo",
    },
    token_logits=TokenLogits("head.dense", "head.norm", "decoder.bias", "decoder"),
    head_parts={"question_answering": {"span": "classifier"}},
    classifier_rates=dict.fromkeys(
        (
            *("sequence_classification", "token_classification"),
            *("multiple_choice", "question_answering"),
        ),
        CLASSIFIER_RATE,
    ),
    allowed={
        "positions": ("rotary",),
        "num_token_types": (0,),
        "pooling": ("cls", "mean"),
    },
    own_settings=_own_settings,
    own_fields=_own_fields,
)
MAPPING = FORM.mapping()
