"""Conversion from and to the Hugging Face format, shared by the encoders.

A family defines its `EncoderForm`: its fields, the names of its modules, and its classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ....data.common.fields import Rate, require
from ....data.common.json_text import JsonObject
from ...encoders.encoder import EncoderConfig
from ...heads.specs import HEADS
from ..config_mapping import (
    ACTIVATIONS,
    Field,
    FixedField,
    HFConfig,
    settings_from_hf,
    typed_field,
)
from ..form import Form
from ..registry import HFMapping
from ..tensors.layout import VECTOR
from ..tensors.mapping import (
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    layer_rules,
    linear,
    norm,
)
from ..tensors.read import TensorSource

Config = TypeVar("Config", bound=EncoderConfig)

BERT_FIELDS = (
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
)
"""The fields of a BERT, with its defaults; the families that copy BERT change some defaults."""
BERT_LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
BERT_EMBEDDINGS = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "token_type_embedding": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "embedding_projection": "embeddings_project",
}
LEGACY_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))

RateField = tuple[str, float | None]
"""The name of a field that contains a dropout rate, and the default rate. A default of None means
the rate of the layers."""
CLASSIFIER_RATE: RateField = ("classifier_dropout", None)


class TokenLogits(NamedTuple):
    """The tensors of a head that predicts tokens."""

    transform: str
    transform_norm: str
    bias: str
    matrix: str
    """The projection to the vocabulary, which is usually tied to the embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderForm(Form[Config]):
    """Describes how one encoder family is converted from and to the Hugging Face format."""

    body: str | None = None
    """The prefix of the body's tensors in a model with a head. Defaults to the model type."""
    embeddings: Mapping[str, str] = dataclasses.field(default_factory=lambda: BERT_EMBEDDINGS)
    """The modules before and after the layers, and their names without the prefix of the body."""
    layers: str = "encoder.layer.{i}"
    """The name of one layer: its tensors begin with the prefix of the body and this name."""
    parts: Mapping[str, str] | Mapping[str | tuple[str, ...], str] = dataclasses.field(
        default_factory=lambda: BERT_LAYER
    )
    """The name of each module in a layer, such as `attention.self.query` for `attention/query`.
    Several modules may be stored as one linear map."""
    pooler: str = "pooler.dense"
    """The name of the pooler, without the prefix of the body."""
    token_logits: TokenLogits
    head_parts: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """For each head, the names of its pooler and linear maps that differ from BERT's names."""
    own_rules: Callable[[Config, str], Sequence[TensorRule]] | None = None
    """Returns the rules of additional parameters. Its arguments are the configuration, and the
    prefix of the body's tensors."""
    older_names: tuple[tuple[str, str], ...] = LEGACY_NAMES
    """Substrings of tensor names, and their replacements in older files."""
    other_heads: tuple[str, ...] = ()
    """Tensors of heads that published files contain although no class of transformers reads
    them."""
    classifier_rates: Mapping[str, RateField]
    """For each head, the field with the dropout rate of the classifier's input."""
    modules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of this class to replace if names are module names in transformers (as in adapters)
    instead of names in files."""

    def mapping(self) -> HFMapping[Config]:
        """Returns the family's `HFMapping`."""
        return dataclasses.replace(
            super().mapping(),
            as_stored=as_stored,
            module_mapping=dataclasses.replace(self, **self.modules).tensor_mapping,
            notes=_notes,
        )

    @property
    def prefix(self) -> str:
        """The prefix of the body's tensors in a model with a head."""
        return f"{self.body or self.model_type}."

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`; see `Form`."""
        fields = dict(hf_config)
        own = self.read_own_settings(fields, source)
        settings = settings_from_hf(self.fields, fields, source) | own
        settings["head"] = head = self.read_head(hf_config, settings, source)
        # `is_decoder` makes attention causal. In flaxzoo, only the head causal_lm is causal.
        is_decoder = bool(hf_config.get("is_decoder"))
        require(
            is_decoder == (head == "causal_lm"),
            f"{source}: is_decoder {is_decoder!r} is not supported with the head {head!r}: a "
            "model is a decoder if and only if its head is causal_lm",
            WeightsError,
        )
        if not self.config.keeps_pooling(head):
            settings.pop("pooling", None)
        # Set rates that equal the default to None, so that configurations compare equal.
        if settings["attention_dropout"] == settings["dropout_rate"]:
            settings["attention_dropout"] = None
        if head in self.classifier_rates:
            rate = self._classifier_rate(hf_config, head, source)
            same = HEADS[head].has_dropout and rate == settings["dropout_rate"]
            settings["classifier_dropout"] = None if same else rate
        return self.config(**settings)

    def _classifier_rate(self, hf_config: HFConfig, head: str, source: str) -> float | None:
        name, default = self.classifier_rates[head]
        return typed_field(hf_config, name, default, source, kind=Rate | None)

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`; see `Form`."""
        fixed = {
            "positions": ("learned",),
            "num_token_types": (config.num_token_types or 2,),
        }
        explicit = {
            "d_ff": config.feed_forward_dim,
            "attention_dropout": config.attention_dropout_rate,
        }
        fields = self.write_fields(config, config.head, fixed=fixed, explicit=explicit)
        if config.head in self.classifier_rates:
            fields[self.classifier_rates[config.head][0]] = config.classifier_dropout_rate
        if config.head == "causal_lm":
            fields["is_decoder"] = True
        return fields

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the mapping from the parameters of a model, including its head, to tensors."""
        prefix = "" if config.head == "none" else self.prefix
        # The embeddings of the model.
        absent = {"embedding_projection"} if config.d_embedding is None else set[str]()
        absent |= set() if config.num_token_types else {"token_type_embedding"}
        absent |= set() if config.adds_positions else {"position_embedding"}
        rules: list[TensorRule] = []
        for path, name in self.embeddings.items():
            if path not in absent:
                kind = path.rpartition("_")[2]
                options = {"bias": config.norm_bias} if kind.startswith("norm") else {}
                rules += _RULES[kind](path, prefix + name, **options)
        of_layers = layer_rules(
            "layers",
            prefix + self.layers,
            self.parts,
            linear_bias=config.use_bias,
            attention_bias=config.attention_bias,
            norm_bias=config.norm_bias,
        )
        rules += [] if self.own_rules is None else self.own_rules(config, prefix)
        rules += (dataclasses.replace(rule, inner=config.inner_layers) for rule in of_layers)
        # The pooler and the head; a family's names override BERT's.
        renamed = self.head_parts.get(config.head, {})
        if config.has_pooler:
            rules += linear("pooler", renamed.get("pooler", prefix + self.pooler))
        for part, name in config.head_spec.hf_tensors.items():
            rules += linear(f"head/{part}", renamed.get(part, name))
        older = self.older_names
        transforms = config.head_transform and config.head != "none"
        if transforms and not config.head_spec.has_token_logits:
            rules += self._transform_rules(config)
        if config.head_spec.has_token_logits:
            rules += self._token_rules(config)
            if not config.tie_output:
                # transformers 4 has a single bias even if the matrix is not tied, and stores this
                # bias under the same name as with a tied matrix.
                logits = self.token_logits
                older += ((f"{logits.matrix}.bias", logits.bias),)
        return TensorMapping(tuple(rules), tuple(self._ignored(config)), self.prefix, older)

    def _token_rules(self, config: Config) -> list[TensorRule]:
        """Returns the rules of a head that predicts tokens."""
        names, rules = self.token_logits, self._transform_rules(config)
        if not config.tie_output:
            rules += embedding("head/output_embedding", names.matrix)
        if config.output_bias:
            # transformers 5 adds the bias of an untied matrix, and not `names.bias`.
            bias = names.bias if config.tie_output else f"{names.matrix}.bias"
            rules.append(TensorRule(("head/bias",), bias, VECTOR))
        return rules

    def _transform_rules(self, config: Config) -> list[TensorRule]:
        """Returns the rules of the transform at the beginning of a head."""
        names = self.token_logits
        rules = linear("head/transform", names.transform, bias=config.transform_bias)
        scale = norm("head/transform_norm", names.transform_norm, bias=config.norm_bias)
        return [*rules, *scale]

    def _ignored(self, config: Config) -> list[IgnoredTensor]:
        """Returns the ignored tensors: old buffers, tied tensors, and tensors of other heads."""
        buffers = "embeddings.position_ids", "embeddings.token_type_ids"
        ignored = [IgnoredTensor(self.prefix + name) for name in buffers]
        ignored += map(IgnoredTensor, self.other_heads)
        if config.head_spec.has_token_logits:
            bias, matrix = self.token_logits.bias, self.token_logits.matrix
            tokens = self.prefix + self.embeddings["token_embedding"]
            has_two_biases = bias != f"{matrix}.bias"
            if config.tie_output:
                ignored.append(IgnoredTensor(f"{matrix}.weight", same_as=f"{tokens}.weight"))
                if has_two_biases:
                    ignored.append(IgnoredTensor(f"{matrix}.bias", same_as=bias))
            elif has_two_biases:
                # transformers stores a second bias but does not read it.
                zeros = functools.partial(np.zeros, config.vocab_size, np.float32)
                ignored.append(IgnoredTensor(bias, value=zeros, exported=True))
        if not config.has_pooler:
            ignored.append(IgnoredTensor(f"{self.prefix}{self.pooler}.*"))
        if config.head in ("masked_lm", "causal_lm"):
            ignored.append(IgnoredTensor("cls.seq_relationship.*"))
        return ignored


def _notes(config: EncoderConfig) -> Sequence[str]:
    """Returns a note if the model lacks the pooler that its class in transformers has."""
    lacks_pooler = type(config).body_pooler and not config.body_pooler
    if config.head != "none" or not lacks_pooler:
        return ()
    return ("the model has no pooler: load it with add_pooling_layer=False",)


def _later_norms(flax: str, hf: str, *, bias: bool) -> tuple[TensorRule, ...]:
    """Returns the rule of the norms that all layers except the first have (ModernBERT)."""
    scales = TensorRule((flax,), f"{hf}.weight", VECTOR, first=1)
    biases = TensorRule((f"{flax[:-1]}_biases",), f"{hf}.bias", VECTOR, first=1)
    return (scales, biases) if bias else (scales,)


_RULES: Mapping[str, Callable[..., tuple[TensorRule, ...]]] = {
    "embedding": embedding,
    "bias": embedding,
    "norm": norm,
    "norms": _later_norms,
    "projection": linear,
}
"""The function that returns the rules of a module outside of the layers, by the last word of the
module's path."""


def as_stored(config: Config, tensors: Callable[[], TensorSource]) -> Config:
    """Sets `body_pooler` of a model without a head to False if its files contain no pooler.

    transformers writes files without a pooler with `add_pooling_layer=False` and an unchanged
    `config.json`.
    """
    if config.head != "none" or not config.has_pooler:
        return config
    has_pooler = any("pooler." in name for name in tensors().shapes())
    return config if has_pooler else dataclasses.replace(config, body_pooler=False)  # pyright: ignore[reportCallIssue]
