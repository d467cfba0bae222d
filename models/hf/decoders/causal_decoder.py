"""Conversion from and to the Hugging Face format, shared by the rotary decoders.

A family defines its `DecoderForm`: its fields, the names of its modules, and its classes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...decoders.causal_decoder import CausalDecoderConfig, MixedDecoderConfig
from ..config_mapping import (
    ACTIVATIONS,
    Field,
    FixedField,
    HFConfig,
    Settings,
    none_for_defaults,
    settings_from_hf,
    take_field,
    typed_field,
)
from ..form import Form
from ..tensors.layout import FROM_HEADS, LINEAR
from ..tensors.mapping import (
    IgnoredTensor,
    TensorMapping,
    TensorRule,
    WeightsError,
    embedding,
    linear,
    lm_head,
    norm,
)
from .rotary import KINDS_OF_LAYERS, SCALINGS, rotary_settings, rotary_to_hf, take_rotary

Config = TypeVar("Config", bound=CausalDecoderConfig)
Parts = Mapping[str | tuple[str, ...], str]
"""The transformers name of each module in a layer. In transformers, several modules may be one
linear map."""

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
class DecoderForm(Form[Config]):
    """Describes how one decoder family is converted from and to the Hugging Face format.

    `fields` does not include the fields of rotary positions.
    """

    layer: Parts
    rotary_kinds: tuple[str, ...] = SCALINGS
    """The scalings of rotary frequencies that transformers supports for the family."""
    rope_base: float = 10_000.0
    """The rotary base that transformers assumes if a file states no base."""
    fractional: bool = False
    """Whether some dimensions of each head may stay unrotated."""

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`; see `Form`."""
        # `read_own_settings` and `take_rotary` remove the fields that they read. The table
        # (`self.fields`) reads the remaining fields.
        fields = dict(hf_config)
        max_length = self._default("max_position_embeddings", fields)
        settings = self.read_own_settings(fields, source)
        settings |= rotary_settings(
            take_rotary(fields, source, default_base=self.rope_base),
            source,
            kinds=self.rotary_kinds,
            max_length=max_length,
        )
        fraction = settings.get("rope_fraction", 1)
        problem = f"{source}: partial_rotary_factor {fraction!r} is not supported: only 1.0"
        require(fraction == 1 or self.fractional, problem, WeightsError)
        settings |= settings_from_hf(self.fields, fields, source)
        # Set the head, and replace values that equal a default by None.
        head = self.read_head(hf_config, settings, source)
        dropout = hf_config.get("classifier_dropout")
        if dropout is None:  # as in transformers
            dropout = hf_config.get("hidden_dropout")
        if head in CLASSIFIERS and dropout is not None:
            settings["classifier_dropout"] = dropout
        defaults = {"num_kv_heads": settings["num_heads"], "attention_dropout": 0}
        none_for_defaults(settings, defaults)
        if (settings["d_head"] or 0) * settings["num_heads"] == settings["d_model"]:
            settings["d_head"] = None
        config = self.config(**settings)
        # Set `full_layers` to None if None means the same layers.
        if isinstance(config, MixedDecoderConfig) and config.full_layers is not None:
            usual = dataclasses.replace(config, full_layers=None)
            if usual.windowed_layers == config.windowed_layers:
                return usual
        return config

    def _default(self, name: str, fields: JsonObject) -> JsonValue:
        rows = {row.hf: row for row in self.fields.fields if isinstance(row, Field)}
        return fields.get(name, rows[name].default)

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`; see `Form`."""
        # Reject settings that the family cannot express in transformers.
        kind = None if config.rope_scaling is None else config.rope_scaling.kind
        require(
            kind in (None, *self.rotary_kinds),
            f"{self.model_type} has no rotary scaling {kind!r}: only "
            f"{', '.join(map(repr, self.rotary_kinds))}",
            WeightsError,
        )
        head = config.head if config.head in CLASSIFIERS else "causal_lm"
        explicit = {
            "num_kv_heads": config.kv_heads,
            "d_head": config.head_dim,
            "d_ff": config.feed_forward_dim,
            "attention_dropout": config.attention_dropout_rate,
        }
        fixed = {"rope_fraction": () if self.fractional else (1.0,)}
        fields = self.write_fields(config, head, fixed=fixed, explicit=explicit)
        rotary = rotary_to_hf(config.rope_base, config.rope_scaling)
        if self.fractional:
            rotary["partial_rotary_factor"] = config.rope_fraction
        fields.setdefault("rope_parameters", rotary)
        # transformers' default may be outside the vocabulary.
        if self.generation_defaults.get("pad_token_id", 0) >= config.vocab_size:
            fields["pad_token_id"] = None
        # Write the rate only if it is given: both libraries have the same default.
        if head in CLASSIFIERS and config.classifier_dropout is not None:
            fields["classifier_dropout"] = config.classifier_dropout
        return fields

    def parts_of(self, config: Config) -> Parts:
        """Returns the transformers name of each module in a layer."""
        del config
        return self.layer

    def layers_of(self, config: Config, part: str | tuple[str, ...]) -> tuple[int, ...] | None:
        """Returns the indices of the layers that contain a module, or None if all layers do."""
        del config, part
        return None

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the mapping from the parameters of a model, including its head, to tensors."""
        # First the embedding, the layers and the final norm, and then the head.
        tokens = "model.embed_tokens"
        rules = [*embedding("token_embedding", tokens)]
        for parts, name in self.parts_of(config).items():
            of_part = self._rules(config, parts, f"model.layers.{{i}}.{name}")
            layers = self.layers_of(config, parts)
            rules += (dataclasses.replace(rule, layers=layers) for rule in of_part)
        rules += norm("final_norm", "model.norm", bias=config.norm_kind == "layer")
        ignored: list[IgnoredTensor] = []
        if config.head in CLASSIFIERS:
            rules += linear("head/classifier", "score", bias=config.head == CLASSIFIERS[1])
        else:
            output, ignored = lm_head(tokens if config.tie_output else None)
            rules += output
        # Older files store the rotary frequencies, which follow from the configuration.
        ignored.append(IgnoredTensor("model.layers.*.self_attn.rotary_emb.inv_freq"))
        return TensorMapping(tuple(rules), tuple(ignored), "model.")

    def _rules(
        self, config: Config, parts: str | tuple[str, ...], name: str
    ) -> tuple[TensorRule, ...]:
        # Several linear maps are stored as one matrix, concatenated along its outputs.
        if not isinstance(parts, str):
            return (
                TensorRule(tuple(f"layers/{p}/kernel" for p in parts), f"{name}.weight", LINEAR),
            )
        if parts.endswith("norm"):
            of_stream = not parts.startswith("attention/")
            bias = of_stream and config.norm_kind == "layer"
            return norm(f"layers/{parts}", name, bias=bias)
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
    epsilon: str = "rms_norm_eps",
    activation: Field | None = None,
    width: str = "intermediate_size",
) -> tuple[Field | FixedField, ...]:
    """Returns the fields that all families share, with the defaults of one family."""
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
        Field(epsilon, "norm_eps", rms_norm_eps),
        Field("tie_word_embeddings", "tie_output", tie_word_embeddings),
        Field("attention_dropout", "attention_dropout", 0.0),
    )


def take_layer_types(fields: JsonObject, num_layers: int, source: str) -> list[bool] | None:
    """Removes the field `layer_types`; returns whether each layer has a window, or None.

    Raises:
      WeightsError: The length of the list is not the number of layers, or a layer's type is
        unknown.
    """
    kinds = tuple[Literal["full_attention", "sliding_attention"], ...]
    types = take_field(fields, "layer_types", None, source, kind=kinds)
    if types is None:
        return None
    require(
        len(types) == num_layers,
        f"{source}: layer_types {types!r} is not supported: give one type for each of "
        f"{num_layers} layers",
        WeightsError,
    )
    return [KINDS_OF_LAYERS[kind] for kind in types]


def take_late_windows(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads and removes a Qwen's window fields; layers from `max_window_layers` on have windows.

    Raises:
      WeightsError: A field has a wrong type, or `layer_types` does not fit the layers.
    """
    first = take_field(fields, "max_window_layers", 28, source)
    num_layers = typed_field(fields, "num_hidden_layers", 32, source)
    # transformers applies the window only if `use_sliding_window` is true.
    used, window = fields.pop("use_sliding_window", False), fields.pop("sliding_window", 4096)
    window = window if used is True else None
    windowed = take_layer_types(fields, num_layers, source)
    if window is None:
        require(
            windowed is None or not any(windowed),
            f"{source}: layer_types has windows, but use_sliding_window and sliding_window "
            "state no window: make the fields agree",
            WeightsError,
        )
        return
    if windowed is None:
        # Files without `layer_types` state the first layer with a window.
        windowed = [i >= first for i in range(num_layers)]
    set_windows(settings, window, windowed, source)


def set_windows(settings: Settings, window: JsonValue, windowed: list[bool], source: str) -> None:
    """Sets `window` and `full_layers` if any layer is windowed.

    Raises:
      WeightsError: The window is not an integer.
    """
    if any(windowed):
        settings["window"] = typed_field({"sliding_window": window}, "sliding_window", 1, source)
        settings["full_layers"] = tuple(i for i, w in enumerate(windowed) if not w)


def windows_to_hf(config: MixedDecoderConfig) -> JsonObject:
    """Returns the window fields of a Qwen."""
    if config.window is None:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": config.window,
        "layer_types": layer_types_to_hf(config),
    }


def layer_types_to_hf(config: MixedDecoderConfig) -> list[JsonValue]:
    """Returns `layer_types` for a configuration with a window."""
    return [
        "sliding_attention" if windowed else "full_attention" for windowed in config.windowed_layers
    ]
