"""Marian's models as Hugging Face has them, and Pegasus': configuration, classes, tensors.

Pegasus' are Marian's with norms before the sublayers, and with one table for everything.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ..nn.layers import sinusoidal_positions
from ..transformer import EncoderDecoderConfig
from .config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from .equivalent_params import as_marian
from .generation_config import NAMES
from .registry import HFMapping
from .tensor_mapping import (
    FROM_HEADS,
    LINEAR,
    ROW,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    linear,
    norm,
)

SIZES = (
    Field("d_model", "d_model", 1024),
    Field("max_position_embeddings", "max_length", 1024),
    Field("encoder_layers", "num_layers", 12),
    Field("encoder_attention_heads", "num_heads", 16),
    Field("encoder_ffn_dim", "d_ff", 4096),
    Field("decoder_layers", "num_decoder_layers", 12),
    Field("decoder_attention_heads", "decoder_num_heads", 16),
    Field("decoder_ffn_dim", "decoder_d_ff", 4096),
    Field("activation_function", "activation", "gelu", ACTIVATIONS),
    Field("scale_embedding", "scale_embedding", False),
    Field("dropout", "dropout_rate", 0.1),
    Field("attention_dropout", "attention_dropout_rate", 0.0),
    Field("activation_dropout", "activation_dropout_rate", 0.0),
    # Of training only, but what is fine-tuned here would not have it.
    FixedField("encoder_layerdrop", (0.0,)),
    FixedField("decoder_layerdrop", (0.0,)),
    FixedField("is_encoder_decoder", (True,)),
    FixedField("is_decoder", (False,)),
    # Of the time when BART's code ran these models too.
    FixedField("static_position_embeddings", (True,)),
    FixedField("normalize_embedding", (False,)),
    FixedField("do_blenderbot_90_layernorm", (False,)),
)
# The bias of logits was always there, learned positions never, and classifiers are BART's.
IGNORED = (
    NAMES
    | {"add_bias_logits", "extra_pos_embeddings", "classif_dropout", "init_std"}
    | {"chunk_size_feed_forward"}
)
ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
FIELDS = {
    "marian": ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "source_vocab_size", 58101),
            Field("decoder_vocab_size", "vocab_size", 58101),
            Field("share_encoder_decoder_embeddings", "share_embeddings", True),
            Field("tie_word_embeddings", "tie_output", True),
            FixedField("normalize_before", (False,)),
            FixedField("add_final_layer_norm", (False,)),
        ),
        IGNORED,
        ALIASES,
    ),
    "pegasus": ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 50265),
            FixedField("tie_word_embeddings", (True,)),
            FixedField("normalize_before", (True,)),
            FixedField("add_final_layer_norm", (True,)),
        ),
        IGNORED,
        ALIASES,
    ),
}
CLASSES = {
    "marian": ("MarianMTModel", "MarianModel"),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusModel"),
}
"""With logits, which have a bias, and without."""
FIXED: dict[str, Any] = {
    "attention_bias": True,
    "norm_eps": 1e-5,
    "positions": "sinusoidal",
    "position_base": 10_000.0,
    "position_layout": "halves",
}
"""What the configuration does not say."""
NORMS = {"marian": "post", "pegasus": "pre"}

PREFIX = "model."
# Ours, and the same part of a layer.
LAYER = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "feed_forward/up": "fc1",
    "feed_forward/down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
CROSS = {
    "cross_attention/query": "encoder_attn.q_proj",
    "cross_attention/key": "encoder_attn.k_proj",
    "cross_attention/value": "encoder_attn.v_proj",
    "cross_attention/output": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
}
STACKS = {"encoder": LAYER, "decoder": LAYER | CROSS}
# Before transformers 5 tables could be one though the output was not.
LEGACY = (("encoder.embed_tokens", "shared"), ("decoder.embed_tokens", "shared"))


def family_of(config: EncoderDecoderConfig) -> str:
    """The family that a configuration is of."""
    return "pegasus" if config.norm_position == "pre" else "marian"


def tensor_mapping(config: EncoderDecoderConfig) -> TensorMapping:
    """The tensors of a model."""
    prefix = PREFIX if config.output_bias else ""
    source, target = (f"{prefix}{side}.embed_tokens" for side in STACKS)
    known: list[IgnoredTensor] = []
    if config.share_embeddings:
        tokens = f"{prefix}shared"
        known += [
            IgnoredTensor(f"{name}.weight", same_as=f"{tokens}.weight") for name in (source, target)
        ]
        rows = [*embedding("token_embedding", tokens)]
    else:
        tokens = target
        known.append(
            IgnoredTensor(f"{PREFIX}shared.weight")
        )  # where it stands beside them it is idle
        rows = [*embedding("source_embedding", source), *embedding("token_embedding", target)]
    if config.tie_output:
        known.append(IgnoredTensor("lm_head.weight", same_as=f"{tokens}.weight"))
        # Of tied tensors some files have the first of the alphabet.
        legacy = ((PREFIX + tokens.removeprefix(PREFIX), "lm_head"),)
    else:
        rows += embedding("output_embedding", "lm_head")
        legacy = LEGACY
    if config.output_bias:
        rows.append(TensorRule(("output_bias",), "final_logits_bias", ROW))
    positions = functools.partial(
        sinusoidal_positions, config.max_length, config.d_model, layout="halves"
    )
    for side, layer in STACKS.items():
        own = f"{PREFIX}{side}.embed_positions.weight"
        known.append(IgnoredTensor(own, value=positions, exported=config.norm_position == "pre"))
        rows += _layer(f"{side}/layers", f"{prefix}{side}.layers.{{i}}", layer)
        if config.norm_position == "pre":
            rows += norm(f"{side}/final_norm", f"{prefix}{side}.layer_norm")
    return TensorMapping(tuple(rows), tuple(known), PREFIX, legacy)


def _layer(ours: str, theirs: str, parts: Mapping[str, str]) -> list[TensorRule]:
    rows: list[TensorRule] = []
    for part, name in parts.items():
        path, tensor = f"{ours}/{part}", f"{theirs}.{name}"
        if part.endswith("_norm"):
            rows += norm(path, tensor)
        else:
            rows += linear(path, tensor, FROM_HEADS if part.endswith("/output") else LINEAR)
    return rows


def config_from_hf(theirs: Mapping[str, Any], source: str) -> EncoderDecoderConfig:
    """Ours of theirs.

    Raises:
      WeightsError: a field, or the class that wrote the model, is not supported.
    """
    name = theirs["model_type"]
    written = model_class(theirs, CLASSES[name], source)
    if name == "marian" and not theirs.get("decoder_vocab_size") and "vocab_size" in theirs:
        theirs = {**theirs, "decoder_vocab_size": theirs["vocab_size"]}
    settings = settings_from_hf(FIELDS[name], theirs, source)
    settings |= {**FIXED, "norm_position": NORMS[name]}
    with_logits = written == CLASSES[name][0]
    if name == "marian":
        _tell_tables(settings, source)
        # A body without logits is given those that need no tensor.
        settings["tie_output"] |= not with_logits
    return EncoderDecoderConfig(**settings, output_bias=with_logits)


def _tell_tables(settings: dict[str, Any], source: str) -> None:
    """Which tables there are, from Marian's fields."""
    own, target = settings["source_vocab_size"], settings["vocab_size"]
    if settings["share_embeddings"] and own != target:
        raise WeightsError(
            f"{source}: decoder_vocab_size {target} is not vocab_size {own}, though "
            "share_encoder_decoder_embeddings is true: set it to false, or the sizes alike"
        )
    # Without the tie to the output there is none at all.
    settings["share_embeddings"] &= settings["tie_output"]
    if settings["share_embeddings"]:
        settings["source_vocab_size"] = None


def config_to_hf(config: EncoderDecoderConfig) -> dict[str, Any]:
    """Theirs of ours, without the ids of special tokens: those are the tokenizer's.

    Raises:
      WeightsError: transformers has no such model.
    """
    name = family_of(config)
    _check(config, name)
    decoder = config.decoder
    settings = dataclasses.replace(
        config,
        d_ff=config.feed_forward_dim,
        num_decoder_layers=decoder.num_layers,
        decoder_num_heads=decoder.num_heads,
        decoder_d_ff=decoder.feed_forward_dim,
    )
    return {
        **settings_to_hf(FIELDS[name], settings),
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "pad_token_id": None,  # by default it is one of a large vocabulary
        "model_type": name,
        "architectures": [CLASSES[name][0 if config.output_bias else 1]],
    }


def _check(config: EncoderDecoderConfig, name: str) -> None:
    """Raises WeightsError where the family cannot say what the configuration does."""
    wanted = dict(FIXED)
    if any(half.key_dim != half.head_dim for half in (config, config.decoder)):
        wanted["d_k"] = None
    if name == "pegasus":
        wanted |= {"tie_output": True, "share_embeddings": True}
    elif not config.tie_output:
        wanted["share_embeddings"] = False
    differing = {field: x for field, x in wanted.items() if getattr(config, field) != x}
    if differing:
        has = ", ".join(f"{field} {getattr(config, field)!r}" for field in differing)
        needs = ", ".join(f"{field} {x!r}" for field, x in differing.items())
        raise WeightsError(
            f"no {name.capitalize()} model has {has}: train one with {needs} to write it as such"
        )


MAPPING = HFMapping(
    model_types=("marian", "pegasus"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    to_equivalent=as_marian,
)
