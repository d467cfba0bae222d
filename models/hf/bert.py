"""BERT, RoBERTa and DistilBERT as Hugging Face has them: configuration, heads, tensors."""

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

from ..bert import WITH_LABELS, WITH_MASKED_WORDS, WITH_POOLER, BertConfig
from .config_mapping import (
    ACTIVATIONS,
    ConfigMapping,
    Field,
    FixedField,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from .generation_config import NAMES
from .registry import HFMapping
from .tensor_mapping import (
    FROM_HEADS,
    LINEAR,
    VECTOR,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    linear,
    norm,
)

USUAL = ConfigMapping(
    (
        FixedField("is_decoder", (False, True)),  # the head says which
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
        FixedField("tie_word_embeddings", (True,)),
        FixedField("add_cross_attention", (False,)),
    ),
    # The pooler's are of the first library that had these files, and never read.
    ignored=NAMES
    | frozenset(
        """
        chunk_size_feed_forward cross_attention_hidden_size pooler_fc_size
        pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
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
        FixedField("tie_word_embeddings", (True,)),
    ),
    # Sinusoidal positions are initial values of a table that is stored and trained as any.
    ignored=NAMES | {"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"},
    aliases={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
)
FIELDS = {"bert": USUAL, "roberta": USUAL, "distilbert": DISTIL}

HEADS = {  # the end of a class's name
    "Model": "none",
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked_lm",
    "ForNextSentencePrediction": "next_sentence",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}
WITHOUT = {  # heads that transformers has not
    "bert": (),
    "roberta": ("pretraining", "next_sentence"),
    "distilbert": ("pretraining", "next_sentence", "causal_lm"),
}
CLASSES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}

WITH_WORDS = (*WITH_MASKED_WORDS, "causal_lm")
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "distilbert": "distilbert."}

# Ours, and the same part of BERT and RoBERTa.
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

# Of what a head is made, family by family.
MASKED_WORDS = {  # transform, its norm, bias, and the tied matrix
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
    ("roberta", "sequence"): "classifier.dense",
    ("distilbert", "sequence"): "pre_classifier",
    ("distilbert", "choice"): "pre_classifier",
}
CLASSIFIER = {("roberta", "sequence"): "classifier.out_proj"}
CLASSIFIER_DROPOUT: dict[tuple[str, str], tuple[str, float | None]] = {  # field, and default
    **{("bert", head): ("classifier_dropout", None) for head in ("sequence", "token", "choice")},
    **{("roberta", head): ("classifier_dropout", None) for head in ("sequence", "token")},
    **{("distilbert", head): ("seq_classif_dropout", 0.2) for head in ("sequence", "choice")},
    ("distilbert", "span"): ("qa_dropout", 0.1),
}
LEGACY = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))


def family_of(config: BertConfig) -> str:
    """The family that a configuration is of."""
    if config.num_token_types == 0:
        return "distilbert"
    return "roberta" if config.position_offset else "bert"


def tensor_mapping(config: BertConfig) -> TensorMapping:
    """The tensors of a model with its head."""
    family, head = family_of(config), config.head
    prefix = "" if head == "none" else PREFIXES[family]
    rows = [*_body(config, family, prefix), *_head(config, family, prefix)]
    return TensorMapping(tuple(rows), tuple(_known(config, family)), PREFIXES[family], LEGACY)


def _body(config: BertConfig, family: str, prefix: str) -> list[TensorRule]:
    rows: list[TensorRule] = []
    for ours, theirs in EMBEDDINGS.items():
        if ours != "token_type_embedding" or config.num_token_types:
            rows += embedding(ours, prefix + theirs)
    rows += norm("embedding_norm", prefix + "embeddings.LayerNorm")
    stack, layer = LAYERS[family]
    for ours, theirs in layer.items():
        path, name = f"layers/{ours}", f"{prefix}{stack}.{{i}}.{theirs}"
        if ours.endswith("_norm"):
            rows += norm(path, name)
        else:
            rows += linear(path, name, FROM_HEADS if ours == "attention/output" else LINEAR)
    return rows


def _head(config: BertConfig, family: str, prefix: str) -> list[TensorRule]:
    head, rows = config.head, []
    if config.has_pooler:
        rows += linear("pooler", POOLER.get((family, head), prefix + "pooler.dense"))
    if head in WITH_WORDS:
        transform, transform_norm, bias, _ = MASKED_WORDS[family]
        rows += linear("head/transform", transform)
        rows += norm("head/transform_norm", transform_norm)
        rows += [TensorRule(("head/bias",), bias, VECTOR)]
    if head in ("pretraining", "next_sentence"):
        rows += linear("head/next_sentence", "cls.seq_relationship")
    if head in (*WITH_LABELS, "choice"):
        rows += linear("head/classifier", CLASSIFIER.get((family, head), "classifier"))
    if head == "span":
        rows += linear("head/span", "qa_outputs")
    return rows


def _known(config: BertConfig, family: str) -> list[IgnoredTensor]:
    """Buffers of older files, tied tensors, and what published files hold for other heads."""
    prefix = PREFIXES[family]
    known = [
        IgnoredTensor(prefix + "embeddings.position_ids"),
        IgnoredTensor(prefix + "embeddings.token_type_ids"),
    ]
    if config.head in WITH_WORDS:
        *_, bias, matrix = MASKED_WORDS[family]
        words = prefix + EMBEDDINGS["token_embedding"]
        known += [
            IgnoredTensor(f"{matrix}.weight", same_as=f"{words}.weight"),
            IgnoredTensor(f"{matrix}.bias", same_as=bias),
        ]
    if not config.has_pooler:
        known.append(IgnoredTensor(prefix + "pooler.dense.*"))
    if config.head in ("masked_lm", "causal_lm"):
        known.append(IgnoredTensor("cls.seq_relationship.*"))
    return known


def config_from_hf(theirs: Mapping[str, Any], source: str) -> BertConfig:
    """Ours of theirs; the head is that of the class named in `architectures`.

    Raises:
      WeightsError: a field, or the head, is not supported.
    """
    name = theirs["model_type"]
    settings = settings_from_hf(FIELDS[name], theirs, source)
    if settings["attention_dropout"] == settings["dropout_rate"]:
        settings["attention_dropout"] = None
    heads: dict[str, Any] = {CLASSES[name] + end: head for end, head in HEADS.items()}
    head = heads[model_class(theirs, list(heads), source)]
    if name != "distilbert" and theirs.get("is_decoder", False) != (head == "causal_lm"):
        raise WeightsError(
            f"{source}: is_decoder {theirs.get('is_decoder', False)!r} is not supported with the "
            f"head {head!r}: only a causal one hides what follows, and always does"
        )
    if name == "roberta":
        offset = _position_offset(theirs, source)
        settings |= {"position_offset": offset, "max_length": settings["max_length"] - offset}
        settings["head_activation"] = "gelu"  # whatever hidden_act is
    if name == "distilbert":
        settings |= {"num_token_types": 0, "pooler_activation": None if head == "none" else "relu"}
    if field := CLASSIFIER_DROPOUT.get((name, head)):
        settings["classifier_dropout"] = _rate(theirs, *field, source)
        if head != "span" and settings["classifier_dropout"] == settings["dropout_rate"]:
            settings["classifier_dropout"] = None
    labels = labels_of(theirs, source) if head in WITH_LABELS else ()
    return BertConfig(**settings, head=head, labels=labels)


def as_stored(config: BertConfig, names: Callable[[], Set[str]]) -> BertConfig:
    """A body whose files have no pooler (`add_pooling_layer=False`) is one without."""
    if config.has_pooler and config.head == "none" and not any("pooler." in n for n in names()):
        return dataclasses.replace(config, pooler_activation=None)
    return config


def _rate(theirs: Mapping[str, Any], name: str, default: float | None, source: str) -> float | None:
    """The value of a field that may be null."""
    rate = theirs.get(name, default)
    if rate is not None and not (type(rate) in (int, float) and 0 <= rate < 1):
        raise WeightsError(f"{source}: {name} {rate!r} is neither null nor in [0, 1)")
    return rate


def _position_offset(theirs: Mapping[str, Any], source: str) -> int:
    """How many rows of RoBERTa's table of positions stand before the first."""
    pad_id = theirs.get("pad_token_id", 1)
    if type(pad_id) is not int or pad_id < 0:
        raise WeightsError(
            f"{source}: pad_token_id {pad_id!r} is not supported: RoBERTa counts its positions "
            "from this id, so give the one that it was trained with (usually 1)"
        )
    return pad_id + 1


def labels_of(theirs: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Names of the labels, in order of their ids."""
    number: Any = theirs.get("num_labels", 2)
    names: Any = theirs.get("id2label")
    if not names and type(number) is int:
        return tuple(f"LABEL_{i}" for i in range(number))
    wanted = {str(i) for i in range(len(names))} if isinstance(names, dict) else None
    if wanted is None or {str(key) for key in names} != wanted:
        raise WeightsError(
            f"{source}: id2label {names!r} and num_labels {number!r} name no labels: give an "
            "object of numbers from 0 to names"
        )
    return tuple(str(names[key]) for key in sorted(names, key=int))


def config_to_hf(config: BertConfig) -> dict[str, Any]:
    """Theirs of ours.

    Raises:
      WeightsError: transformers has no such model.
    """
    name = family_of(config)
    settings = dataclasses.replace(
        config,
        d_ff=config.feed_forward_dim,
        attention_dropout=config.attention_dropout_rate,
    )
    theirs = {
        **settings_to_hf(FIELDS[name], settings),
        "model_type": name,
        "architectures": [class_with(name, config.head)],
    }
    _check(config, name)
    if name == "roberta":
        offset = config.position_offset
        theirs |= {
            "pad_token_id": offset - 1,
            "max_position_embeddings": config.max_length + offset,
        }
    if field := CLASSIFIER_DROPOUT.get((name, config.head)):
        theirs[field[0]] = config.classifier_dropout_rate
    if config.head == "causal_lm":
        theirs["is_decoder"] = True
    if config.head in WITH_LABELS:
        theirs["id2label"] = dict(enumerate(config.labels))
        theirs["label2id"] = {label: i for i, label in enumerate(config.labels)}
    return theirs


def _check(config: BertConfig, name: str) -> None:
    """Raises WeightsError where the family cannot say what the configuration does."""
    only: dict[str, tuple[Any, ...]] = {}
    if config.head in WITH_WORDS:
        usual = "gelu" if name == "roberta" else config.activation
        only["head_activation"] = (usual, None) if config.activation == usual else (usual,)
    if name == "distilbert":
        only |= {"norm_eps": (1e-12,), "position_offset": (0,)}
        if config.head in WITH_POOLER:
            only["pooler_activation"] = (None,) if config.head == "none" else ("relu",)
    elif config.head in WITH_POOLER:
        only["pooler_activation"] = ("tanh", None) if config.head == "none" else ("tanh",)
    for field, values in only.items():
        if (value := getattr(config, field)) not in values:
            choices = ", ".join(map(repr, values))
            raise WeightsError(f"{CLASSES[name]} has no {field} {value!r}: only {choices}")


def class_with(name: str, head: str) -> str:
    """Their class for a head.

    Raises:
      WeightsError: there is none.
    """
    if head in WITHOUT[name]:
        raise WeightsError(f"transformers has no {CLASSES[name]} class for head {head!r}")
    if (name, head) == ("bert", "causal_lm"):
        return "BertLMHeadModel"
    return CLASSES[name] + next(end for end, known in HEADS.items() if known == head)


MAPPING = HFMapping(
    model_types=("bert", "roberta", "distilbert"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    tensor_mapping=tensor_mapping,
    as_stored=as_stored,
)
