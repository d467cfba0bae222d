"""Mixtral in the Hugging Face format."""

from ...decoders.mixtral import MixtralConfig
from ..config_mapping import ConfigMapping, Field
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import ATTENTION, NORMS, DecoderForm, size_fields

FORM = DecoderForm(
    config=MixtralConfig,
    model_type="mixtral",
    classes=head_classes(MixtralConfig, "Mixtral"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                max_position_embeddings=131_072,
                rms_norm_eps=1e-5,
            ),
            Field("sliding_window", "window", None, kind=int),
            Field("num_local_experts", "num_experts", 8),
            Field("num_experts_per_tok", "experts_per_token", 2),
            Field("router_aux_loss_coef", "router_balance", 0.001),
            Field("router_jitter_noise", "router_jitter", 0.0),
        ),
        # Whether transformers returns and adds the router loss.
        ignored=NAMES | {"output_router_logits"},
        aliases={"num_experts": "num_local_experts"},
    ),
    layer={
        **ATTENTION,
        **NORMS,
        "experts/router": "block_sparse_moe.gate",
        "experts/gate": "block_sparse_moe.experts.{e}.w1",
        "experts/down": "block_sparse_moe.experts.{e}.w2",
        "experts/up": "block_sparse_moe.experts.{e}.w3",
    },
    rope_base=1_000_000.0,
    generation_defaults={"bos_token_id": 1, "eos_token_id": 2},
)
MAPPING = FORM.mapping()
