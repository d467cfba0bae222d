"""The form that the decoders of today share in Hugging Face.

A family states what is its own in a `DecoderForm`: fields, names of parts, classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ....data.common.json_text import JsonObject, JsonValue
from ...decoders.causal_decoder import CausalDecoderConfig, MixedDecoderConfig
from ...rotary_scaling import RotaryScaling
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
    FROM_HEADS,
    LINEAR,
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    linear,
    lm_head,
    norm,
)

Config = TypeVar("Config", bound=CausalDecoderConfig)
Parts = Mapping[str | tuple[str, ...], str]
"""For each part of a layer its name in transformers; several parts may be one linear map."""

ATTENTION: Parts = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
}
FEED_FORWARD: Parts = {
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj",
}
NORMS: Parts = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}
QUERY_KEY_NORMS: Parts = {
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
}

CLASSIFIERS = ("sequence_classification", "token_classification")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderForm(Generic[Config]):
    """The differences between one family and the others in Hugging Face's form."""

    config: type[Config]
    model_type: str
    classes: Mapping[str, str]
    """For each head the class of transformers; "none": the class without a head."""
    fields: ConfigMapping
    """The fields besides those of rotary positions."""
    layer: Parts
    rotary_kinds: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    """The scalings of rotary frequencies that transformers knows for the family."""
    rope_base: float = 10_000.0
    """The base that transformers takes where a file has none."""
    fractional: bool = False
    """Whether a part of each head may be left without rotation."""
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
        fields = dict(hf_config)
        settings: Settings = {}
        max_length = self._default("max_position_embeddings", fields)
        if self.own_settings is not None:
            self.own_settings(fields, settings, source)
        rotary = take_rotary(fields, source, default_base=self.rope_base)
        settings |= self.rotary_settings(rotary, max_length, source)
        settings |= settings_from_hf(self.fields, fields, source)
        heads = {name: head for head, name in self.classes.items()}
        head = heads[model_class(hf_config, tuple(self.classes.values()), source)]
        # A body without a language-model head is given the one that needs no tensor.
        settings["tie_output"] |= head != "causal_lm"
        if head in CLASSIFIERS:
            settings |= {"head": head, "labels": labels_from_hf(hf_config, source)}
            dropout = hf_config.get("classifier_dropout")
            if dropout is not None:
                settings["classifier_dropout"] = dropout
        if settings["num_kv_heads"] == settings["num_heads"]:
            settings["num_kv_heads"] = None
        if (settings["d_head"] or 0) * settings["num_heads"] == settings["d_model"]:
            settings["d_head"] = None
        if settings.get("attention_dropout") == 0:
            settings["attention_dropout"] = None
        config = self.config(**settings)
        if isinstance(config, MixedDecoderConfig) and config.full_layers is not None:
            usual = dataclasses.replace(config, full_layers=None)
            if usual.windowed_layers == config.windowed_layers:
                return usual
        return config

    def _default(self, name: str, fields: JsonObject) -> JsonValue:
        rows = {row.hf: row for row in self.fields.fields if isinstance(row, Field)}
        return fields.get(name, rows[name].default)

    def rotary_settings(self, rotary: JsonObject, max_length: JsonValue, source: str) -> Settings:
        """Converts the object `rope_parameters` of a file.

        Raises:
          WeightsError: The kind of scaling, or a field, is not supported.
        """
        kind = rotary.pop("rope_type")
        if kind not in ("default", *self.rotary_kinds):
            choices = ", ".join(map(repr, ("default", *self.rotary_kinds)))
            raise WeightsError(
                f"{source}: rotary scaling of type {kind!r} is not supported: only {choices}"
            )
        settings: Settings = {"rope_base": rotary.pop("rope_theta")}
        fraction = rotary.pop("partial_rotary_factor", None)
        if fraction is not None and fraction != 1:
            if not self.fractional:
                raise WeightsError(
                    f"{source}: partial_rotary_factor {fraction!r} is not supported: only 1.0"
                )
            settings["rope_fraction"] = fraction
        if kind in ("default", "linear", "dynamic"):  # transformers does not read it
            rotary.pop("original_max_position_embeddings", None)
        if kind != "default":
            settings["rope_scaling"] = scaling_from_hf(kind, rotary, max_length, source)
        elif rotary:
            raise WeightsError(
                f"{source}: rotary positions of type 'default' have no {', '.join(sorted(rotary))}:"
                " take them out, or name the type of scaling"
            )
        return settings

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`.

        Raises:
          WeightsError: transformers has no such model.
        """
        allowed: dict[str, tuple[object, ...]] = {}
        if not self.fractional:
            allowed["rope_fraction"] = (1.0,)
        check_exportable(config, allowed, self.model_type)
        kind = None if config.rope_scaling is None else config.rope_scaling.kind
        if kind not in (None, *self.rotary_kinds):
            raise WeightsError(
                f"{self.model_type} has no rotary scaling {kind!r}: only "
                f"{', '.join(map(repr, self.rotary_kinds))}"
            )
        explicit = dataclasses.replace(
            config,
            num_kv_heads=config.kv_heads,
            d_head=config.head_dim,
            d_ff=config.feed_forward_dim,
            attention_dropout=config.attention_dropout_rate,
        )
        head = config.head if config.head in CLASSIFIERS else "causal_lm"
        if head not in self.classes:
            raise WeightsError(f"{self.model_type} has no class with the head {head}")
        fields = settings_to_hf(
            self.fields, explicit, model_type=self.model_type, architecture=self.classes[head]
        )
        fields["rope_parameters"] = rotary_to_hf(config.rope_base, config.rope_scaling)
        if config.rope_fraction != 1:
            fields["rope_parameters"]["partial_rotary_factor"] = config.rope_fraction
        if self.own_fields is not None:
            fields |= self.own_fields(config)
        if head in CLASSIFIERS:
            fields |= labels_to_hf(config.labels)
            if config.classifier_dropout is not None:  # else transformers takes 0.1, too
                fields["classifier_dropout"] = config.classifier_dropout
        return fields

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the tensors of a model with its head."""
        tokens = "model.embed_tokens"
        rules = [*embedding("token_embedding", tokens)]
        for parts, name in self.layer.items():
            rules += self._rules(config, parts, f"model.layers.{{i}}.{name}")
        rules += norm("final_norm", "model.norm", bias=False)
        ignored: list[IgnoredTensor] = []
        if config.head in CLASSIFIERS:
            rules += linear("head/classifier", "score", bias=config.head == CLASSIFIERS[1])
        else:
            output, ignored = lm_head(tokens if config.tie_output else None)
            rules += output
        # Older files have the rotary frequencies, which follow from the configuration.
        ignored.append(IgnoredTensor("model.layers.*.self_attn.rotary_emb.inv_freq"))
        return TensorMapping(tuple(rules), tuple(ignored), "model.")

    def _rules(
        self, config: Config, parts: str | tuple[str, ...], name: str
    ) -> tuple[TensorRule, ...]:
        if not isinstance(parts, str):
            return (
                TensorRule(tuple(f"layers/{p}/kernel" for p in parts), f"{name}.weight", LINEAR),
            )
        if parts.endswith("norm"):
            return norm(f"layers/{parts}", name, bias=False)
        if parts.startswith("experts/"):
            return (TensorRule((f"layers/{parts}",), f"{name}.weight", LINEAR),)
        if parts == "attention/output":
            return linear(f"layers/{parts}", name, FROM_HEADS, bias=config.attention_output_bias)
        bias = config.attention_bias if parts.startswith("attention/") else config.use_bias
        return linear(f"layers/{parts}", name, bias=bias)


def size_fields(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None,
    max_position_embeddings: int,
    head_dim: int | None = None,
    tie_word_embeddings: bool = False,
    rms_norm_eps: float = 1e-6,
    activation: Field | None = None,
    width: str = "intermediate_size",
) -> tuple[Field | FixedField, ...]:
    """Returns the fields that all families have, with the defaults of one in transformers."""
    return (
        Field("vocab_size", "vocab_size", vocab_size),
        Field("max_position_embeddings", "max_length", max_position_embeddings),
        Field("num_hidden_layers", "num_layers", num_hidden_layers),
        Field("hidden_size", "d_model", hidden_size),
        Field("num_attention_heads", "num_heads", num_attention_heads),
        Field("num_key_value_heads", "num_kv_heads", num_key_value_heads, kind=int),
        Field("head_dim", "d_head", head_dim, kind=int),
        Field(width, "d_ff", intermediate_size),
        activation or Field("hidden_act", "activation", "silu", ACTIVATIONS),
        Field("rms_norm_eps", "norm_eps", rms_norm_eps),
        Field("tie_word_embeddings", "tie_output", tie_word_embeddings),
        Field("attention_dropout", "attention_dropout", 0.0),
    )


def take_rotary(fields: JsonObject, source: str, *, default_base: float) -> JsonObject:
    """Takes the fields of rotary positions out of a `config.json`, in the form of transformers 5.

    Older files have `rope_theta`, `rope_scaling` and `partial_rotary_factor` instead of the object
    `rope_parameters`.

    Raises:
      WeightsError: Two of them contradict each other, or one is not an object.
    """
    rotary: JsonObject = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = fields.pop(name, None)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise WeightsError(f"{source}: {name} {given!r} is not an object")
        _merge(rotary, {_RENAMED.get(key, key): x for key, x in given.items()}, name, source)
    for name in ("rope_theta", "partial_rotary_factor"):
        if (value := fields.pop(name, None)) is not None:
            _merge(rotary, {name: value}, name, source)
    rotary = {name: value for name, value in rotary.items() if value is not None}
    rotary.setdefault("rope_type", "default")
    rotary.setdefault("rope_theta", default_base)
    for name in ("rope_theta", "partial_rotary_factor"):
        value = rotary.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WeightsError(f"{source}: {name} {value!r} is not of type float")
    return rotary


_RENAMED = {"type": "rope_type"}


def _merge(rotary: JsonObject, more: JsonObject, name: str, source: str) -> None:
    for key, value in more.items():
        if value is not None and rotary.setdefault(key, value) != value:
            raise WeightsError(
                f"{source}: {name} says {key} {value!r}, and elsewhere it is {rotary[key]!r}: take "
                "the wrong one out"
            )


_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "low_freq_factor": "low_frequency",
    "high_freq_factor": "high_frequency",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}
"""For each field of a scaling in transformers the one here."""


def scaling_from_hf(
    kind: JsonValue, rotary: JsonObject, max_length: JsonValue, source: str
) -> RotaryScaling:
    """Converts the fields of a scaling.

    Raises:
      WeightsError: A field is unknown, missing or of another kind.
    """
    if unknown := sorted(rotary.keys() - _SCALING.keys()):
        raise WeightsError(
            f"{source} has fields of rotary positions that nothing here honours: "
            f"{', '.join(unknown)}; take them out if the model does not depend on them"
        )
    settings: Settings = {_SCALING[name]: value for name, value in rotary.items()}
    if kind in ("llama3", "yarn", "longrope"):
        settings.setdefault("original_length", max_length)
    if kind == "dynamic":  # transformers does not read it there: it is max_position_embeddings
        settings.pop("original_length", None)
    if kind == "llama3" and not {"low_frequency", "high_frequency"} <= settings.keys():
        raise WeightsError(
            f"{source}: rotary scaling of type 'llama3' needs low_freq_factor and high_freq_factor"
        )
    for name in ("short_factors", "long_factors"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    # transformers takes its default for 0, too.
    settings = {name: x for name, x in settings.items() if x or not name.startswith("beta_")}
    return RotaryScaling(kind=kind, **settings)  # pyright: ignore[reportArgumentType]


def rotary_to_hf(base: float, scaling: RotaryScaling | None) -> JsonObject:
    """Returns the object `rope_parameters` of rotary positions.

    Raises:
      WeightsError: transformers cannot express the scaling.
    """
    rotary: JsonObject = {"rope_type": "default", "rope_theta": base}
    if scaling is None:
        return rotary
    if scaling.kind == "dynamic" and scaling.original_length is not None:
        raise WeightsError(
            f"rope_scaling of the kind dynamic has original_length {scaling.original_length}, "
            "which is max_position_embeddings in transformers: export the model with that "
            "max_length and without original_length"
        )
    rotary["rope_type"] = scaling.kind
    for name, field in _SCALING.items():
        value = getattr(scaling, field)
        read = value != type(scaling).__dataclass_fields__[field].default
        if read or (scaling.kind == "llama3" and name in ("low_freq_factor", "high_freq_factor")):
            rotary[name] = list(value) if isinstance(value, tuple) else value
    return rotary


def take_layer_types(fields: JsonObject, num_layers: int, source: str) -> list[bool] | None:
    """Takes `layer_types` out of the fields: whether each layer has a window; None: not stated.

    Raises:
      WeightsError: It has another length than the layers, or a layer is of an unknown type.
    """
    types = fields.pop("layer_types", None)
    if types is None:
        return None
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != num_layers or set(types) - set(known):
        raise WeightsError(
            f"{source}: layer_types {types!r} is not supported: only one of "
            f"{', '.join(map(repr, known))} for each of {num_layers} layers"
        )
    return [known[str(kind)] for kind in types]


def take_late_windows(fields: JsonObject, settings: Settings, source: str) -> None:
    """Takes the fields of windows out of a Qwen's: the layers from `max_window_layers` on have one.

    Raises:
      WeightsError: A field is of another type, or `layer_types` does not suit the layers.
    """
    used = fields.pop("use_sliding_window", False)
    window = fields.pop("sliding_window", 4096)
    first = fields.pop("max_window_layers", 28)
    num_layers = fields.get("num_hidden_layers", 32)
    for name, value in (("max_window_layers", first), ("num_hidden_layers", num_layers)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise WeightsError(f"{source}: {name} {value!r} is not of type int")
    assert isinstance(num_layers, int)
    assert isinstance(first, int)
    window = window if used is True else None
    windowed = take_layer_types(fields, num_layers, source)
    if window is None:
        if windowed is not None and any(windowed):
            raise WeightsError(
                f"{source}: layer_types has windows, but use_sliding_window and sliding_window "
                "state none: make them agree"
            )
        return
    if windowed is None:
        windowed = [i >= first for i in range(num_layers)]
    set_windows(settings, window, windowed, source)


def set_windows(settings: Settings, window: JsonValue, windowed: list[bool], source: str) -> None:
    """Sets `window` and `full_layers`; without windowed layers there is no window.

    Raises:
      WeightsError: The window is no number.
    """
    if isinstance(window, bool) or not isinstance(window, int):
        raise WeightsError(f"{source}: sliding_window {window!r} is not of type int")
    if any(windowed):
        settings["window"] = window
        settings["full_layers"] = tuple(i for i, w in enumerate(windowed) if not w)


def windows_to_hf(config: MixedDecoderConfig) -> JsonObject:
    """Returns the fields of windows of a Qwen."""
    if config.window is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": config.window,
        "layer_types": layer_types_to_hf(config),
    }


def layer_types_to_hf(config: MixedDecoderConfig) -> list[JsonValue]:
    """Returns `layer_types` of a configuration with a window."""
    return [
        "sliding_attention" if windowed else "full_attention" for windowed in config.windowed_layers
    ]
