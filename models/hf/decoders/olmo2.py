"""OLMo 2 in the Hugging Face format."""

from ...decoders.olmo2 import Olmo2Config
from ..config_mapping import ConfigMapping, Field
from ..generation_config import NAMES
from .causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    QUERY_KEY_NORMS,
    DecoderForm,
    Parts,
    size_fields,
)

OUTPUT_NORMS: Parts = {
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
}

SIZES = size_fields(
    vocab_size=50_304,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
"""The size fields, which OLMo 3 also has."""

FORM = DecoderForm(
    config=Olmo2Config,
    model_type="olmo2",
    # transformers has no class for token classification in this family.
    classes={
        "causal_lm": "Olmo2ForCausalLM",
        "none": "Olmo2Model",
        "sequence_classification": "Olmo2ForSequenceClassification",
    },
    fields=ConfigMapping((*SIZES, Field("attention_bias", "attention_bias", False)), ignored=NAMES),
    layer={**ATTENTION, **QUERY_KEY_NORMS, **FEED_FORWARD, **OUTPUT_NORMS},
    generation_defaults={"pad_token_id": 1, "eos_token_id": 50_279},
)
MAPPING = FORM.mapping()
