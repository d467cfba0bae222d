"""Falcon in the Hugging Face format."""

import dataclasses
from collections.abc import Mapping

from .....data.common.fields import require
from .....data.common.json_text import JsonObject
from ....decoders.gpt.falcon import FalconConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, FixedField, Settings, take_field
from ...form import head_classes
from ...generation_config import NAMES
from ...tensors.mapping import WeightsError
from ..rotary import SCALINGS, rotary_settings, rotary_to_hf, take_rotary
from .gpt_form import GPTForm

# For each combination of new_decoder_architecture, parallel_attn and num_ln_in_parallel_attn, the
# value of `residual`.
RESIDUALS: dict[object, str] = {
    **dict.fromkeys([(True, True, None), (True, True, 2)], "two_norms"),
    **dict.fromkeys([(True, True, 1), (False, True, None), (False, True, 1)], "one_norm"),
    **dict.fromkeys([(False, False, None), (False, False, 1), (False, False, 2)], "sequential"),
}
"""The combinations of fields that transformers can run."""
FIRST, SECOND = "attention_norm", "feed_forward_norm"
NORMS = {
    "one_norm": {FIRST: "input_layernorm"},
    "two_norms": {FIRST: "ln_attn", SECOND: "ln_mlp"},
    "sequential": {FIRST: "input_layernorm", SECOND: "post_attention_layernorm"},
}
"""The names of the norms for each value of `residual`."""


def _take_layer(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the order of the sublayers, and the number of key/value heads."""
    is_new = take_field(fields, "new_decoder_architecture", False, source)
    is_parallel = take_field(fields, "parallel_attn", True, source)
    norms = take_field(fields, "num_ln_in_parallel_attn", None, source, kind=int)
    settings["residual"] = residual = RESIDUALS.get((is_new, is_parallel, norms))
    require(
        residual,
        f"{source}: new_decoder_architecture {is_new}, parallel_attn {is_parallel}, "
        f"num_ln_in_parallel_attn {norms} contradict each other: correct one of them",
        WeightsError,
    )
    # In the newer architecture, groups of query heads share a key/value head. The older
    # architecture has one key/value head in total, or one for each query head.
    num_heads = fields.get("num_attention_heads", 71)
    number = take_field(fields, "num_kv_heads", None, source, kind=int) or num_heads
    is_single = take_field(fields, "multi_query", True, source) and not is_new
    require(
        number == num_heads or is_single or is_new,
        f"{source}: num_kv_heads {number} without new_decoder_architecture is not supported: "
        f"only num_attention_heads, {num_heads}",
        WeightsError,
    )
    number = 1 if is_single else number
    settings["num_kv_heads"] = None if number == num_heads else number


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the fields that describe positions, and the fields that determine the kind of layer."""
    _take_layer(fields, settings, source)
    max_length = fields.get("max_position_embeddings", 2048)
    rotary = take_rotary(fields, source, default_base=10_000.0)
    rotary = rotary_settings(rotary, source, kinds=SCALINGS, max_length=max_length)
    fraction = rotary.pop("rope_fraction", 1)
    problem = f"{source}: partial_rotary_factor {fraction!r} is not supported: only 1.0"
    require(fraction == 1, problem, WeightsError)
    rotary["position_base"] = float(rotary.pop("rope_base"))
    # A model with ALiBi does not read the rotary fields.
    settings |= {"positions": "alibi"} if take_field(fields, "alibi", False, source) else rotary
    if fields.get("classifier_dropout") is None:
        fields["classifier_dropout"] = fields.get("hidden_dropout", 0.0)


def _own_fields(config: FalconConfig) -> JsonObject:
    is_parallel = config.residual != "sequential"
    is_grouped = config.kv_heads not in (1, config.num_heads)
    require(
        not is_grouped or is_parallel,
        f"falcon has no residual 'sequential' with num_kv_heads {config.kv_heads}: only 1 or "
        f"num_heads, {config.num_heads}",
        WeightsError,
    )
    # Only the newer architecture has two norms or several groups of heads.
    return {
        "alibi": config.positions == "alibi",
        "new_decoder_architecture": is_grouped or config.residual == "two_norms",
        "num_ln_in_parallel_attn": 2 if config.residual == "two_norms" else 1,
        "parallel_attn": is_parallel,
        "multi_query": config.kv_heads == 1,
        "num_kv_heads": config.kv_heads,
        "rope_parameters": rotary_to_hf(config.position_base, config.rope_scaling),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconForm(GPTForm[FalconConfig]):
    """The conversion of Falcon, whose norms have different names in different models."""

    def parts_of(self, config: FalconConfig) -> Mapping[str, str]:
        """Returns the transformers name of each module in a layer."""
        return {**self.parts, **NORMS[config.residual]}


FORM = FalconForm(
    config=FalconConfig,
    model_type="falcon",
    classes=head_classes(FalconConfig, "Falcon"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 65_024),
            Field("max_position_embeddings", "max_length", 2048),
            Field("num_hidden_layers", "num_layers", 32),
            Field("hidden_size", "d_model", 4544),
            Field("num_attention_heads", "num_heads", 71),
            Field("ffn_hidden_size", "d_ff", None, kind=int),
            Field("activation", "activation", "gelu", ACTIVATIONS),
            Field("layer_norm_epsilon", "norm_eps", 1e-5),
            Field("classifier_dropout", "classifier_dropout_rate", 0.0),
            Field("bias", "use_bias", False),
            Field("tie_word_embeddings", "tie_output", True),
            Field("hidden_dropout", "dropout_rate", 0.0),
            Field("attention_dropout", "attention_dropout", 0.0),
            FixedField("apply_residual_connection_post_layernorm", (False,)),
        ),
        ignored=NAMES | {"ff_factor"},
        aliases={"n_embed": "hidden_size"},
    ),
    allowed={"positions": ("rotary", "alibi"), "position_base": (), "use_bias": ()},
    prefix="transformer.",
    tokens="word_embeddings",
    layers="h.{i}",
    joined="self_attention.query_key_value",
    parts={
        "attention/output": "self_attention.dense",
        "feed_forward/up": "mlp.dense_h_to_4h",
        "feed_forward/down": "mlp.dense_4h_to_h",
    },
    body={"final_norm": "ln_f"},
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"bos_token_id": 11, "eos_token_id": 11},
)
MAPPING = FORM.mapping()
