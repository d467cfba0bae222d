"""Qwen3-MoE in the Hugging Face format."""

import dataclasses

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...decoders.qwen3_moe import Qwen3MoeConfig
from ..config_mapping import ConfigMapping, Field, Settings, take_field, typed_field
from ..form import head_classes
from ..generation_config import NAMES
from ..tensors.mapping import WeightsError
from .causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    NORMS,
    QUERY_KEY_NORMS,
    DecoderForm,
    Parts,
    size_fields,
)


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads which layers have no experts, and the window, which all layers or no layers use."""
    used = fields.pop("use_sliding_window", False)
    window = fields.pop("sliding_window", 4096)
    fields["sliding_window"] = window if used is True else None
    # Every n-th layer has experts, where n is `decoder_sparse_step`, except for the listed layers.
    number = typed_field(fields, "num_hidden_layers", 24, source)
    every = take_field(fields, "decoder_sparse_step", 1, source)
    listed = take_field(fields, "mlp_only_layers", None, source, kind=list) or []
    width = take_field(fields, "intermediate_size", 6144, source)
    require(every >= 1, f"{source}: decoder_sparse_step {every} must be at least 1", WeightsError)
    dense = tuple(i for i in range(number) if i in listed or (i + 1) % every)
    if dense:
        settings |= {"dense_layers": dense, "d_ff_dense": width}


def _own_fields(config: Qwen3MoeConfig) -> JsonObject:
    window: JsonObject = {"use_sliding_window": config.window is not None}
    if not config.dense_layers:
        return window
    dense: list[JsonValue] = list(config.dense_layers)
    return {**window, "mlp_only_layers": dense, "intermediate_size": config.dense_dim}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeForm(DecoderForm[Qwen3MoeConfig]):
    """The conversion of Qwen3-MoE, where some layers may have no experts."""

    def parts_of(self, config: Qwen3MoeConfig) -> Parts:
        """Returns the transformers name of each module in a layer."""
        return {**self.layer, **FEED_FORWARD} if config.dense_layers else self.layer

    def layers_of(
        self, config: Qwen3MoeConfig, part: str | tuple[str, ...]
    ) -> tuple[int, ...] | None:
        """Returns the indices of the layers that contain a module, or None if all layers do."""
        kind = str(part).partition("/")[0]
        if not config.dense_layers or kind not in ("experts", "feed_forward"):
            return None
        is_dense = kind == "feed_forward"
        layers = range(config.num_layers)
        return tuple(i for i in layers if (i in config.dense_layers) == is_dense)


FORM = Qwen3MoeForm(
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
        ),
        ignored=NAMES | {"output_router_logits", "max_window_layers"},
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
