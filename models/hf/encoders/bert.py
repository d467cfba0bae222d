"""BERT in the Hugging Face format."""

from ...encoders.bert import BertConfig
from ..config_mapping import ConfigMapping, FixedField
from ..form import head_classes
from ..generation_config import NAMES
from .encoder_form import BERT_FIELDS, CLASSIFIER_RATE, EncoderForm, TokenLogits

# Ignore the pooler fields. Only the first library that wrote such files had them, and no library
# reads them.
IGNORED = NAMES | {
    *("cross_attention_hidden_size", "pooler_fc_size", "pooler_num_attention_heads"),
    *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
}
IS_DECODER = FixedField("is_decoder", (False, True))
"""The head determines whether the model is a decoder, so both values are accepted."""

FORM = EncoderForm(
    config=BertConfig,
    model_type="bert",
    classes=head_classes(BertConfig, "Bert", causal_lm="BertLMHeadModel"),
    fields=ConfigMapping((IS_DECODER, *BERT_FIELDS), IGNORED),
    token_logits=TokenLogits(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
    classifier_rates={
        "sequence_classification": CLASSIFIER_RATE,
        "token_classification": CLASSIFIER_RATE,
        "multiple_choice": CLASSIFIER_RATE,
    },
    generation_defaults={"pad_token_id": 0},
)
MAPPING = FORM.mapping()
