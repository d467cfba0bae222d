"""BART and mBART in Hugging Face's form: configuration, classes and tensors.

The tensors of their layers have Marian's names. In transformers 5, an mBART differs from a BART in
its norms. With heads for labels and answers, its decoder's input begins with the last token of the
source; these two heads are supported for BART only.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ....data.common.json_text import JsonObject, JsonValue
from ...encoder_decoders.bart import BART_HEADS, BartConfig
from ...nn.heads import HEADS
from ...nn.typing import Params
from ..config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    HFConfig,
    check_exportable,
    labels_from_hf,
    labels_to_hf,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from ..equivalent_params import with_zeros
from ..generation_config import NAMES
from ..registry import HFMapping
from ..tensor_mapping import (
    ROW,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    TensorSource,
    WeightsError,
    embedding,
    layer_rules,
    linear,
    lm_head,
    norm,
)
from .marian import ALIASES, LEGACY_NAMES, PREFIX, STACKS


def _fields(*, pre_norm: bool) -> ConfigMapping:
    """Returns the fields of a model type with norms before or after the sublayers."""
    return ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 50265),
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
            Field("classifier_dropout", "classifier_dropout", 0.0),
            Field("tie_word_embeddings", "tie_output", True),
            # Layer dropout only affects training, but fine-tuning here would not apply it.
            FixedField("encoder_layerdrop", (0.0,)),
            FixedField("decoder_layerdrop", (0.0,)),
            FixedField("is_encoder_decoder", (True,)),
            FixedField("is_decoder", (False,)),
            # Written when one class implemented several families; fixed in these two.
            FixedField("normalize_before", (pre_norm,)),
            FixedField("add_final_layer_norm", (pre_norm,)),
            FixedField("normalize_embedding", (True,)),
            FixedField("static_position_embeddings", (False,)),
            FixedField("do_blenderbot_90_layernorm", (False,)),
        ),
        # Logits always had a bias, and `classif_dropout` is obsolete. The last fields describe how
        # a distilled model was made.
        NAMES
        | {"add_bias_logits", "extra_pos_embeddings", "classif_dropout", "init_std"}
        | {"replacing_rate", "save_step", "student_decoder_layers", "student_encoder_layers"},
        ALIASES,
    )


FIELDS = {"bart": _fields(pre_norm=False), "mbart": _fields(pre_norm=True)}
HEADS_OF = {"bart": BART_HEADS, "mbart": ("seq2seq_lm",)}
CLASSES = {"bart": "Bart", "mbart": "MBart"}
GENERATES, BODY = "ForConditionalGeneration", "Model"
"""Name suffixes of the class with logits, which have a bias, and of the class without."""
NUM_LABELS = 3
"""Number of labels of a BART whose configuration does not name them."""
# Parts of heads whose names in transformers differ from a BERT's: the path here, and the name.
HEAD_MAPS = {
    "sequence_classification": {
        "pooler": "classification_head.dense",
        "head/classifier": "classification_head.out_proj",
    },
}


def model_type(config: BartConfig) -> str:
    """Returns the `model_type` of a configuration."""
    return "mbart" if config.norm_position == "pre" else "bart"


def _class_suffix(config: BartConfig) -> str:
    """Returns the suffix of the class name that a model is exported as."""
    if config.head != "seq2seq_lm":
        return HEADS[config.head].hf_class_suffix
    return GENERATES if config.output_bias else BODY


def tensor_mapping(config: BartConfig) -> TensorMapping:
    """Returns the tensors of a model with its head."""
    prefix = PREFIX if _class_suffix(config) != BODY else ""
    shared = f"{prefix}shared"
    source, target = (f"{prefix}{side}.embed_tokens" for side in STACKS)
    # Older files store a version number of the embeddings.
    ignored = [IgnoredTensor(f"{prefix}{side}.version") for side in STACKS]
    # Embeddings: one for source, target and output, or one each; classes do not read a fourth one.
    if config.share_embeddings:
        rules = [*embedding("token_embedding", shared)]
        ignored += [
            IgnoredTensor(f"{name}.weight", same_as=f"{shared}.weight") for name in (source, target)
        ]
    else:
        rules = [*embedding("source_embedding", source), *embedding("token_embedding", target)]
        zeros = functools.partial(np.zeros, (config.vocab_size, config.d_model), np.float32)
        ignored.append(IgnoredTensor(f"{shared}.weight", value=zeros, exported=True, checked=False))
    legacy_names = LEGACY_NAMES
    if config.head == "seq2seq_lm":
        output, aliases = lm_head(shared if config.tie_output else None)
        rules, ignored = rules + output, ignored + aliases
        if config.output_bias:
            rules.append(TensorRule(("output_bias",), "final_logits_bias", ROW))
    else:
        parts = {f"head/{part}": name for part, name in HEADS[config.head].hf_tensors.items()}
        for part, name in HEAD_MAPS.get(config.head, parts).items():
            rules += linear(part, name)
    if config.share_embeddings:
        # safetensors keeps one name per tied tensor, alphabetically first, so accept any.
        names = ("decoder.embed_tokens", "encoder.embed_tokens")
        legacy_names = (("shared", names[0]), names)
        if config.head == "seq2seq_lm" and config.tie_output:
            legacy_names += ((f"{PREFIX}{names[1]}", "lm_head"),)
    # Both halves.
    for side, names in STACKS.items():
        rules += embedding(f"{side}/position_embedding", f"{prefix}{side}.embed_positions")
        rules += norm(f"{side}/embedding_norm", f"{prefix}{side}.layernorm_embedding")
        rules += layer_rules(f"{side}/layers", f"{prefix}{side}.layers.{{i}}", names)
        if config.norm_position == "pre":
            rules += norm(f"{side}/final_norm", f"{prefix}{side}.layer_norm")
    return TensorMapping(tuple(rules), tuple(ignored), PREFIX, legacy_names)


def config_from_hf(hf_config: HFConfig, source: str) -> BartConfig:
    """Converts the content of a `config.json`; the head comes from `architectures[0]`.

    Args:
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: A field, or the class that wrote the model, is not supported.
    """
    name = str(hf_config["model_type"])
    classes = {f"{CLASSES[name]}{suffix}": "seq2seq_lm" for suffix in (GENERATES, BODY)}
    for head in HEADS_OF[name]:
        classes.setdefault(f"{CLASSES[name]}{HEADS[head].hf_class_suffix}", head)
    cls = model_class(hf_config, list(classes), source)
    settings = settings_from_hf(FIELDS[name], hf_config, source)
    settings["head"] = head = classes[cls]
    settings["norm_position"] = "pre" if name == "mbart" else "post"
    # A model with a separate output matrix does not share embeddings.
    settings["share_embeddings"] = settings["tie_output"]
    # Other heads and bare bodies have no output matrix; assume a tied one, which needs no tensor.
    settings["tie_output"] |= not cls.endswith(GENERATES)
    settings["output_bias"] = cls.endswith(GENERATES)
    if head != "seq2seq_lm":
        settings["start_id"] = _token_id(hf_config, "decoder_start_token_id", source)
        settings["end_id"] = _token_id(hf_config, "eos_token_id", source)
    if HEADS[head].needs_labels:
        settings["labels"] = labels_from_hf({"num_labels": NUM_LABELS, **hf_config}, source)
    return BartConfig(**settings)


def _token_id(hf_config: HFConfig, name: str, source: str) -> int:
    """Returns a special token that labels and answers depend on; a BART's default is 2."""
    value: JsonValue = hf_config.get(name, 2)
    if type(value) is not int:
        raise WeightsError(f"{source}: {name} {value!r} is not supported: only one token's id")
    return value


def as_stored(config: BartConfig, tensors: Callable[[], TensorSource]) -> BartConfig:
    """Returns the configuration without a bias of the logits if the files have none."""
    if config.output_bias and "final_logits_bias" not in tensors().shapes():
        return dataclasses.replace(config, output_bias=False)
    return config


def as_bart(config: BartConfig, params: Params) -> tuple[BartConfig, Params]:
    """Rewrites a model as one with biases in attention and output; missing ones become zeros."""
    equivalent = dataclasses.replace(
        config, attention_bias=True, output_bias=config.head == "seq2seq_lm"
    )
    return equivalent, with_zeros(equivalent, params)


def config_to_hf(config: BartConfig) -> JsonObject:
    """Converts a configuration to the content of a `config.json`.

    The ids of special tokens are left out, because they belong to the tokenizer, except the ones
    that labels and answers depend on.

    Raises:
      WeightsError: transformers has no such model.
    """
    # Settings that transformers fixes for these families.
    name, decoder = model_type(config), config.decoder
    allowed: dict[str, tuple[object, ...]] = {
        "attention_bias": (True,),
        "norm_eps": (1e-5,),
        "positions_at": ("input",),
        "encoder_causal": (False,),
        "head": HEADS_OF[name],
    }
    if any(half.key_dim != half.head_dim for half in (config, decoder)):
        allowed["d_k"] = (None,)
    if any(half.value_dim != half.head_dim for half in (config, decoder)):
        allowed["d_v"] = (None,)
    if _class_suffix(config) == GENERATES:
        allowed["share_embeddings"] = (config.tie_output,)
    if not config.share_embeddings:
        allowed["source_vocab_size"] = (None, config.vocab_size)
    check_exportable(config, allowed, name)
    # State all sizes of both halves.
    explicit = dataclasses.replace(
        config,
        d_ff=config.feed_forward_dim,
        num_decoder_layers=decoder.num_layers,
        decoder_num_heads=decoder.num_heads,
        decoder_d_ff=decoder.feed_forward_dim,
    )
    architecture = CLASSES[name] + _class_suffix(config)
    hf_config = settings_to_hf(FIELDS[name], explicit, model_type=name, architecture=architecture)
    hf_config["tie_word_embeddings"] = config.share_embeddings
    if config.head != "seq2seq_lm":
        hf_config |= {"decoder_start_token_id": config.start_id, "eos_token_id": config.end_id}
    if HEADS[config.head].needs_labels:
        hf_config |= labels_to_hf(config.labels)
    return hf_config


_GENERATION = {"bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2, "pad_token_id": 1}

MAPPING = HFMapping(
    model_types=("bart", "mbart"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    to_hf_equivalent=as_bart,
    as_stored=as_stored,
    is_encoder_decoder=True,
    generation_defaults={
        "bart": {**_GENERATION, "decoder_start_token_id": 2},
        "mbart": _GENERATION,
    },
)
