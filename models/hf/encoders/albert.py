"""ALBERT in the Hugging Face format."""

from ...encoders.albert import AlbertConfig
from ..config_mapping import ConfigMapping, Field, with_defaults
from ..form import head_classes
from ..generation_config import NAMES
from .encoder_form import BERT_EMBEDDINGS, BERT_FIELDS, EncoderForm, TokenLogits

SIZES = {"hidden_size": 4096, "num_attention_heads": 64, "intermediate_size": 16384}
"""The defaults of the transformers class are the sizes of albert-xxlarge."""
RATES = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLASSIFIER_RATE = "classifier_dropout_prob", 0.1

FORM = EncoderForm(
    config=AlbertConfig,
    model_type="albert",
    classes=head_classes(AlbertConfig, "Albert"),
    fields=ConfigMapping(
        (
            *with_defaults(BERT_FIELDS, vocab_size=30000, hidden_act="gelu_new", **SIZES, **RATES),
            Field("embedding_size", "d_embedding", 128),
            Field("num_hidden_groups", "num_groups", 1),
            Field("inner_group_num", "inner_layers", 1),
        ),
        # Ignore fields of the original code that no implementation uses.
        NAMES
        | {"classifier_dropout_prob", "down_scale_factor", "gap_size", "layers_to_keep"}
        | {"net_structure_type", "num_memory_blocks"},
    ),
    embeddings={
        **BERT_EMBEDDINGS,
        "embedding_projection": "encoder.embedding_hidden_mapping_in",
    },
    layers="encoder.albert_layer_groups.{i}.albert_layers.{j}",
    parts={
        "attention/query": "attention.query",
        "attention/key": "attention.key",
        "attention/value": "attention.value",
        "attention/output": "attention.dense",
        "attention_norm": "attention.LayerNorm",
        "feed_forward/up": "ffn",
        "feed_forward/down": "ffn_output",
        "feed_forward_norm": "full_layer_layer_norm",
    },
    pooler="pooler",
    token_logits=TokenLogits(
        "predictions.dense", "predictions.LayerNorm", "predictions.bias", "predictions.decoder"
    ),
    head_parts={"pretraining": {"next_sentence": "sop_classifier.classifier"}},
    classifier_rates={
        "pretraining": CLASSIFIER_RATE,
        "sequence_classification": CLASSIFIER_RATE,
        "token_classification": CLASSIFIER_RATE,
        "multiple_choice": CLASSIFIER_RATE,
    },
    generation_defaults={"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
)
MAPPING = FORM.mapping()
