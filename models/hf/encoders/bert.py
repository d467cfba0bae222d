"""BERT, RoBERTa and DistilBERT in Hugging Face's form: configuration, heads and tensors."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ....data.common.json_text import JsonObject
from ...encoders.bert import BertConfig
from ...nn.heads import HEADS, encoder_heads
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
from ..generation_config import NAMES
from ..registry import HFMapping
from ..tensor_mapping import (
    VECTOR,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    TensorSource,
    WeightsError,
    embedding,
    layer_rules,
    linear,
    norm,
)

USUAL = ConfigMapping(
    (
        FixedField("is_decoder", (False, True)),  # the head decides
        Field("vocab_size", "vocab_size", 30522),
        Field("hidden_size", "d_model", 768),
        Field("num_hidden_layers", "num_layers", 12),
        Field("num_attention_heads", "num_heads", 12),
        Field("intermediate_size", "d_ff", 3072),
        Field("hidden_act", "activation", "gelu", ACTIVATIONS),
        Field("hidden_dropout_prob", "dropout_rate", 0.1),
        Field("attention_probs_dropout_prob", "attention_dropout", 0.1),
        Field("max_position_embeddings", "max_length", 512),
        Field("type_vocab_size", "num_token_types", 2),
        Field("layer_norm_eps", "norm_eps", 1e-12),
        FixedField("position_embedding_type", ("absolute",)),
        Field("tie_word_embeddings", "tie_output", True),
        FixedField("add_cross_attention", (False,)),
    ),
    # Those of the pooler stem from the library that first wrote these files, and were never read.
    ignored=NAMES
    | frozenset(
        """
        cross_attention_hidden_size pooler_fc_size pooler_num_attention_heads
        pooler_num_fc_layers pooler_size_per_head pooler_type
        """.split()
    ),
)
DISTIL = ConfigMapping(
    (
        Field("vocab_size", "vocab_size", 30522),
        Field("dim", "d_model", 768),
        Field("n_layers", "num_layers", 6),
        Field("n_heads", "num_heads", 12),
        Field("hidden_dim", "d_ff", 3072),
        Field("activation", "activation", "gelu", ACTIVATIONS),
        Field("dropout", "dropout_rate", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        Field("max_position_embeddings", "max_length", 512),
        Field("tie_word_embeddings", "tie_output", True),
    ),
    # Sinusoidal positions are only the initial values of a trained embedding.
    ignored=NAMES | {"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"},
    aliases={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
)
ROBERTA = dataclasses.replace(
    USUAL,
    fields=(
        *(field for field in USUAL.fields if field.hf != "vocab_size"),
        Field("vocab_size", "vocab_size", 50265),
    ),
)
FIELDS = {"bert": USUAL, "roberta": ROBERTA, "distilbert": DISTIL}

SUFFIXES = {HEADS[head].hf_class_suffix: head for head in encoder_heads()} | {
    "LMHeadModel": "causal_lm"
}
"""The head of each suffix of a class name."""
MISSING_HEADS = {  # heads that transformers does not have
    "bert": (),
    "roberta": ("pretraining", "next_sentence"),
    "distilbert": ("pretraining", "next_sentence", "causal_lm"),
}
CLASSES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}

PREFIXES = {"bert": "bert.", "roberta": "roberta.", "distilbert": "distilbert."}

# Parts of the model: the path here, and the name in transformers.
EMBEDDINGS = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "token_type_embedding": "embeddings.token_type_embeddings",
}
LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
DISTIL_LAYER = {
    "attention/query": "attention.q_lin",
    "attention/key": "attention.k_lin",
    "attention/value": "attention.v_lin",
    "attention/output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "feed_forward/up": "ffn.lin1",
    "feed_forward/down": "ffn.lin2",
    "feed_forward_norm": "output_layer_norm",
}
LAYERS = {
    "bert": ("encoder.layer", LAYER),
    "roberta": ("encoder.layer", LAYER),
    "distilbert": ("transformer.layer", DISTIL_LAYER),
}

# Parts of heads by family.
TOKEN_LOGITS = {  # transform, its norm, bias, and the tied matrix
    "bert": (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
    "distilbert": (
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector.bias",
        "vocab_projector",
    ),
}
POOLER = {
    ("roberta", "sequence_classification"): "classifier.dense",
    ("distilbert", "sequence_classification"): "pre_classifier",
    ("distilbert", "multiple_choice"): "pre_classifier",
}
CLASSIFIER = {("roberta", "sequence_classification"): "classifier.out_proj"}
CLASSIFIER_DROPOUT: dict[tuple[str, str], tuple[str, float | None]] = {  # field, and default
    ("bert", "sequence_classification"): ("classifier_dropout", None),
    ("bert", "token_classification"): ("classifier_dropout", None),
    ("bert", "multiple_choice"): ("classifier_dropout", None),
    ("roberta", "sequence_classification"): ("classifier_dropout", None),
    ("roberta", "token_classification"): ("classifier_dropout", None),
    ("distilbert", "sequence_classification"): ("seq_classif_dropout", 0.2),
    ("distilbert", "multiple_choice"): ("seq_classif_dropout", 0.2),
    ("distilbert", "question_answering"): ("qa_dropout", 0.1),
}
# transformers 4 ties the bias even where the matrix is not tied, and stores its other name.
UNTIED_BIAS = {
    "bert": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    "roberta": ("lm_head.decoder.bias", "lm_head.bias"),
    "distilbert": ("vocab_projector.bias", "vocab_projector.bias"),
}
LEGACY_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


def model_type(config: BertConfig) -> str:
    """Returns the `model_type` of a configuration."""
    if config.num_token_types == 0:
        return "distilbert"
    return "roberta" if config.position_offset else "bert"


def tensor_mapping(config: BertConfig) -> TensorMapping:
    """Returns the tensors of a model with its head."""
    name, head = model_type(config), config.head
    prefix = "" if head == "none" else PREFIXES[name]

    # The body.
    rules: list[TensorRule] = []
    for flax, hf in EMBEDDINGS.items():
        if flax != "token_type_embedding" or config.num_token_types:
            rules += embedding(flax, prefix + hf)
    rules += norm("embedding_norm", prefix + "embeddings.LayerNorm")
    stack, names = LAYERS[name]
    rules += layer_rules("layers", f"{prefix}{stack}.{{i}}", names)

    # The head.
    if config.has_pooler:
        rules += linear("pooler", POOLER.get((name, head), prefix + "pooler.dense"))
    if config.head_spec.has_token_logits:
        transform, transform_norm, bias, matrix = TOKEN_LOGITS[name]
        rules += linear("head/transform", transform)
        rules += norm("head/transform_norm", transform_norm)
        if not config.tie_output:  # nor is the bias that transformers 5 adds
            bias = f"{matrix}.bias"
            rules += embedding("head/output_embedding", matrix)
        rules += [TensorRule(("head/bias",), bias, VECTOR)]
    for part, tensor in config.head_spec.hf_tensors.items():
        rules += linear(f"head/{part}", CLASSIFIER.get((name, head), tensor))
    older = LEGACY_NAMES if config.tie_output else (*LEGACY_NAMES, UNTIED_BIAS[name])
    return TensorMapping(tuple(rules), tuple(_ignored(config, name)), PREFIXES[name], older)


def _ignored(config: BertConfig, name: str) -> list[IgnoredTensor]:
    """Returns buffers of older files, tied tensors, and tensors of heads that are not loaded."""
    prefix = PREFIXES[name]
    ignored = [
        IgnoredTensor(prefix + "embeddings.position_ids"),
        IgnoredTensor(prefix + "embeddings.token_type_ids"),
    ]
    if config.head_spec.has_token_logits:
        *_, bias, matrix = TOKEN_LOGITS[name]
        tokens = prefix + EMBEDDINGS["token_embedding"]
        if config.tie_output:
            ignored += [
                IgnoredTensor(f"{matrix}.weight", same_as=f"{tokens}.weight"),
                IgnoredTensor(f"{matrix}.bias", same_as=bias),
            ]
        elif bias != f"{matrix}.bias":  # a second bias, which transformers 5 stores and never reads
            zeros = functools.partial(np.zeros, config.vocab_size, np.float32)
            ignored.append(IgnoredTensor(bias, value=zeros, exported=True, checked=False))
    if not config.has_pooler:
        ignored.append(IgnoredTensor(prefix + "pooler.dense.*"))
    if config.head in ("masked_lm", "causal_lm"):
        ignored.append(IgnoredTensor("cls.seq_relationship.*"))
    return ignored


def config_from_hf(hf_config: HFConfig, source: str) -> BertConfig:
    """Converts the content of a `config.json`; the head comes from `architectures[0]`.

    Args:
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: A field, or the head, is not supported.
    """
    name = str(hf_config["model_type"])
    settings = settings_from_hf(FIELDS[name], hf_config, source)
    if settings["attention_dropout"] == settings["dropout_rate"]:
        settings["attention_dropout"] = None
    heads = {CLASSES[name] + suffix: head for suffix, head in SUFFIXES.items()}
    settings["head"] = head = heads[model_class(hf_config, list(heads), source)]
    settings["tie_output"] |= not HEADS[head].has_token_logits
    is_decoder = hf_config.get("is_decoder", False)
    if name != "distilbert" and is_decoder != (head == "causal_lm"):
        raise WeightsError(
            f"{source}: is_decoder {is_decoder!r} is not supported with the head {head!r}: a "
            "model is a decoder if and only if its head is causal_lm"
        )
    if name == "roberta":
        offset = _position_offset(hf_config, source)
        settings |= {"position_offset": offset, "max_length": settings["max_length"] - offset}
        settings["head_activation"] = "gelu"  # whatever hidden_act is
    if name == "distilbert":
        settings |= {"num_token_types": 0, "pooler_activation": None if head == "none" else "relu"}
    if field := CLASSIFIER_DROPOUT.get((name, head)):
        rate = hf_config.get(field[0], field[1])
        is_rate = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < 1
        if rate is not None and not is_rate:
            raise WeightsError(f"{source}: {field[0]} {rate!r} is neither null nor in [0, 1)")
        same = HEADS[head].has_dropout and rate == settings["dropout_rate"]
        settings["classifier_dropout"] = None if same else rate
    if HEADS[head].needs_labels:
        settings["labels"] = labels_from_hf(hf_config, source)
    return BertConfig(**settings)


def as_stored(config: BertConfig, tensors: Callable[[], TensorSource]) -> BertConfig:
    """Returns the configuration of a body without pooler if its files have none.

    transformers writes such files with `add_pooling_layer=False`, and the same `config.json`.
    """
    if not config.has_pooler or config.head != "none":
        return config
    has_pooler = any("pooler." in name for name in tensors().shapes())
    return config if has_pooler else dataclasses.replace(config, pooler_activation=None)


def _position_offset(hf_config: HFConfig, source: str) -> int:
    """Returns the number of unused rows at the beginning of RoBERTa's position embedding."""
    pad_id = hf_config.get("pad_token_id", 1)
    if not isinstance(pad_id, int) or isinstance(pad_id, bool) or pad_id < 0:
        raise WeightsError(
            f"{source}: pad_token_id {pad_id!r} is not supported: RoBERTa counts its positions "
            "from this id, so give the one that it was trained with (usually 1)"
        )
    return pad_id + 1


def config_to_hf(config: BertConfig) -> JsonObject:
    """Converts a configuration to the content of a `config.json`.

    Raises:
      WeightsError: transformers has no such model.
    """
    name = model_type(config)
    settings = dataclasses.replace(
        config,
        d_ff=config.feed_forward_dim,
        attention_dropout=config.attention_dropout_rate,
    )
    hf_config = settings_to_hf(
        FIELDS[name], settings, model_type=name, architecture=hf_class(name, config.head)
    )
    check_exportable(config, _allowed(config, name), CLASSES[name])
    if name == "roberta":
        offset = config.position_offset
        hf_config |= {
            "pad_token_id": offset - 1,
            "max_position_embeddings": config.max_length + offset,
        }
    if field := CLASSIFIER_DROPOUT.get((name, config.head)):
        hf_config[field[0]] = config.classifier_dropout_rate
    if config.head == "causal_lm":
        hf_config["is_decoder"] = True
    if config.head_spec.needs_labels:
        hf_config |= labels_to_hf(config.labels)
    return hf_config


def _allowed(config: BertConfig, name: str) -> dict[str, tuple[object, ...]]:
    """Returns the values of settings that the classes of transformers do not vary."""
    allowed: dict[str, tuple[object, ...]] = {
        "positions": ("learned",),
        "positions_at": ("input",),
    }
    if config.head_spec.has_token_logits:
        usual = "gelu" if name == "roberta" else config.activation
        # None means: the activation of the layers.
        allowed["head_activation"] = (usual, None) if config.activation == usual else (usual,)
    if name == "distilbert":
        allowed |= {"norm_eps": (1e-12,), "position_offset": (0,)}
        if config.head_spec.needs_pooler:
            allowed["pooler_activation"] = (None,) if config.head == "none" else ("relu",)
    elif config.head_spec.needs_pooler:
        allowed["pooler_activation"] = ("tanh", None) if config.head == "none" else ("tanh",)
    return allowed


def hf_class(name: str, head: str) -> str:
    """Returns the class of transformers for a head.

    Args:
      name: The `model_type`.
      head: The head.

    Raises:
      WeightsError: There is no such class.
    """
    if head in MISSING_HEADS[name]:
        raise WeightsError(f"transformers has no {CLASSES[name]} class for head {head!r}")
    if (name, head) == ("bert", "causal_lm"):
        return "BertLMHeadModel"
    return CLASSES[name] + HEADS[head].hf_class_suffix


MAPPING = HFMapping(
    model_types=("bert", "roberta", "distilbert"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    as_stored=as_stored,
    generation_defaults={
        "bert": {"pad_token_id": 0},
        "roberta": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    },
)
