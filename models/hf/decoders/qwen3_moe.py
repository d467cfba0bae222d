"""Qwen3-MoE in Hugging Face's format."""

from ....data.common.json_text import JsonObject
from ...decoders.qwen3_moe import Qwen3MoeConfig
from ..config_mapping import ConfigMapping, Field, FixedField, Settings
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import ATTENTION, NORMS, QUERY_KEY_NORMS, DecoderForm, size_fields


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the window, which either all layers have or none."""
    del settings, source
    used = fields.pop("use_sliding_window", False)
    window = fields.pop("sliding_window", 4096)
    fields["sliding_window"] = window if used is True else None


def _own_fields(config: Qwen3MoeConfig) -> JsonObject:
    return {"use_sliding_window": config.window is not None}


FORM = DecoderForm(
    config=Qwen3MoeConfig,
    model_type="qwen3_moe",
    classes=head_classes(Qwen3MoeConfig, "Qwen3Moe"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=151_936,
                hidden_size=2048,
                intermediate_size=768,
                num_hidden_layers=24,
                num_attention_heads=32,
                num_key_value_heads=4,
                max_position_embeddings=32_768,
                width="moe_intermediate_size",
            ),
            Field("attention_bias", "attention_bias", False),
            Field("sliding_window", "window", None, kind=int),
            Field("num_experts", "num_experts", 128),
            Field("num_experts_per_tok", "experts_per_token", 8),
            Field("norm_topk_prob", "normalize_experts", False),
            Field("router_aux_loss_coef", "router_balance", 0.001),
            # Every layer must be a mixture; models with some dense layers are not supported.
            FixedField("decoder_sparse_step", (1,)),
            FixedField("mlp_only_layers", ([], None)),
        ),
        ignored=NAMES | {"output_router_logits", "intermediate_size", "max_window_layers"},
        aliases={"num_local_experts": "num_experts"},
    ),
    layer={
        **ATTENTION,
        **QUERY_KEY_NORMS,
        **NORMS,
        "experts/router": "mlp.gate",
        "experts/gate": "mlp.experts.{e}.gate_proj",
        "experts/up": "mlp.experts.{e}.up_proj",
        "experts/down": "mlp.experts.{e}.down_proj",
    },
    own_settings=_own_settings,
    own_fields=_own_fields,
)
MAPPING = FORM.mapping()
