"""Granite 3 in the Hugging Face format."""

from ...decoders.granite import GraniteConfig
from ..config_mapping import ConfigMapping, Field
from ..generation_config import NAMES
from .causal_decoder import ATTENTION, FEED_FORWARD, NORMS, DecoderForm, size_fields

FORM = DecoderForm(
    config=GraniteConfig,
    model_type="granite",
    # transformers has no classifiers of this family.
    classes={"causal_lm": "GraniteForCausalLM", "none": "GraniteModel"},
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=11_008,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=None,
                max_position_embeddings=2048,
            ),
            Field("attention_bias", "attention_bias", False),
            Field("mlp_bias", "use_bias", False),
            Field("embedding_multiplier", "embedding_scale", 1.0),
            Field("attention_multiplier", "attention_scale", 1.0),
            Field("residual_multiplier", "residual_scale", 1.0),
            Field("logits_scaling", "logit_divisor", 1.0),
        ),
        ignored=NAMES,
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    generation_defaults={"bos_token_id": 1, "eos_token_id": 2},
)
MAPPING = FORM.mapping()
