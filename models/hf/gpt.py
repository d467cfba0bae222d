"""OpenAI GPT and GPT-2 as Hugging Face has them: configuration, classes, tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..gpt import GPTConfig
from .config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from .equivalent_params import as_gpt2
from .generation_config import NAMES
from .registry import HFMapping
from .tensor_mapping import (
    TABLE,
    TABLE_FROM_HEADS,
    VECTOR,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    linear,
    norm,
)

SIZES = (
    Field("n_embd", "d_model", 768),
    Field("n_layer", "num_layers", 12),
    Field("n_head", "num_heads", 12),
    Field("resid_pdrop", "dropout_rate", 0.1),
    Field("embd_pdrop", "embedding_dropout", 0.1),
    Field("attn_pdrop", "attention_dropout", 0.1),
    Field("layer_norm_epsilon", "norm_eps", 1e-5),
    Field("tie_word_embeddings", "tie_output", True),
)
# The summary is of classes with two heads; `n_ctx` was another name of `n_positions`, and special
# tokens are among the vocabulary's since.
IGNORED = frozenset(
    """
    n_ctx n_special predict_special_tokens summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj
    """.split()
)
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
FIELDS = {
    "openai-gpt": ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 40478),
            Field("n_positions", "max_length", 512),
            # Its "gelu" was always the one by tanh.
            Field(
                *("afn", "activation", "gelu"),
                {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
            ),
        ),
        IGNORED | NAMES,
        ALIASES,
    ),
    "gpt2": ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 50257),
            Field("n_positions", "max_length", 1024),
            Field("n_inner", "d_ff", None),
            Field("activation_function", "activation", "gelu_new", ACTIVATIONS),
            Field("scale_attn_weights", "scale_scores", True),
            Field("scale_attn_by_inverse_layer_idx", "scale_scores_by_layer", False),
            FixedField("add_cross_attention", (False,)),
        ),
        # Scores in float32, in another order.
        IGNORED | NAMES | {"reorder_and_upcast_attn"},
        ALIASES,
    ),
}
FIXED: dict[str, dict[str, Any]] = {  # what a family's configuration does not say
    "openai-gpt": {"norm_position": "post", "scale_residual_init": False},
    "gpt2": {"norm_position": "pre"},
}
CLASSES = {
    "openai-gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}
"""With its projection on the vocabulary, and without."""

PREFIX = "transformer."
EMBEDDINGS = {"openai-gpt": ("tokens_embed", "positions_embed"), "gpt2": ("wte", "wpe")}


def family_of(config: GPTConfig) -> str:
    """The family that a configuration is of."""
    return "openai-gpt" if config.norm_position == "post" else "gpt2"


def tensor_mapping(config: GPTConfig) -> TensorMapping:
    """The tensors of a model with its projection on the vocabulary."""
    tokens, positions = (PREFIX + name for name in EMBEDDINGS[family_of(config)])
    rows = [*embedding("token_embedding", tokens), *embedding("position_embedding", positions)]
    rows += _layer(PREFIX + "h.{i}")
    if config.norm_position == "pre":
        rows += norm("final_norm", PREFIX + "ln_f")
    # Buffers of older files: the causal mask, its value where hidden, and 0, 1, 2 …
    known = [IgnoredTensor(PREFIX + f"h.*.attn.{name}") for name in ("bias", "masked_bias")]
    known.append(IgnoredTensor(PREFIX + "position_ids"))
    if config.tie_output:
        known.append(IgnoredTensor("lm_head.weight", same_as=f"{tokens}.weight"))
    else:
        rows += embedding("output_embedding", "lm_head")
    return TensorMapping(tuple(rows), tuple(known), PREFIX)


def _layer(theirs: str) -> list[TensorRule]:
    """Queries, keys and values are one map, and every kernel has inputs first."""
    fused, ours = f"{theirs}.attn.c_attn", "layers/attention"
    kernels, biases = (
        tuple(f"{ours}/{part}/{kind}" for part in ("query", "key", "value"))
        for kind in ("kernel", "bias")
    )
    return [
        TensorRule(kernels, f"{fused}.weight", TABLE),
        TensorRule(biases, f"{fused}.bias", VECTOR),
        *linear(f"{ours}/output", f"{theirs}.attn.c_proj", TABLE_FROM_HEADS),
        *linear("layers/feed_forward/up", f"{theirs}.mlp.c_fc", TABLE),
        *linear("layers/feed_forward/down", f"{theirs}.mlp.c_proj", TABLE),
        *norm("layers/attention_norm", f"{theirs}.ln_1"),
        *norm("layers/feed_forward_norm", f"{theirs}.ln_2"),
    ]


def config_from_hf(theirs: Mapping[str, Any], source: str) -> GPTConfig:
    """Ours of theirs.

    Raises:
      WeightsError: a field, or the class that wrote the model, is not supported.
    """
    name = theirs["model_type"]
    settings = settings_from_hf(FIELDS[name], theirs, source) | FIXED[name]
    written = model_class(theirs, CLASSES[name], source)
    # A body without a projection is given the one that needs no tensor.
    settings["tie_output"] |= written == CLASSES[name][1]
    for dropout in ("embedding_dropout", "attention_dropout"):
        if settings[dropout] == settings["dropout_rate"]:
            settings[dropout] = None
    return GPTConfig(**settings)


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Theirs of ours.

    Raises:
      WeightsError: transformers has no such model.
    """
    name = family_of(config)
    settings = dataclasses.replace(
        config,
        embedding_dropout=config.embedding_dropout_rate,
        attention_dropout=config.attention_dropout_rate,
    )
    _check(settings, name)
    return {
        **settings_to_hf(FIELDS[name], settings),
        "model_type": name,
        "architectures": [CLASSES[name][0]],
    }


def _check(config: GPTConfig, name: str) -> None:
    """Raises WeightsError where the family cannot say what the configuration does."""
    only: dict[str, tuple[Any, ...]] = {
        "positions": ("learned",),
        "use_bias": (True,),
        "local_window": (None,),
    }
    if name == "openai-gpt":
        only |= {
            "d_ff": (None, 4 * config.d_model),
            "activation": ("gelu_tanh", "relu", "silu"),
            "scale_scores": (True,),
            "scale_scores_by_layer": (False,),
        }
    for field, values in only.items():
        if (value := getattr(config, field)) not in values:
            choices = ", ".join(map(repr, values))
            raise WeightsError(f"{name} has no {field} {value!r}: only {choices}")


MAPPING = HFMapping(
    model_types=("openai-gpt", "gpt2"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    to_equivalent=as_gpt2,
)
