"""OpenAI GPT and GPT-2 in Hugging Face's form: configuration, classes and tensors."""

import dataclasses

from .....data.common.json_text import JsonObject
from ....decoders.gpt.gpt import GPTConfig
from ...config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    HFConfig,
    Settings,
    check_exportable,
    labels_from_hf,
    labels_to_hf,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from ...equivalent_params import as_gpt2
from ...generation_config import NAMES
from ...registry import HFMapping
from ...tensor_mapping import (
    TABLE,
    TABLE_FROM_HEADS,
    VECTOR,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    embedding,
    layer_rules,
    linear,
    lm_head,
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
# The summary belongs to classes with two heads; `n_ctx` was another name of `n_positions`; special
# tokens are part of the vocabulary now.
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
            # In this family "gelu" has always meant the tanh approximation.
            Field(
                "afn",
                "activation",
                "gelu",
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
            Field("n_inner", "d_ff", None, kind=int),
            Field("activation_function", "activation", "gelu_new", ACTIVATIONS),
            Field("scale_attn_weights", "scale_scores", True),
            Field("scale_attn_by_inverse_layer_idx", "scale_scores_by_layer", False),
            FixedField("add_cross_attention", (False,)),
        ),
        # It only changes the precision and order in which scores are computed.
        IGNORED | NAMES | {"reorder_and_upcast_attn"},
        ALIASES,
    ),
}
FIXED: dict[str, Settings] = {
    "openai-gpt": {"norm_position": "post", "scale_residual_init": False},
    "gpt2": {"norm_position": "pre"},
}
"""Settings that follow from the family alone."""
CLASSES = {
    "openai-gpt": (
        "OpenAIGPTLMHeadModel",
        "OpenAIGPTModel",
        "OpenAIGPTForSequenceClassification",
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification"),
}
"""The class with a projection on the vocabulary, the class without, and the one that classifies
sequences."""

PREFIX = "transformer."
# Parts of a layer, except for the three maps that are one: the path here, and there.
LAYER = {
    "attention/output": "attn.c_proj",
    "feed_forward/up": "mlp.c_fc",
    "feed_forward/down": "mlp.c_proj",
    "attention_norm": "ln_1",
    "feed_forward_norm": "ln_2",
}
EMBEDDINGS = {"openai-gpt": ("tokens_embed", "positions_embed"), "gpt2": ("wte", "wpe")}


def model_type(config: GPTConfig) -> str:
    """Returns the `model_type` of a configuration."""
    return "openai-gpt" if config.norm_position == "post" else "gpt2"


def tensor_mapping(config: GPTConfig) -> TensorMapping:
    """Returns the tensors of a model with its projection on the vocabulary, or its classifier."""
    tokens, positions = (PREFIX + name for name in EMBEDDINGS[model_type(config)])
    layer, attention = PREFIX + "h.{i}", "layers/attention"
    # Query, key and value are one linear map, and every kernel is stored with inputs first.
    kernels, biases = (
        tuple(f"{attention}/{part}/{kind}" for part in ("query", "key", "value"))
        for kind in ("kernel", "bias")
    )
    rules = [
        *embedding("token_embedding", tokens),
        *embedding("position_embedding", positions),
        TensorRule(kernels, f"{layer}.attn.c_attn.weight", TABLE),
        TensorRule(biases, f"{layer}.attn.c_attn.bias", VECTOR),
        *layer_rules("layers", layer, LAYER, layout=TABLE, output_layout=TABLE_FROM_HEADS),
    ]
    if config.norm_position == "pre":
        rules += norm("final_norm", PREFIX + "ln_f")
    # Buffers of older files: the causal mask, the score of hidden positions, and 0, 1, 2 …
    buffers = ("h.*.attn.bias", "h.*.attn.masked_bias", "position_ids")
    ignored = [IgnoredTensor(PREFIX + name) for name in buffers]
    if config.head == "sequence_classification":
        rules += linear("head/classifier", "score", bias=False)
    else:
        output, aliases = lm_head(tokens if config.tie_output else None)
        rules, ignored = rules + output, ignored + aliases
    return TensorMapping(tuple(rules), tuple(ignored), PREFIX)


def config_from_hf(hf_config: HFConfig, source: str) -> GPTConfig:
    """Converts the content of a `config.json`.

    Args:
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: A field, or the class that wrote the model, is not supported.
    """
    name = str(hf_config["model_type"])
    settings = settings_from_hf(FIELDS[name], hf_config, source) | FIXED[name]
    with_projection, _, with_classifier = CLASSES[name]
    architecture = model_class(hf_config, CLASSES[name], source)
    # A body and a classifier have no projection; a tied one needs no tensor.
    settings["tie_output"] |= architecture != with_projection
    if architecture == with_classifier:
        labels = labels_from_hf(hf_config, source)
        settings |= {"head": "sequence_classification", "labels": labels}
    for dropout in ("embedding_dropout", "attention_dropout"):
        if settings[dropout] == settings["dropout_rate"]:
            settings[dropout] = None
    return GPTConfig(**settings)


def config_to_hf(config: GPTConfig) -> JsonObject:
    """Converts a configuration to the content of a `config.json`.

    Raises:
      WeightsError: transformers has no such model.
    """
    name = model_type(config)
    allowed: dict[str, tuple[object, ...]] = {
        "positions": ("learned",),
        "positions_at": ("input",),
        "use_bias": (True,),
        "local_window": (None,),
        "causal": (True,),
        "num_experts": (0,),
        "scale_scores": (True, False),
    }
    if name == "openai-gpt":
        allowed |= {
            "d_ff": (None, 4 * config.d_model),
            "activation": ("gelu_tanh", "relu", "silu"),
            "scale_scores": (True,),
            "scale_scores_by_layer": (False,),
        }
    check_exportable(config, allowed, name)
    settings = dataclasses.replace(
        config,
        embedding_dropout=config.embedding_dropout_rate,
        attention_dropout=config.attention_dropout_rate,
    )
    classifies = config.head == "sequence_classification"
    architecture = CLASSES[name][2 if classifies else 0]
    return {
        **settings_to_hf(FIELDS[name], settings, model_type=name, architecture=architecture),
        **(labels_to_hf(config.labels) if classifies else {}),
    }


MAPPING = HFMapping(
    model_types=("openai-gpt", "gpt2"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    to_hf_equivalent=as_gpt2,
    generation_defaults={"gpt2": {"bos_token_id": 50256, "eos_token_id": 50256}},
)
