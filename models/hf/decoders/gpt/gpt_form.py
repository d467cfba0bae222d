"""The form that the decoders in the tradition of GPT-2 share in Hugging Face.

A family states what is its own in a `GPTForm`: fields, names of parts, classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from .....data.common.json_text import JsonObject
from ....decoders.gpt.gpt import GPTConfig
from ...config_mapping import (
    ConfigMapping,
    Field,
    HFConfig,
    Settings,
    check_exportable,
    labels_from_hf,
    labels_to_hf,
    model_class,
    settings_from_hf,
    settings_to_hf,
)
from ...registry import HFMapping
from ...tensor_mapping import (
    BY_HEAD,
    BY_HEAD_VECTOR,
    FROM_HEADS,
    VECTOR,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    linear,
    norm,
)

Config = TypeVar("Config", bound=GPTConfig)
CLASSIFIERS = {"sequence_classification": "score", "token_classification": "classifier"}
"""The heads that classify, and the name of their linear map."""
DROPOUTS = ("embedding_dropout", "attention_dropout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTForm(Generic[Config]):
    """The differences between one family and the others in Hugging Face's form."""

    config: type[Config]
    model_type: str
    classes: Mapping[str, str]
    """For each head the class of transformers; "none": the class without a head."""
    fields: ConfigMapping
    allowed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    """Further settings that the family cannot vary, and the values that it has; those that it can
    vary in spite of the others, with none."""
    prefix: str
    """Prefix of the names of the body's tensors."""
    tokens: str
    """Name of the token embedding below the prefix."""
    layers: str
    """Prefix of the tensors of one layer, below that prefix."""
    parts: Mapping[str, str]
    """For each part of a layer its name, as `self_attn.q_proj` for `attention/query`."""
    joined: str | None = None
    """Name of the one map of queries, keys and values, which take turns head by head."""
    body: Mapping[str, str]
    """For each norm, embedding or linear map around the layers its name below the prefix."""
    output: str = "lm_head"
    """Name of the projection on the vocabulary."""
    ignored: tuple[str, ...] = ()
    """Buffers of older files."""
    linear_classifier_bias: bool = True
    """Whether the map of token classification has a bias."""
    own_settings: Callable[[JsonObject, Settings, str], None] | None = None
    """Completes the settings by fields that are no plain rows of a table, and takes these out of
    the fields. Arguments: fields, settings, path for messages."""
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
            generation_defaults={self.model_type: self.generation_defaults},
        )

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`.

        Raises:
          WeightsError: A field, or the class that wrote the model, is not supported.
        """
        fields, settings = dict(hf_config), Settings()
        if self.own_settings is not None:
            self.own_settings(fields, settings, source)
        settings |= settings_from_hf(self.fields, fields, source)
        heads = {name: head for head, name in self.classes.items()}
        head = heads[model_class(hf_config, tuple(self.classes.values()), source)]
        if head != "causal_lm":  # a body is given the projection that needs no tensor
            settings["tie_output"] = True
            if "output_bias" in {field.name for field in dataclasses.fields(self.config)}:
                settings["output_bias"] = False
        if head in CLASSIFIERS:
            settings |= {"head": head, "labels": labels_from_hf(hf_config, source)}
        for name in DROPOUTS:
            if name in settings and settings[name] == settings["dropout_rate"]:
                settings[name] = None
        if settings.get("d_ff") == 4 * settings["d_model"]:
            settings["d_ff"] = None
        return self.config(**settings)

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`.

        Raises:
          WeightsError: transformers has no such model.
        """
        positions = self.config.__dataclass_fields__["positions"].default
        allowed: dict[str, tuple[object, ...]] = {
            "positions": (positions,),
            "positions_at": ("input",),
            "position_base": (10_000.0,),
            "norm_position": ("pre",),
            "use_bias": (True,),
            "local_window": (None,),
            "causal": (True,),
            "num_experts": (0,),
            "scale_scores": (True,),
            "scale_scores_by_layer": (False,),
        }
        names = {field.flax for field in self.fields.fields if isinstance(field, Field)}
        if "d_ff" not in names:
            allowed["d_ff"] = (None, 4 * config.d_model)
        if "embedding_dropout" not in names:
            allowed["embedding_dropout_rate"] = (0.0,)
        allowed = {name: x for name, x in (allowed | {**self.allowed}).items() if x}
        check_exportable(config, allowed, self.model_type)
        explicit = dataclasses.replace(
            config,
            d_ff=config.feed_forward_dim,
            embedding_dropout=config.embedding_dropout_rate,
            attention_dropout=config.attention_dropout_rate,
        )
        head = config.head if config.head in CLASSIFIERS else "causal_lm"
        if head not in self.classes:
            raise WeightsError(f"{self.model_type} has no class with the head {head}")
        fields = settings_to_hf(
            self.fields, explicit, model_type=self.model_type, architecture=self.classes[head]
        )
        if self.own_fields is not None:
            fields |= self.own_fields(config)
        return fields | (labels_to_hf(config.labels) if head in CLASSIFIERS else {})

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the tensors of a model with its head."""
        tokens, layers = self.prefix + self.tokens, self.prefix + self.layers
        rules = [*embedding("token_embedding", tokens)]
        for path, name in self.body.items():
            rules += self._rules(config, path, self.prefix + name)
        if self.joined is not None:
            rules += self._joined(config, f"{layers}.{self.joined}")
        for part, name in self.parts.items():
            rules += self._rules(config, f"layers/{part}", f"{layers}.{name}")
        ignored = [IgnoredTensor(self.prefix + name) for name in self.ignored]
        if config.head in CLASSIFIERS:
            name = CLASSIFIERS[config.head]
            bias = config.head == "token_classification" and self.linear_classifier_bias
            rules += linear("head/classifier", name, bias=bias)
        elif config.tie_output:
            ignored.append(IgnoredTensor(f"{self.output}.weight", same_as=f"{tokens}.weight"))
        else:
            rules += embedding("output_embedding", self.output)
        if config.output_bias and config.head not in CLASSIFIERS:
            rules.append(TensorRule(("output_bias",), f"{self.output}.bias", VECTOR))
        return TensorMapping(tuple(rules), tuple(ignored), self.prefix)

    def _joined(self, config: Config, name: str) -> list[TensorRule]:
        """Returns the rules of the one map of queries, keys and values."""
        three = [f"layers/attention/{part}" for part in ("query", "key", "value")]
        rules = [TensorRule(tuple(f"{p}/kernel" for p in three), f"{name}.weight", BY_HEAD)]
        if config.attention_bias:
            biases = tuple(f"{p}/bias" for p in three)
            rules.append(TensorRule(biases, f"{name}.bias", BY_HEAD_VECTOR))
        return rules

    def _rules(self, config: Config, path: str, name: str) -> tuple[TensorRule, ...]:
        """Returns the rules of a part; none for a norm that has no parameters."""
        if path.endswith("norm"):
            return norm(path, name) if config.norm_affine else ()
        if path.endswith("position_embedding"):
            return embedding(path, name)
        if path.endswith("_projection"):
            return linear(path, name, bias=False)
        if path.endswith("attention/output"):
            return linear(path, name, FROM_HEADS, bias=config.attention_output_bias)
        bias = config.attention_bias if "/attention/" in path else config.use_bias
        return linear(path, name, bias=bias)
