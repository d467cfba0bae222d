"""Llama in the Hugging Face format."""

from ...decoders.llama import LlamaConfig
from ..config_mapping import ConfigMapping, Field
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import ATTENTION, FEED_FORWARD, NORMS, DecoderForm, size_fields

FORM = DecoderForm(
    config=LlamaConfig,
    model_type="llama",
    classes=head_classes(LlamaConfig, "Llama"),
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
        ),
        # `pretraining_tp` only changes the order of summation; transformers does not use the other
        # fields.
        ignored=NAMES
        | {"pretraining_tp", "is_llama_config", "max_sequence_length", "rope_interleaved"},
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    generation_defaults={"bos_token_id": 1, "eos_token_id": 2},
)
MAPPING = FORM.mapping()
