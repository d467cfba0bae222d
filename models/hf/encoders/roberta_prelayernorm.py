"""RoBERTa-PreLayerNorm in the Hugging Face format, with RoBERTa's tensors but different norms."""

from ...encoders.roberta_prelayernorm import RobertaPreLayerNormConfig
from ..config_mapping import ConfigMapping
from .bert import IGNORED, IS_DECODER
from .encoder_form import BERT_EMBEDDINGS, BERT_LAYER
from .roberta import VOCABULARY, roberta_form

FORM = roberta_form(
    RobertaPreLayerNormConfig,
    "roberta-prelayernorm",
    "RobertaPreLayerNorm",
    body="roberta_prelayernorm",
    fields=ConfigMapping((IS_DECODER, *VOCABULARY), IGNORED),
    embeddings={**BERT_EMBEDDINGS, "final_norm": "LayerNorm"},
    parts={
        **BERT_LAYER,
        "attention_norm": "attention.LayerNorm",
        "feed_forward_norm": "intermediate.LayerNorm",
    },
)
MAPPING = FORM.mapping()
