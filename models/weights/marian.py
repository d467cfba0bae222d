"""Marian's models as Hugging Face has them: configuration, classes, tensors."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ..layers import sinusoidal_positions
from ..transformer import EncoderDecoderConfig
from .fields import ACTIVATIONS, Field, Fields, Only, class_of, ours_of, theirs_of
from .generation import NAMES
from .rules import (
    FROM_HEADS,
    LINEAR,
    ROW,
    Known,
    Row,
    Table,
    WeightsError,
    embedding,
    linear,
    norm,
)

FIELDS = Fields(
    (
        Field("vocab_size", "source_vocab_size", 58101),
        Field("decoder_vocab_size", "vocab_size", 58101),
        Field("share_encoder_decoder_embeddings", "share_embeddings", True),
        Field("tie_word_embeddings", "tie_output", True),
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
        Only("encoder_layerdrop", (0.0,)),
        Only("decoder_layerdrop", (0.0,)),
        Only("is_encoder_decoder", (True,)),
        Only("is_decoder", (False,)),
        # Of the time when BART's code ran these models too.
        Only("static_position_embeddings", (True,)),
        Only("normalize_before", (False,)),
        Only("normalize_embedding", (False,)),
        Only("add_final_layer_norm", (False,)),
        Only("do_blenderbot_90_layernorm", (False,)),
    ),
    # The bias of logits was always there, learned positions never, and classifiers are BART's.
    NAMES
    | {"add_bias_logits", "extra_pos_embeddings", "classif_dropout", "init_std"}
    | {"chunk_size_feed_forward"},
)
ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
"""Other names of a field."""
CLASSES = ("MarianMTModel", "MarianModel")
"""With logits, which have a bias, and without."""
FIXED: dict[str, Any] = {
    "attention_bias": True,
    "norm_position": "post",
    "norm_eps": 1e-5,
    "positions": "sinusoidal",
    "position_base": 10_000.0,
    "position_layout": "halves",
}
"""What the configuration does not say."""

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


def table(config: EncoderDecoderConfig) -> Table:
    """The tensors of a model."""
    prefix = PREFIX if config.output_bias else ""
    source, target = (f"{prefix}{side}.embed_tokens" for side in STACKS)
    known: list[Known] = []
    if config.share_embeddings:
        tokens = f"{prefix}shared"
        known += [Known(f"{name}.weight", same_as=f"{tokens}.weight") for name in (source, target)]
        rows = [*embedding("token_embedding", tokens)]
    else:
        tokens = target
        known.append(Known(f"{PREFIX}shared.weight"))  # where it stands beside them it is idle
        rows = [*embedding("source_embedding", source), *embedding("token_embedding", target)]
    if config.tie_output:
        known.append(Known("lm_head.weight", same_as=f"{tokens}.weight"))
        # Of tied tensors some files have the first of the alphabet.
        legacy = ((PREFIX + tokens.removeprefix(PREFIX), "lm_head"),)
    else:
        rows += embedding("output_embedding", "lm_head")
        legacy = LEGACY
    if config.output_bias:
        rows.append(Row(("output_bias",), "final_logits_bias", ROW))
    positions = functools.partial(
        sinusoidal_positions, config.max_length, config.d_model, layout="halves"
    )
    for side, layer in STACKS.items():
        known.append(Known(f"{PREFIX}{side}.embed_positions.weight", value=positions))
        rows += _layer(f"{side}/layers", f"{prefix}{side}.layers.{{i}}", layer)
    return Table(tuple(rows), tuple(known), PREFIX, legacy)


def _layer(ours: str, theirs: str, parts: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    for part, name in parts.items():
        path, tensor = f"{ours}/{part}", f"{theirs}.{name}"
        if part.endswith("_norm"):
            rows += norm(path, tensor)
        else:
            rows += linear(path, tensor, FROM_HEADS if part.endswith("/output") else LINEAR)
    return rows


def config(theirs: Mapping[str, Any], source: str) -> EncoderDecoderConfig:
    """Ours of theirs.

    Raises:
      WeightsError: a field, or the class that wrote the model, is not supported.
    """
    written = class_of(theirs, CLASSES, source)
    settings = ours_of(FIELDS, _unaliased(theirs, source), source)
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
    with_logits = written == CLASSES[0]
    # A body without logits is given those that need no tensor.
    settings["tie_output"] |= not with_logits
    return EncoderDecoderConfig(**settings, **FIXED, output_bias=with_logits)


def _unaliased(theirs: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Every field by its own name."""
    named = {name: value for name, value in theirs.items() if name not in ALIASES}
    for alias, name in ALIASES.items():
        value = theirs.get(alias)
        if value is not None and named.setdefault(name, value) != value:
            raise WeightsError(
                f"{source}: {alias} {value!r} is another name of {name}, which is {named[name]!r}: "
                "take the wrong one out"
            )
    if not named.get("decoder_vocab_size") and "vocab_size" in named:
        named["decoder_vocab_size"] = named["vocab_size"]
    return named


def fields(config: EncoderDecoderConfig) -> dict[str, Any]:
    """Theirs of ours, without the ids of special tokens: those are the tokenizer's.

    Raises:
      WeightsError: transformers has no such model.
    """
    _check(config)
    decoder = config.decoder
    settings = dataclasses.replace(
        config,
        d_ff=config.feed_forward_dim,
        num_decoder_layers=decoder.num_layers,
        decoder_num_heads=decoder.num_heads,
        decoder_d_ff=decoder.feed_forward_dim,
    )
    return {
        **theirs_of(FIELDS, settings),
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "pad_token_id": None,  # by default it is one of a large vocabulary
        "model_type": "marian",
        "architectures": [CLASSES[0] if config.output_bias else CLASSES[1]],
    }


def _check(config: EncoderDecoderConfig) -> None:
    """Raises WeightsError where Marian cannot say what the configuration does."""
    wanted = dict(FIXED)
    if any(half.key_dim != half.head_dim for half in (config, config.decoder)):
        wanted["d_k"] = None
    if not config.tie_output:
        wanted["share_embeddings"] = False
    differing = {name: x for name, x in wanted.items() if getattr(config, name) != x}
    if differing:
        has = ", ".join(f"{name} {getattr(config, name)!r}" for name in differing)
        needs = ", ".join(f"{name} {x!r}" for name, x in differing.items())
        raise WeightsError(f"no Marian model has {has}: train one with {needs} to write it as such")
