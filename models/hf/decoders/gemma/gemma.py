"""Gemma in the Hugging Face format."""

from ....decoders.gemma.gemma import GemmaConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, FixedField
from ...form import head_classes
from ...generation_config import NAMES
from ..causal_decoder import ATTENTION, FEED_FORWARD, NORMS, DecoderForm, size_fields

FORM = DecoderForm(
    config=GemmaConfig,
    model_type="gemma",
    classes=head_classes(GemmaConfig, "Gemma"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=256_000,
                hidden_size=3072,
                intermediate_size=24_576,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=16,
                max_position_embeddings=8192,
                head_dim=256,
                tie_word_embeddings=True,
                # Files of the first release say "gelu" but mean the tanh approximation.
                activation=Field(
                    "hidden_act",
                    "activation",
                    "gelu_pytorch_tanh",
                    {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATIONS | {"gelu": "gelu_tanh"},
                ),
            ),
            Field("attention_bias", "attention_bias", False),
            FixedField("hidden_activation", (None, "gelu_pytorch_tanh")),
            FixedField("use_bidirectional_attention", (None, False)),
        ),
        ignored=NAMES,
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    generation_defaults={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
)
MAPPING = FORM.mapping()
