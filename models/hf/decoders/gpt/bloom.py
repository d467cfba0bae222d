"""BLOOM in the Hugging Face format."""

from .....data.common.json_text import JsonObject
from ....decoders.gpt.bloom import BloomConfig
from ...config_mapping import ConfigMapping, Field, Settings
from ...form import head_classes
from ...generation_config import NAMES
from .gpt_form import GPTForm


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the dropout rate of the classifier, which defaults to the rate of the layers."""
    del settings, source
    if fields.get("classifier_dropout") is None:
        fields["classifier_dropout"] = fields.get("hidden_dropout", 0.0)
    if fields.get("seq_length") is None:
        fields.pop("seq_length", None)


FORM = GPTForm(
    config=BloomConfig,
    model_type="bloom",
    classes=head_classes(BloomConfig, "Bloom"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 250_880),
            # transformers does not read this field: the model has no position table.
            Field("seq_length", "max_length", 2048),
            Field("n_layer", "num_layers", 2),
            Field("hidden_size", "d_model", 64),
            Field("n_head", "num_heads", 8),
            Field("layer_norm_epsilon", "norm_eps", 1e-5),
            Field("hidden_dropout", "dropout_rate", 0.0),
            Field("attention_dropout", "attention_dropout", 0.0),
            Field("classifier_dropout", "classifier_dropout_rate", 0.0),
            Field("tie_word_embeddings", "tie_output", True),
            Field("apply_residual_connection_post_layernorm", "residual_of_norm", False),
        ),
        # These fields only change the order of summation.
        ignored=NAMES
        | {
            *("pretraining_tp", "slow_but_exact", "masked_softmax_fusion", "skip_bias_add"),
            *(
                "skip_bias_add_qkv",
                "bias_dropout_fusion",
                "attention_softmax_in_fp32",
                "offset_alibi",
            ),
            *("unk_token_id", "n_inner"),
        },
        aliases={
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "n_embed": "hidden_size",
        },
    ),
    allowed={"activation": ("gelu_tanh",)},
    prefix="transformer.",
    tokens="word_embeddings",
    layers="h.{i}",
    joined="self_attention.query_key_value",
    parts={
        "attention/output": "self_attention.dense",
        "feed_forward/up": "mlp.dense_h_to_4h",
        "feed_forward/down": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    },
    body={"embedding_norm": "word_embeddings_layernorm", "final_norm": "ln_f"},
    own_settings=_own_settings,
    generation_defaults={"bos_token_id": 1, "eos_token_id": 2},
)
MAPPING = FORM.mapping()
