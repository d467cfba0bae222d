"""Marian and Pegasus in Hugging Face's form: configuration, classes and tensors.

A Pegasus model is a Marian model with pre-norm sublayers and one embedding for source, target and
output.
"""

import dataclasses
import functools

from ....data.common.json_text import JsonObject
from ...encoder_decoders.transformer import EncoderDecoderConfig
from ...nn.positions import sinusoidal_positions
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
)
from ..equivalent_params import as_marian
from ..generation_config import NAMES
from ..registry import HFMapping
from ..tensor_mapping import (
    ROW,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    layer_rules,
    lm_head,
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
    # Layer dropout only affects training, but fine-tuning here would not apply it.
    FixedField("encoder_layerdrop", (0.0,)),
    FixedField("decoder_layerdrop", (0.0,)),
    FixedField("is_encoder_decoder", (True,)),
    FixedField("is_decoder", (False,)),
    # Written when BART's code implemented these models.
    FixedField("static_position_embeddings", (True,)),
    FixedField("normalize_embedding", (False,)),
    FixedField("do_blenderbot_90_layernorm", (False,)),
)
# Logits always had a bias, positions were never learned, and only BART has classifiers.
IGNORED = NAMES | {"add_bias_logits", "extra_pos_embeddings", "classif_dropout", "init_std"}
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
"""The class with logits, which have a bias, and the class without."""
FIXED: Settings = {
    "attention_bias": True,
    "norm_eps": 1e-5,
    "positions": "sinusoidal",
    "positions_at": "input",
    "position_base": 10_000.0,
    "position_layout": "halves",
}
"""Settings that a `config.json` does not contain."""
NORMS = {"marian": "post", "pegasus": "pre"}

PREFIX = "model."
# Parts of a layer: the path here, and the name in transformers.
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
# Before transformers 5 source and target could share an embedding without a tied output.
LEGACY_NAMES = (("encoder.embed_tokens", "shared"), ("decoder.embed_tokens", "shared"))


def model_type(config: EncoderDecoderConfig) -> str:
    """Returns the `model_type` of a configuration."""
    return "pegasus" if config.norm_position == "pre" else "marian"


def tensor_mapping(config: EncoderDecoderConfig) -> TensorMapping:
    """Returns the tensors of a model."""
    prefix = PREFIX if config.output_bias else ""
    source, target = (f"{prefix}{side}.embed_tokens" for side in STACKS)
    ignored: list[IgnoredTensor] = []
    # Embeddings: one for source and target, or one each.
    if config.share_embeddings:
        tokens = f"{prefix}shared"
        ignored += [
            IgnoredTensor(f"{name}.weight", same_as=f"{tokens}.weight") for name in (source, target)
        ]
        rules = [*embedding("token_embedding", tokens)]
    else:
        tokens = target
        # Files store a shared table although models with two embeddings never use it.
        ignored.append(IgnoredTensor(f"{PREFIX}shared.weight"))
        rules = [*embedding("source_embedding", source), *embedding("token_embedding", target)]
    # The output projection: tied to the target embedding, or a separate matrix.
    output, aliases = lm_head(tokens if config.tie_output else None)
    rules, ignored = rules + output, ignored + aliases
    # safetensors keeps one name per tied tensor, alphabetically first, so accept either.
    tied_names = ((PREFIX + tokens.removeprefix(PREFIX), "lm_head"),)
    legacy_names = tied_names if config.tie_output else LEGACY_NAMES
    if config.output_bias:
        rules.append(TensorRule(("output_bias",), "final_logits_bias", ROW))
    # Layers. Positions are a constant, which only Pegasus files must contain.
    positions = functools.partial(
        sinusoidal_positions, config.max_length, config.d_model, layout="halves"
    )
    pre_norm = config.norm_position == "pre"
    for side, names in STACKS.items():
        table = f"{PREFIX}{side}.embed_positions.weight"
        ignored.append(IgnoredTensor(table, value=positions, exported=pre_norm))
        rules += layer_rules(f"{side}/layers", f"{prefix}{side}.layers.{{i}}", names)
        if pre_norm:
            rules += norm(f"{side}/final_norm", f"{prefix}{side}.layer_norm")
    return TensorMapping(tuple(rules), tuple(ignored), PREFIX, legacy_names)


def config_from_hf(hf_config: HFConfig, source: str) -> EncoderDecoderConfig:
    """Converts the content of a `config.json`.

    Args:
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: A field, or the class that wrote the model, is not supported.
    """
    name = str(hf_config["model_type"])
    has_logits = model_class(hf_config, CLASSES[name], source) == CLASSES[name][0]
    # Files without decoder_vocab_size have equal vocabularies.
    is_marian = name == "marian"
    if is_marian and not hf_config.get("decoder_vocab_size") and "vocab_size" in hf_config:
        hf_config = {**hf_config, "decoder_vocab_size": hf_config["vocab_size"]}
    settings = settings_from_hf(FIELDS[name], hf_config, source)
    settings |= {**FIXED, "norm_position": NORMS[name]}
    if is_marian:
        source_size, target_size = settings["source_vocab_size"], settings["vocab_size"]
        if settings["share_embeddings"] and source_size != target_size:
            raise WeightsError(
                f"{source}: decoder_vocab_size {target_size} is not vocab_size {source_size}, "
                "though share_encoder_decoder_embeddings is true: set it to false, or make the "
                "sizes equal"
            )
        # A Marian model with a separate output matrix does not share embeddings.
        settings["share_embeddings"] &= settings["tie_output"]
        if settings["share_embeddings"]:
            settings["source_vocab_size"] = None
        # A bare body has no output matrix; assume a tied one, which needs no tensor.
        settings["tie_output"] |= not has_logits
    return EncoderDecoderConfig(**settings, output_bias=has_logits)


def config_to_hf(config: EncoderDecoderConfig) -> JsonObject:
    """Converts a configuration to the content of a `config.json`.

    The ids of special tokens are left out, because they belong to the tokenizer.

    Raises:
      WeightsError: transformers has no such model.
    """
    name = model_type(config)
    decoder = config.decoder
    allowed: dict[str, tuple[object, ...]] = {field: (x,) for field, x in FIXED.items()}
    allowed["encoder_causal"] = (False,)
    for name_of, sizes in (("d_k", "key_dim"), ("d_v", "value_dim")):
        if any(getattr(half, sizes) != half.head_dim for half in (config, decoder)):
            allowed[name_of] = (None,)
    if name == "pegasus":
        allowed |= {"tie_output": (True,), "share_embeddings": (True,)}
    elif not config.tie_output:
        allowed["share_embeddings"] = (False,)
    check_exportable(config, allowed, name)
    # State all sizes of both halves.
    settings = dataclasses.replace(
        config,
        d_ff=config.feed_forward_dim,
        num_decoder_layers=decoder.num_layers,
        decoder_num_heads=decoder.num_heads,
        decoder_d_ff=decoder.feed_forward_dim,
    )
    architecture = CLASSES[name][0 if config.output_bias else 1]
    return {
        **settings_to_hf(FIELDS[name], settings, model_type=name, architecture=architecture),
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "pad_token_id": None,  # the default may be outside the vocabulary
    }


MAPPING = HFMapping(
    model_types=("marian", "pegasus"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    to_hf_equivalent=as_marian,
    is_encoder_decoder=True,
    generation_defaults={
        "marian": {
            "decoder_start_token_id": 58100,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "pad_token_id": 58100,
        },
        "pegasus": {
            "decoder_start_token_id": 0,
            "eos_token_id": 1,
            "forced_eos_token_id": 1,
            "pad_token_id": 0,
        },
    },
)
