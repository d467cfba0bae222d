"""StableLM in the Hugging Face format."""

import dataclasses

from ....data.common.fields import Rate
from ....data.common.json_text import JsonObject
from ...decoders.stablelm import StableLMConfig
from ..config_mapping import ConfigMapping, Field, Settings, take_field
from ..form import head_classes
from ..generation_config import NAMES
from .causal_decoder import ATTENTION, FEED_FORWARD, NORMS, DecoderForm, Parts, size_fields

NORMS_OF_HEADS: Parts = {
    "attention/query_norm": "self_attn.q_layernorm.norms.{e}",
    "attention/key_norm": "self_attn.k_layernorm.norms.{e}",
}
"""How query and key norms are stored: one tensor for each head."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Sets the rotated fraction of each head to its default, a quarter, and reads the dropout."""
    settings["rope_fraction"] = 0.25
    # transformers applies dropout only to the output of the feed-forward layer.
    rate = take_field(fields, "hidden_dropout", 0.0, source, kind=Rate)
    settings["feed_forward_dropout"] = rate or None


def _own_fields(config: StableLMConfig) -> JsonObject:
    return {"hidden_dropout": config.residual_dropout_rate("feed_forward")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableLMForm(DecoderForm[StableLMConfig]):
    """The conversion of StableLM, whose models may lack some of the norms."""

    def parts_of(self, config: StableLMConfig) -> Parts:
        """Returns the transformers name of each module in a layer."""
        lacking = () if not config.parallel_residual else ("feed_forward_norm",)
        more = NORMS_OF_HEADS if config.normalize_heads else {}
        return {part: name for part, name in {**self.layer, **more}.items() if part not in lacking}


FORM = StableLMForm(
    config=StableLMConfig,
    model_type="stablelm",
    classes=head_classes(StableLMConfig, "StableLm"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=50_304,
                hidden_size=2560,
                intermediate_size=6912,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
                max_position_embeddings=4096,
                rms_norm_eps=1e-5,
                epsilon="layer_norm_eps",
            ),
            Field("use_qkv_bias", "attention_bias", False),
            Field("qk_layernorm", "normalize_heads", False),
            Field("use_parallel_residual", "parallel_residual", False),
        ),
        ignored=NAMES,
    ),
    layer={**ATTENTION, **FEED_FORWARD, **NORMS},
    fractional=True,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"bos_token_id": 0, "eos_token_id": 0},
)
MAPPING = FORM.mapping()
