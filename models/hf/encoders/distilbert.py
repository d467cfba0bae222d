"""DistilBERT in the Hugging Face format."""

from ...encoders.distilbert import DistilBertConfig
from ..config_mapping import ACTIVATIONS, ConfigMapping, Field
from ..form import head_classes
from ..generation_config import NAMES
from .encoder_form import EncoderForm, TokenLogits

FORM = EncoderForm(
    config=DistilBertConfig,
    model_type="distilbert",
    classes=head_classes(DistilBertConfig, "DistilBert"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 30522),
            Field("dim", "d_model", 768),
            Field("n_layers", "num_layers", 6),
            Field("n_heads", "num_heads", 12),
            Field("hidden_dim", "d_ff", 3072),
            Field("activation", "activation", "gelu", ACTIVATIONS),
            Field("dropout", "dropout_rate", 0.1),
            Field("attention_dropout", "attention_dropout", 0.1),
            Field("max_position_embeddings", "max_length", 512),
            Field("tie_word_embeddings", "tie_output", True),
        ),
        # Sinusoidal positions are only the initial values of a trained embedding.
        ignored=NAMES
        | {"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"},
        aliases={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        },
    ),
    layers="transformer.layer.{i}",
    parts={
        "attention/query": "attention.q_lin",
        "attention/key": "attention.k_lin",
        "attention/value": "attention.v_lin",
        "attention/output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "feed_forward/up": "ffn.lin1",
        "feed_forward/down": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    },
    token_logits=TokenLogits(
        "vocab_transform", "vocab_layer_norm", "vocab_projector.bias", "vocab_projector"
    ),
    head_parts={
        "sequence_classification": {"pooler": "pre_classifier"},
        "multiple_choice": {"pooler": "pre_classifier"},
    },
    classifier_rates={
        "sequence_classification": ("seq_classif_dropout", 0.2),
        "multiple_choice": ("seq_classif_dropout", 0.2),
        "question_answering": ("qa_dropout", 0.1),
    },
    allowed={"norm_eps": (1e-12,), "num_token_types": (0,)},
)
MAPPING = FORM.mapping()
