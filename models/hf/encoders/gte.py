"""GTE in the Hugging Face format, for transformers 5 and for the authors' model type `new`."""

import dataclasses
import functools
from collections.abc import Sequence

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...encoders.gte import GteConfig
from ..config_mapping import ConfigMapping, HFConfig, Settings, typed_field
from ..generation_config import NAMES
from ..tensors.mapping import TensorRule, WeightsError, linear
from .encoder_form import BERT_EMBEDDINGS, LEGACY_NAMES, TokenLogits
from .rotary_form import (
    LAYERS,
    MODULES,
    rotary_fields,
    rotary_form,
    take_older_values,
    take_positions,
)

OLDER_VALUES: dict[str, JsonValue] = {
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}
"""Fields of the authors' files that change the network, and their values in all published files."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the fields of positions, and the fields of the authors' files."""
    take_older_values(fields, OLDER_VALUES, source)
    # The authors' scaling "ntk" with factor f multiplies the base by f, and also divides all
    # frequencies by f^(2 / H).
    scaling = fields.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "ntk":
        problem = f"{source}: rope_scaling mixed_b is not supported: only null"
        require(not scaling.get("mixed_b"), problem, WeightsError)
        factor = typed_field(scaling, "factor", 1.0, source)
        base = typed_field(fields, "rope_theta", 10_000.0, source)
        width = typed_field(fields, "hidden_size", 768, source)
        size = width // typed_field(fields, "num_attention_heads", 12, source)
        fields["rope_scaling"] = {"type": "linear", "factor": factor ** (2 / size)}
        fields["rope_theta"] = base * factor
    take_positions(fields, settings, source, 160_000.0)


def _output_rules(config: GteConfig, prefix: str, layers: str) -> Sequence[TensorRule]:
    """Returns the rules of the feed-forward layers' last linear map, the only map with a bias."""
    del config
    return linear("layers/feed_forward/down", f"{prefix}{layers}.mlp.down_proj")


LM_HEAD = TokenLogits("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias", "lm_head.decoder")
FORM = rotary_form(
    GteConfig,
    "gte",
    "Gte",
    fields=ConfigMapping(
        rotary_fields(
            vocab_size=250_048,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=8192,
            type_vocab_size=1,
        ),
        NAMES | {"unpad_inputs", "use_memory_efficient_attention"},
    ),
    embeddings=BERT_EMBEDDINGS,
    parts={
        ("attention/query", "attention/key", "attention/value"): "attention.qkv_proj",
        "attention/output": "attention.o_proj",
        "attention_norm": "attn_ln",
        ("feed_forward/up", "feed_forward/gate"): "mlp.up_gate_proj",
        "feed_forward_norm": "mlp_ln",
    },
    token_logits=LM_HEAD,
    own_rules=functools.partial(_output_rules, layers="encoder.layer.{i}"),
    own_settings=_own_settings,
    older_names=(*LEGACY_NAMES, ("gte.", "new.")),
    modules={
        "layers": LAYERS,
        "parts": MODULES,
        "token_logits": LM_HEAD._replace(transform_norm="lm_head.layer_norm"),
        "own_rules": functools.partial(_output_rules, layers=LAYERS),
    },
)


def _config_from_hf(hf_config: HFConfig, source: str) -> GteConfig:
    """Converts the content of a `config.json`, which may name the authors' classes."""
    names = hf_config.get("architectures")
    if isinstance(names, list):
        renamed: list[JsonValue] = [str(name).replace("New", "Gte", 1) for name in names]
        hf_config = {**hf_config, "architectures": renamed}
    return FORM.config_from_hf(hf_config, source)


MAPPING = dataclasses.replace(
    FORM.mapping(), model_types=("gte", "new"), config_from_hf=_config_from_hf
)
