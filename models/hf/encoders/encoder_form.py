"""The form that the encoders share in Hugging Face.

A family states its differences in an `EncoderForm`: fields, names of parts, classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ....data.common.json_text import JsonObject
from ...encoders.encoder import EncoderConfig
from ...nn.heads import HEADS
from ..config_mapping import (
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
"""The fields of a BERT, with its defaults; the families that copy it change some defaults."""
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
LEGACY_NAMES = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))

Rate = tuple[str, float | None]
"""A field with a dropout rate, and the rate of a file without it; None: that of the layers."""
CLASSIFIER_RATE: Rate = ("classifier_dropout", None)


class TokenLogits(NamedTuple):
    """The tensors of a head that predicts tokens."""

    transform: str
    transform_norm: str
    bias: str
    matrix: str
    """The matrix to the vocabulary, which is usually tied to the embedding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderForm(Generic[Config]):
    """The differences between one family and the others in Hugging Face's form."""

    config: type[Config]
    model_type: str
    name: str
    """The beginning of the names of classes in transformers."""
    renamed_classes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The classes that do not end as `HeadSpec.hf_class_suffix` says, by head."""
    fields: ConfigMapping
    embeddings: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "token_embedding": "embeddings.word_embeddings",
            "position_embedding": "embeddings.position_embeddings",
            "token_type_embedding": "embeddings.token_type_embeddings",
            "embedding_norm": "embeddings.LayerNorm",
            "embedding_projection": "embeddings_project",
        }
    )
    """The parts below the layers, and their names below the prefix."""
    layers: str = "encoder.layer.{i}"
    """Prefix of the tensors of one layer, below the prefix of the body."""
    parts: Mapping[str, str] = dataclasses.field(default_factory=lambda: BERT_LAYER)
    """For each part of a layer its name, as `attention.self.query` for `attention/query`."""
    token_logits: TokenLogits
    head_parts: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """For a head, the names of its pooler and maps where they differ from those of BERT."""
    classifier_rates: Mapping[str, Rate]
    """For a head, the field with the dropout rate of its classifier's input."""
    allowed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    """Further settings that the family cannot vary, and the values that it has."""
    own_settings: Callable[[HFConfig, Settings, str], None] | None = None
    """Completes the settings. Arguments: content of the file, settings, path for messages."""
    own_fields: Callable[[Config], JsonObject] | None = None
    """The same for export: further fields of a configuration."""
    generation_defaults: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def mapping(self) -> HFMapping[Config]:
        """Returns the family's record."""
        return HFMapping(
            model_types=(self.model_type,),
            config_from_hf=self.config_from_hf,
            config_to_hf=self.config_to_hf,
            tensor_mapping=self.tensor_mapping,
            as_stored=as_stored,
            generation_defaults={self.model_type: self.generation_defaults},
        )

    @property
    def prefix(self) -> str:
        """The prefix of the names of the body's tensors, below a head."""
        return f"{self.model_type}."

    @property
    def classes(self) -> dict[str, str]:
        """For each head the class of transformers."""
        heads = self.config.__dataclass_fields__["head"].metadata["choices"]
        usual = {head: self.name + HEADS[head].hf_class_suffix for head in heads}
        return {**usual, **self.renamed_classes}

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`; the head comes from `architectures[0]`.

        Args:
          hf_config: The content of the file.
          source: The path of the file, for messages.

        Raises:
          WeightsError: A field, or the head, is not supported.
        """
        settings = settings_from_hf(self.fields, hf_config, source)
        heads = {name: head for head, name in self.classes.items()}
        settings["head"] = head = heads[model_class(hf_config, list(heads), source)]
        is_decoder = bool(hf_config.get("is_decoder"))
        if is_decoder != (head == "causal_lm"):
            raise WeightsError(
                f"{source}: is_decoder {is_decoder!r} is not supported with the head {head!r}: a "
                "model is a decoder if and only if its head is causal_lm"
            )
        if self.own_settings is not None:
            self.own_settings(hf_config, settings, source)
        settings["tie_output"] |= not HEADS[head].has_token_logits
        if settings["attention_dropout"] == settings["dropout_rate"]:
            settings["attention_dropout"] = None
        if head in self.classifier_rates:
            rate = self._classifier_rate(hf_config, head, source)
            same = HEADS[head].has_dropout and rate == settings["dropout_rate"]
            settings["classifier_dropout"] = None if same else rate
        if HEADS[head].needs_labels:
            settings["labels"] = labels_from_hf(hf_config, source)
        return self.config(**settings)

    def _classifier_rate(self, hf_config: HFConfig, head: str, source: str) -> float | None:
        name, default = self.classifier_rates[head]
        rate = hf_config.get(name, default)
        if rate is None or (isinstance(rate, int | float) and rate is not True and 0 <= rate < 1):
            return rate
        raise WeightsError(f"{source}: {name} {rate!r} is neither null nor in [0, 1)")

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`.

        Raises:
          WeightsError: transformers has no such model.
        """
        fixed = {
            "positions": ("learned",),
            "positions_at": ("input",),
            "num_token_types": (config.num_token_types or 2,),
            **self.allowed,
        }
        check_exportable(config, fixed, self.name)
        explicit = dataclasses.replace(
            config,
            d_ff=config.feed_forward_dim,
            attention_dropout=config.attention_dropout_rate,
        )
        architecture = self.classes[config.head]
        hf_config = settings_to_hf(
            self.fields, explicit, model_type=self.model_type, architecture=architecture
        )
        if config.head in self.classifier_rates:
            hf_config[self.classifier_rates[config.head][0]] = config.classifier_dropout_rate
        if config.head == "causal_lm":
            hf_config["is_decoder"] = True
        if config.head_spec.needs_labels:
            hf_config |= labels_to_hf(config.labels)
        return hf_config | (self.own_fields(config) if self.own_fields is not None else {})

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the tensors of a model with its head."""
        prefix = "" if config.head == "none" else self.prefix
        absent = {"embedding_projection"} if config.d_embedding is None else set[str]()
        absent |= set() if config.num_token_types else {"token_type_embedding"}
        rules: list[TensorRule] = []
        for path, name in self.embeddings.items():
            if path not in absent:
                rules += _RULES[path.rpartition("_")[2]](path, prefix + name)
        rules += layer_rules("layers", prefix + self.layers, self.parts)
        renamed = self.head_parts.get(config.head, {})
        if config.has_pooler:
            rules += linear("pooler", renamed.get("pooler", f"{prefix}pooler.dense"))
        for part, name in config.head_spec.hf_tensors.items():
            rules += linear(f"head/{part}", renamed.get(part, name))
        older = LEGACY_NAMES
        if config.head_spec.has_token_logits:
            rules += self._token_rules(config)
            if not config.tie_output:
                # transformers 4 ties the bias even where the matrix is not tied, and stores its
                # other name.
                logits = self.token_logits
                older += ((f"{logits.matrix}.bias", logits.bias),)
        return TensorMapping(tuple(rules), tuple(self._ignored(config)), self.prefix, older)

    def _token_rules(self, config: Config) -> list[TensorRule]:
        """Returns the rules of a head that predicts tokens."""
        names = self.token_logits
        rules = [*linear("head/transform", names.transform)]
        rules += norm("head/transform_norm", names.transform_norm)
        if config.tie_output:
            return [*rules, TensorRule(("head/bias",), names.bias, VECTOR)]
        # The bias that transformers 5 adds is that of the matrix, not tied either.
        rules += embedding("head/output_embedding", names.matrix)
        return [*rules, TensorRule(("head/bias",), f"{names.matrix}.bias", VECTOR)]

    def _ignored(self, config: Config) -> list[IgnoredTensor]:
        """Returns old buffers, tied tensors, and tensors of heads that are not loaded."""
        buffers = "embeddings.position_ids", "embeddings.token_type_ids"
        ignored = [IgnoredTensor(self.prefix + name) for name in buffers]
        if config.head_spec.has_token_logits:
            bias, matrix = self.token_logits.bias, self.token_logits.matrix
            tokens = self.prefix + self.embeddings["token_embedding"]
            if config.tie_output:
                ignored += [
                    IgnoredTensor(f"{matrix}.weight", same_as=f"{tokens}.weight"),
                    IgnoredTensor(f"{matrix}.bias", same_as=bias),
                ]
            elif bias != f"{matrix}.bias":  # a second bias, which transformers stores and not reads
                zeros = functools.partial(np.zeros, config.vocab_size, np.float32)
                ignored.append(IgnoredTensor(bias, value=zeros, exported=True, checked=False))
        if not config.has_pooler:
            ignored.append(IgnoredTensor(self.prefix + "pooler.dense.*"))
        if config.head in ("masked_lm", "causal_lm"):
            ignored.append(IgnoredTensor("cls.seq_relationship.*"))
        return ignored


_RULES = {"embedding": embedding, "norm": norm, "projection": linear}
"""The rules of a part below the layers, by the last word of its path."""


def as_stored(config: Config, tensors: Callable[[], TensorSource]) -> Config:
    """Returns the configuration of a body without pooler if its files have none.

    transformers writes such files with `add_pooling_layer=False`, and the same `config.json`.
    """
    if config.head != "none" or not config.has_pooler:
        return config
    has_pooler = any("pooler." in name for name in tensors().shapes())
    return config if has_pooler else dataclasses.replace(config, body_pooler=False)  # pyright: ignore[reportCallIssue]
