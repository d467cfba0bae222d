"""Llama in Hugging Face's format: configuration, classes, tensors."""

import dataclasses

from ....data.io.json_text import JsonObject
from ...decoders.llama import LlamaConfig
from ..config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    HFConfig,
    check_exportable,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from ..generation_config import NAMES
from ..registry import HFMapping
from ..tensor_mapping import (
    IgnoredTensor,
    TensorMapping,
    WeightsError,
    embedding,
    layer_rules,
    lm_head,
    norm,
)

FIELDS = ConfigMapping(
    (
        Field("vocab_size", "vocab_size", 32_000),
        Field("max_position_embeddings", "max_length", 2048),
        Field("num_hidden_layers", "num_layers", 32),
        Field("hidden_size", "d_model", 4096),
        Field("num_attention_heads", "num_heads", 32),
        Field("num_key_value_heads", "num_kv_heads", None, kind=int),
        Field("head_dim", "d_head", None, kind=int),
        Field("intermediate_size", "d_ff", 11_008),
        Field("hidden_act", "activation", "silu", ACTIVATIONS),
        Field("rms_norm_eps", "norm_eps", 1e-6),
        Field("rope_parameters.rope_theta", "rope_base", 10_000.0),
        FixedField("rope_parameters.rope_type", ("default",)),
        Field("tie_word_embeddings", "tie_output", False),
        FixedField("attention_bias", (False,)),
        FixedField("mlp_bias", (False,)),
        FixedField("attention_dropout", (0.0,)),
    ),
    # Another order of the same sums.
    ignored=NAMES | {"pretraining_tp"},
    aliases={
        "rope_theta": "rope_parameters.rope_theta",
        "rope_scaling": "rope_parameters",
        "rope_scaling.type": "rope_parameters.rope_type",
    },
)
CLASSES = ("LlamaForCausalLM", "LlamaModel")
"""With the language-model head, and without."""

# Parts of a layer: the path here, and the name in transformers.
LAYER = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}


def tensor_mapping(config: LlamaConfig) -> TensorMapping:
    """Returns the tensors of a model with its language-model head."""
    tokens = "model.embed_tokens"
    rules, ignored = lm_head(tokens if config.tie_output else None)
    rules = [
        *embedding("token_embedding", tokens),
        *layer_rules("layers", "model.layers.{i}", LAYER, linear_bias=False, norm_bias=False),
        *norm("final_norm", "model.norm", bias=False),
        *rules,
    ]
    # Older files have the rotary frequencies, which follow from the configuration.
    ignored.append(IgnoredTensor("model.layers.*.self_attn.rotary_emb.inv_freq"))
    return TensorMapping(tuple(rules), tuple(ignored), "model.")


def config_from_hf(hf_config: HFConfig, source: str) -> LlamaConfig:
    """Converts a `config.json` to a configuration.

    Raises:
      WeightsError: a field, or the class that wrote the model, is not supported.
    """
    for name in ("rope_scaling", "rope_parameters"):
        scaling = hf_config.get(name) or {}
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
        if kind not in (None, "default"):
            raise WeightsError(
                f"{source}: {name} of type {kind!r} is not supported: choose a checkpoint whose "
                "rotary frequencies are not scaled, for example Llama 3 instead of Llama 3.1"
            )
    settings = settings_from_hf(FIELDS, hf_config, source)
    # A body without a language-model head is given the one that needs no tensor.
    settings["tie_output"] |= model_class(hf_config, CLASSES, source) == "LlamaModel"
    if settings["num_kv_heads"] == settings["num_heads"]:
        settings["num_kv_heads"] = None
    if settings["d_head"] == settings["d_model"] // settings["num_heads"]:
        settings["d_head"] = None
    return LlamaConfig(**settings)


def config_to_hf(config: LlamaConfig) -> JsonObject:
    """Converts a configuration to the fields of a `config.json`.

    Raises:
      WeightsError: transformers has no such model.
    """
    check_exportable(config, {}, "llama")
    explicit = dataclasses.replace(
        config, num_kv_heads=config.kv_heads, d_head=config.head_dim, d_ff=config.feed_forward_dim
    )
    return settings_to_hf(FIELDS, explicit, model_type="llama", architecture=CLASSES[0])


MAPPING = HFMapping(
    model_types=("llama",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    generation_defaults={"llama": {"bos_token_id": 1, "eos_token_id": 2}},
)
