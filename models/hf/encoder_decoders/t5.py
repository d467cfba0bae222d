"""T5 and mT5 in the Hugging Face format: configuration, classes and tensors.

transformers 5 ignores `tie_word_embeddings` for tying: a model's output is tied to its embeddings
unless its files have a different tensor for the output. `tie_word_embeddings`, like
`scale_decoder_outputs`, only decides whether the decoder's output is multiplied by 1 / √D before it
is projected.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from ....data.common.fields import require
from ....data.common.json_text import JsonObject
from ...encoder_decoders.t5 import T5Config
from ..config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    HFConfig,
    Settings,
    check_exportable,
    model_class,
    settings_from_hf,
    settings_to_hf,
    typed_field,
)
from ..generation_config import NAMES
from ..registry import HFMapping
from ..tensors.layout import LINEAR, TABLE
from ..tensors.mapping import (
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    layer_rules,
    norm,
)
from ..tensors.read import TensorSource


def _fields(vocab_size: int, d_ff: int, num_layers: int, num_heads: int) -> ConfigMapping:
    """Returns the fields of a model type, given the defaults that differ between types."""
    return ConfigMapping(
        (
            Field("vocab_size", "vocab_size", vocab_size),
            Field("d_model", "d_model", 512),
            Field("d_kv", "d_head", 64),
            Field("d_ff", "d_ff", d_ff),
            Field("num_layers", "num_layers", num_layers),
            Field("num_decoder_layers", "num_decoder_layers", None, kind=int),
            Field("num_heads", "num_heads", num_heads),
            Field("relative_attention_num_buckets", "position_buckets", 32),
            Field("relative_attention_max_distance", "position_distance", 128),
            Field("dropout_rate", "dropout_rate", 0.1),
            Field("layer_norm_epsilon", "norm_eps", 1e-6),
            # Only older files have this field, and transformers does not read it.
            Field("n_positions", "max_length", 512),
            FixedField("is_encoder_decoder", (True,)),
            FixedField("is_decoder", (False,)),
        ),
        # `feed_forward_proj` and the two fields that repeat it, and the fields of the output, are
        # read below.
        ignored=NAMES | FEED_FORWARD | OUTPUT | {"initializer_factor"},
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
        },
    )


FEED_FORWARD = frozenset({"feed_forward_proj", "dense_act_fn", "is_gated_act"})
OUTPUT = frozenset({"tie_word_embeddings", "scale_decoder_outputs"})
FIELDS = {"t5": _fields(32_128, 2048, 6, 8), "mt5": _fields(250_112, 1024, 8, 6)}
FEED_FORWARD_DEFAULTS = {"t5": "relu", "mt5": "gated-gelu"}
CLASSES = {
    "t5": ("T5ForConditionalGeneration", "T5Model", "T5WithLMHeadModel"),
    "mt5": ("MT5ForConditionalGeneration", "MT5Model"),
}
"""The class with logits, the class without logits, and an older name of the class with logits."""

TOKENS = "shared.weight"
OUTPUT_TENSOR = "lm_head.weight"
# Older files store the shared embedding table under one or more of these names, and not always
# under the first.
TABLE_NAMES = ("shared", "decoder.embed_tokens", "encoder.embed_tokens")
# The modules of a layer of the encoder or the decoder: the path in flaxzoo, and the name in
# transformers.
SELF_ATTENTION = {
    "attention/query": "layer.0.SelfAttention.q",
    "attention/key": "layer.0.SelfAttention.k",
    "attention/value": "layer.0.SelfAttention.v",
    "attention/output": "layer.0.SelfAttention.o",
    "attention_norm": "layer.0.layer_norm",
}
CROSS_ATTENTION = {
    "cross_attention/query": "layer.1.EncDecAttention.q",
    "cross_attention/key": "layer.1.EncDecAttention.k",
    "cross_attention/value": "layer.1.EncDecAttention.v",
    "cross_attention/output": "layer.1.EncDecAttention.o",
    "cross_attention_norm": "layer.1.layer_norm",
}


def _feed_forward(index: int, *, gated: bool) -> dict[str, str]:
    """Returns the modules of a feed-forward block, given the index of the sublayer."""
    block = f"layer.{index}.DenseReluDense"
    up = {"feed_forward/gate": f"{block}.wi_0", "feed_forward/up": f"{block}.wi_1"}
    if not gated:
        up = {"feed_forward/up": f"{block}.wi"}
    return {
        **up,
        "feed_forward/down": f"{block}.wo",
        "feed_forward_norm": f"layer.{index}.layer_norm",
    }


def tensor_mapping(config: T5Config) -> TensorMapping:
    """Returns the mapping from the parameters of a model to tensors."""
    # The encoder and the decoder share one embedding table, which files may contain several times.
    rules = [*embedding("token_embedding", "shared")]
    ignored = [
        IgnoredTensor("encoder.embed_tokens.weight", same_as=TOKENS),
        IgnoredTensor("decoder.embed_tokens.weight", same_as=TOKENS),
        # An obsolete bias of cross-attention, which transformers does not read.
        IgnoredTensor("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ]
    names = TABLE_NAMES
    if config.tie_output:
        ignored.append(IgnoredTensor(OUTPUT_TENSOR, same_as=TOKENS))
        names = (*names, "lm_head")
    else:
        rules += embedding("output_embedding", "lm_head")
    # The layers of the encoder and the decoder. The feed-forward block is the last sublayer.
    halves = {
        "encoder": SELF_ATTENTION | _feed_forward(1, gated=config.gated),
        "decoder": SELF_ATTENTION | CROSS_ATTENTION | _feed_forward(2, gated=config.gated),
    }
    for half, parts in halves.items():
        block = f"{half}.block.{{i}}"
        rules += layer_rules(
            f"{half}/layers", block, parts, layout=LINEAR, linear_bias=False, norm_bias=False
        )
        # Files store the distance biases in the first layer; all layers add them.
        bias = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(TensorRule((f"{half}/position_bias/embedding",), bias, TABLE))
        rules += norm(f"{half}/final_norm", f"{half}.final_layer_norm", bias=False)
    legacy = tuple(itertools.pairwise(names))
    return TensorMapping(tuple(rules), tuple(ignored), legacy_names=legacy)


def config_from_hf(hf_config: HFConfig, source: str) -> T5Config:
    """Converts the content of a `config.json`.

    Args:
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: A field, or the class that wrote the model, is not supported.
    """
    # T5 and mT5 differ in defaults and in the scale of the output.
    name = str(hf_config["model_type"])
    model_class(hf_config, CLASSES[name], source)
    settings = settings_from_hf(FIELDS[name], hf_config, source)
    settings |= _activation(hf_config, FEED_FORWARD_DEFAULTS[name], source)
    tied = typed_field(hf_config, "tie_word_embeddings", None, source, kind=bool)
    scaled = typed_field(hf_config, "scale_decoder_outputs", None, source, kind=bool)
    if "scale_decoder_outputs" not in hf_config:
        scaled = tied is not False
    scaled = scaled and name == "t5"
    # Only the tensors show whether the output is tied (`as_stored`).
    settings |= {"scale_output": bool(scaled), "tie_output": tied is not False}
    if settings["num_decoder_layers"] == settings["num_layers"]:
        settings["num_decoder_layers"] = None
    return T5Config(**settings)


def _activation(hf_config: HFConfig, default: str, source: str) -> Settings:
    """Returns the activation of the feed-forward layers and whether they are gated."""
    written = hf_config.get("feed_forward_proj", default)
    *gate, activation = str(written).split("-")
    require(
        isinstance(written, str) and gate in ([], ["gated"]),
        f"{source}: feed_forward_proj {written!r} is not supported: only the name of an "
        "activation, or gated- and that name",
        WeightsError,
    )
    # In transformers, "gated-gelu" denotes the approximation of GELU by tanh.
    if written == "gated-gelu":
        activation = "gelu_new"
    # transformers also writes both values as separate fields, which take precedence.
    activation = hf_config.get("dense_act_fn", activation)
    gated = typed_field(hf_config, "is_gated_act", bool(gate), source)
    if activation not in ACTIVATIONS:
        name = "dense_act_fn" if "dense_act_fn" in hf_config else "feed_forward_proj"
        raise WeightsError(
            f"{source}: {name} {hf_config[name]!r} is not supported: only "
            f"{', '.join(ACTIVATIONS)}, and the same behind gated-"
        )
    return {"activation": ACTIVATIONS[str(activation)], "gated": gated}


def as_stored(config: T5Config, tensors: Callable[[], TensorSource]) -> T5Config:
    """Returns the configuration with a tied output unless the files have a separate output matrix.

    transformers ties the output to the embedding unless the two tensors differ, regardless of
    `config.json`.
    """
    files = tensors()
    names = files.shapes().keys()
    table = next((n for part in TABLE_NAMES if (n := f"{part}.weight") in names), "")
    tied = OUTPUT_TENSOR not in names or not table
    if not tied:
        tied = np.array_equal(files.read(OUTPUT_TENSOR), files.read(table))
        # Equal matrices would diverge in training, so keep two tensors if the configuration has an
        # untied output.
        tied = tied and config.tie_output
    return dataclasses.replace(config, tie_output=tied)


def config_to_hf(config: T5Config) -> JsonObject:
    """Converts a configuration to the content of a `config.json`.

    The ids of special tokens are left out, because they belong to the tokenizer.

    Raises:
      WeightsError: transformers has no such model.
    """
    d_head = config.head_dim
    check_exportable(
        config, {"scale_scores": (False,), "d_k": (None, d_head), "d_v": (None, d_head)}, "t5"
    )
    # Write sizes as numbers, even if they are None in the configuration.
    explicit = dataclasses.replace(
        config,
        d_head=d_head,
        d_ff=config.feed_forward_dim,
        num_decoder_layers=config.decoder.num_layers,
    )
    activation = next(hf for hf, name in ACTIVATIONS.items() if name == config.activation)
    return {
        **settings_to_hf(FIELDS["t5"], explicit, model_type="t5", architecture=CLASSES["t5"][0]),
        "feed_forward_proj": f"gated-{activation}" if config.gated else activation,
        "dense_act_fn": activation,
        "is_gated_act": config.gated,
        "tie_word_embeddings": config.tie_output,
        "scale_decoder_outputs": config.scale_output,
    }


_GENERATION = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

MAPPING = HFMapping(
    model_types=("t5", "mt5"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    is_encoder_decoder=True,
    generation_defaults={"t5": _GENERATION, "mt5": _GENERATION},
    as_stored=as_stored,
)
