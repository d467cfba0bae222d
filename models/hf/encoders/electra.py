"""ELECTRA in the Hugging Face format."""

from collections.abc import Sequence

from ....data.common.json_text import JsonObject
from ...encoders.electra import ElectraConfig
from ..config_mapping import ConfigMapping, FixedField, Settings, typed_field, with_defaults
from ..form import head_classes
from ..generation_config import NAMES
from .bert import IS_DECODER
from .encoder_form import BERT_FIELDS, CLASSIFIER_RATE, EncoderForm, TokenLogits

DEFAULTS = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
"""The defaults of the transformers class are the sizes of electra-small."""

CHOICE = "ElectraForMultipleChoice"


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the width of the embeddings; None if it equals the width of the layers."""
    # Only the head for multiple choice reads the fields of the summary.
    classes = typed_field(fields, "architectures", None, source, kind=Sequence[str]) or ()
    if CHOICE not in classes:
        for name in ("summary_type", "summary_use_proj", "summary_activation"):
            fields.pop(name, None)
    width = fields.pop("embedding_size", 128)
    same = width == fields.get("hidden_size", DEFAULTS["hidden_size"])
    settings["d_embedding"] = None if same else width


def _own_fields(config: ElectraConfig) -> JsonObject:
    return {"embedding_size": config.position_dim}


FORM = EncoderForm(
    config=ElectraConfig,
    model_type="electra",
    classes=head_classes(ElectraConfig, "Electra"),
    fields=ConfigMapping(
        (
            IS_DECODER,
            *with_defaults(BERT_FIELDS, **DEFAULTS),
            # These fields describe the pooler of the head for multiple choice.
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
