"""ELECTRA in Hugging Face's form."""

from ....data.common.json_text import JsonObject
from ...encoders.electra import ElectraConfig
from ..config_mapping import ConfigMapping, Field, FixedField, HFConfig, Settings, with_defaults
from ..generation_config import NAMES
from .encoder_form import BERT_FIELDS, CLASSIFIER_RATE, EncoderForm, TokenLogits

DEFAULTS = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
"""The class of transformers has the sizes of electra-small."""


def _own_settings(hf_config: HFConfig, settings: Settings, source: str) -> None:
    """Leaves a width of the embeddings out that is that of the layers."""
    del hf_config, source
    if settings["d_embedding"] == settings["d_model"]:
        settings["d_embedding"] = None


def _own_fields(config: ElectraConfig) -> JsonObject:
    return {"embedding_size": config.position_dim}


FORM = EncoderForm(
    config=ElectraConfig,
    model_type="electra",
    name="Electra",
    fields=ConfigMapping(
        (
            *with_defaults(BERT_FIELDS, **DEFAULTS),
            Field("embedding_size", "d_embedding", 128, kind=int),
            # The pooler of multiple choice.
            FixedField("summary_type", ("first",)),
            FixedField("summary_use_proj", (True,)),
            FixedField("summary_activation", ("gelu",)),
        ),
        NAMES | {"summary_last_dropout"},
    ),
    token_logits=TokenLogits(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head.bias",
        "generator_lm_head",
    ),
    head_parts={
        "sequence_classification": {
            "pooler": "classifier.dense",
            "classifier": "classifier.out_proj",
        },
        "multiple_choice": {"pooler": "sequence_summary.summary"},
    },
    classifier_rates={
        "sequence_classification": CLASSIFIER_RATE,
        "token_classification": CLASSIFIER_RATE,
        "multiple_choice": ("summary_last_dropout", 0.1),
    },
    own_settings=_own_settings,
    own_fields=_own_fields,
)
MAPPING = FORM.mapping()
