"""Converts Hugging Face configurations to flaxzoo configurations and back, by a table of fields.

For every field of a `config.json`, the table states how it is converted or that it has no effect.
Any other field is rejected by name. A dotted name such as `rope_parameters.rope_theta` denotes a
field in a nested object.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ...data.common.fields import expectation, require
from ...data.common.json_text import JsonObject, JsonValue
from ..config import Settings, TransformerConfig
from .tensors.mapping import WeightsError

HFConfig: TypeAlias = Mapping[str, JsonValue]
"""The content of a `config.json`, or some of its fields."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}
"""The names of non-linearities in Hugging Face, and the corresponding names in flaxzoo. If several
Hugging Face names correspond to one name, the first is written on export.
"""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that both configurations have."""

    hf: str
    flax: str
    default: JsonValue
    """The value that transformers uses if a file lacks the field."""
    values: Mapping[str, str] | None = None
    """The supported values in Hugging Face, and the corresponding values in flaxzoo. If None,
    values are copied."""
    kind: Any = None
    """The type of a non-null value. If None, the type of the default, or any type if the default is
    null.
    """

    @property
    def hint(self) -> object:
        """The type that a value in a file must have; see `data/common/fields.py`."""
        if self.default is None:
            return (self.kind or object) | None
        return self.kind or type(self.default)

    def from_hf(self, hf_config: Mapping[str, JsonValue], source: str) -> Settings:
        """Returns the setting that the field in a file specifies, after checking its value."""
        value = hf_config.get(self.hf, self.default)
        check_type(self.hf, value, self.hint, source)
        if type(value) is int and float in (self.kind, type(self.default)):
            value = float(value)  # files may write whole numbers without a decimal point
        if self.values is None:
            return {self.flax: value}
        _check_supported(self.hf, value, self.values, source)
        return {self.flax: self.values[str(value)]}

    def to_hf(self, config: TransformerConfig) -> JsonValue:
        """Returns the value of the field for a configuration."""
        value = getattr(config, self.flax)
        if self.values is None:
            return value
        return next(hf for hf, flax in self.values.items() if flax == value)


@dataclasses.dataclass(frozen=True)
class FixedField:
    """A Hugging Face field that flaxzoo lacks. Only some of its values are supported."""

    hf: str
    values: tuple[JsonValue, ...]
    """Supported values. The first value is the default of transformers and is written on export."""

    @property
    def default(self) -> JsonValue:
        """The value that transformers uses if a file lacks the field."""
        return self.values[0]

    def from_hf(self, hf_config: Mapping[str, object], source: str) -> Settings:
        """Checks the value of the field in a file, and returns no settings."""
        value = hf_config.get(self.hf, self.default)
        _check_supported(self.hf, value, self.values, source)
        return {}

    def to_hf(self, config: TransformerConfig) -> JsonValue:
        """Returns the value of the field."""
        del config
        return self.default


def with_defaults(
    rows: Iterable[Field | FixedField], **defaults: JsonValue
) -> tuple[Field | FixedField, ...]:
    """Returns the fields with new default values, given by the fields' names in transformers."""
    return tuple(
        dataclasses.replace(row, default=defaults.get(row.hf, row.default))
        if isinstance(row, Field)
        else row
        for row in rows
    )


@dataclasses.dataclass(frozen=True)
class ConfigMapping:
    """The table of all fields that the Hugging Face configurations of a family may contain."""

    fields: tuple[Field | FixedField, ...]
    ignored: frozenset[str] = frozenset()
    """Fields that do not change the forward pass, in addition to `IGNORED`."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Alternative names of fields, and of objects that contain fields, with the main name of each.
    """


IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flax_model_name
    _name_or_path _num_labels architectures attn_implementation auto_map bos_token_id
    chunk_size_feed_forward classifier_dropout decoder_start_token_id directionality dtype
    eos_token_id
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_range is_encoder_decoder label2id
    model_type num_labels output_attentions output_hidden_states output_past
    output_scores pad_token_id prefix problem_type return_dict return_dict_in_generate
    sbert_ce_default_activation_function sentence_transformers
    sep_token_id task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()
)
"""Fields that, in every family, do not change the forward pass or are read elsewhere."""

UNUSED: Mapping[str, tuple[JsonValue, ...]] = {
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, None),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
}
"""Fields that every transformers configuration has, and for each field the values that have no
effect, beginning with the default. A family may support additional values."""


def settings_from_hf(mapping: ConfigMapping, hf_config: HFConfig, source: str) -> Settings:
    """Converts the fields of a `config.json` to arguments of a configuration.

    Args:
      mapping: The fields of the family.
      hf_config: The content of the file.
      source: The path of the file, for messages.

    Raises:
      WeightsError: A field is unknown, has an unsupported value, or is given under two names with
        different values.
    """
    # Reject unknown fields, so that no setting is lost silently.
    hf_config = _with_full_names(mapping, hf_config, source)
    known = {field.hf for field in mapping.fields} | mapping.ignored | IGNORED
    for name in hf_config.keys() & (UNUSED.keys() - known):
        _check_supported(name, hf_config[name], UNUSED[name], source)
    unknown = sorted(hf_config.keys() - known - UNUSED.keys())
    require(
        not unknown,
        f"{source} has unsupported fields: "
        f"{', '.join(_with_nearest(name, known) for name in unknown)}; remove them if "
        f"the model does not depend on them",
        WeightsError,
    )
    # Convert the known fields. A missing field has transformers' default.
    settings: Settings = {}
    for field in mapping.fields:
        settings |= field.from_hf(hf_config, source)
    return settings


def _with_nearest(name: str, known: Collection[str]) -> str:
    """Describes an unknown name, with the known name that was probably meant."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{name} (did you mean {nearest[0]}?)" if nearest else name


def _with_full_names(mapping: ConfigMapping, hf_config: HFConfig, source: str) -> JsonObject:
    """Flattens nested objects and resolves aliases; returns fields by their dotted names."""
    names = {field.hf for field in mapping.fields} | mapping.ignored | set(mapping.aliases)
    # A known name with a dot is a field of a nested object.
    parents = {name.split(".")[0] for name in names if "." in name}
    parents |= {alias for alias, name in mapping.aliases.items() if name in parents}
    written: list[tuple[str, JsonValue]] = []
    value: Any
    for name, value in hf_config.items():
        if name in parents:
            check_type(name, value, Mapping[str, object] | None, source)
            parent = mapping.aliases.get(name, name)
            # Treat null as an object without fields.
            written += [(f"{parent}.{key}", nested) for key, nested in (value or {}).items()]
        else:
            written.append((name, value))
    # A field's main name takes precedence over its aliases; a null alias is ignored.
    named: JsonObject = {}
    for alias, value in sorted(written, key=lambda pair: pair[0] in mapping.aliases):
        name = mapping.aliases.get(alias, alias)
        if alias != name and value is None:
            continue
        first = named.setdefault(name, value)
        if first is not value and first != value:  # NaN differs from NaN, so compare identity first
            raise WeightsError(
                f"{source}: {alias} {value!r} is another name of {name}, which is {named[name]!r}: "
                "remove the wrong one"
            )
    return named


def typed_field(
    hf_config: HFConfig, name: str, default: Any, source: str, *, kind: Any = None
) -> Any:
    """Returns the value of a field that the table of fields cannot describe, after a type check.

    Args:
      hf_config: The content of the file.
      name: The name of the field.
      default: The value of the field if the file lacks it.
      source: The path of the file, for messages.
      kind: The type of a non-null value, which may have a range. If None, the type of the default.

    Raises:
      WeightsError: The value has a wrong type.
    """
    value = hf_config.get(name, default)
    check_type(name, value, Field(name, "", default, kind=kind).hint, source)
    return value


def take_field(
    fields: JsonObject, name: str, default: Any, source: str, *, kind: Any = None
) -> Any:
    """Removes a field and returns its value; see `typed_field`."""
    value = typed_field(fields, name, default, source, kind=kind)
    fields.pop(name, None)
    return value


def check_type(name: str, value: object, hint: object, source: str) -> None:
    """Checks the value of a field against its type; a float may be written as an integer.

    Raises:
      WeightsError: The value has a wrong type, or is out of the type's range.
    """
    expected = expectation(value, hint)
    require(not expected, f"{source}: {name} {value!r} must be {expected}", WeightsError)


def _check_supported(name: str, value: object, values: Iterable[object], source: str) -> None:
    supported = list(values)
    # Format the message only for an error, because this runs for each field and each request.
    if value not in supported:
        choices = ", ".join(map(repr, supported))
        raise WeightsError(f"{source}: {name} {value!r} is not supported: only {choices}")


def none_for_defaults(settings: Settings, defaults: Settings) -> None:
    """Sets a setting to None if it equals the value that None represents.

    As a result, configurations with the same meaning compare equal.

    Args:
      settings: The settings of a configuration; this function changes them.
      defaults: For some settings, the value that None represents.
    """
    for name in settings.keys() & defaults.keys():
        if settings[name] == defaults[name]:
            settings[name] = None


def model_class(hf_config: HFConfig, classes: Sequence[str], source: str) -> str:
    """Returns the class of transformers that wrote a model.

    Args:
      hf_config: The content of a `config.json`.
      classes: The supported classes; the first is the default.
      source: The path of the file, for messages.

    Raises:
      WeightsError: The model was written by a class that is not supported.
    """
    name, *_ = typed_field(hf_config, "architectures", None, source, kind=Sequence[str]) or classes
    known = ", ".join(classes)
    problem = f"{source}: a {name} is not supported: choose from {known}"
    require(name in classes, problem, WeightsError)
    return name


def settings_to_hf(
    mapping: ConfigMapping, config: TransformerConfig, *, model_type: str, architecture: str
) -> JsonObject:
    """Returns the fields of a `config.json` for a configuration.

    Args:
      mapping: The fields of the family.
      config: The configuration.
      model_type: The name of the family in transformers.
      architecture: The class of transformers that has the model's head.
    """
    hf_config: JsonObject = {"model_type": model_type, "architectures": [architecture]}
    for field in mapping.fields:
        # A field with a dotted name is written into nested objects.
        *parents, name = field.hf.split(".")
        target: Any = hf_config
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = field.to_hf(config)
    return hf_config


ONLY_HERE: Mapping[str, tuple[object, ...]] = {
    "attention": ("learned",),
    "pooling": ("cls",),
    "head_convolution": (None,),
    "norm_affine": (True,),
    "add_residual": (True,),
    "residual_scalar": (False,),
    "positions_at": ("input",),
    "scale_scores": (True,),
    "num_shared_experts": (0,),
    "expert_capacity": (None,),
}
"""Settings that no Hugging Face family can vary, and the only values that they can have."""


def check_exportable(
    config: TransformerConfig, allowed: Mapping[str, tuple[object, ...]], family: str
) -> None:
    """Checks the settings that a Hugging Face family cannot vary, including `ONLY_HERE`.

    Args:
      config: The configuration to export.
      allowed: The values that the family supports, by setting; an empty tuple allows every value.
      family: The name of the family, for messages.

    Raises:
      WeightsError: A setting has an unsupported value; the message lists all such settings.
    """
    # The values that the family allows take precedence over `ONLY_HERE`.
    supported = {
        **ONLY_HERE,
        "d_k": (None, config.head_dim),
        "d_v": (None, config.head_dim),
        **allowed,
    }
    # An empty tuple of choices allows every value.
    differing = {
        f"{name} {value!r}": choices
        for name, choices in supported.items()
        if choices and (value := getattr(config, name, choices[0])) not in choices
    }
    only = "; ".join(
        f"{setting}: only {', '.join(map(repr, choices))}" for setting, choices in differing.items()
    )
    problem = f"{family} has no {only}; train the model with this value to export it"
    require(not differing, problem, WeightsError)


def labels_from_hf(hf_config: HFConfig, source: str) -> tuple[str, ...]:
    """Returns the names of the labels, in the order of their ids.

    Raises:
      WeightsError: The fields `id2label` and `num_labels` do not define labels.
    """
    names = typed_field(hf_config, "id2label", None, source, kind=Mapping[str, object])
    if not names:
        # Without names, transformers calls the labels LABEL_0, LABEL_1 and so on.
        number = typed_field(hf_config, "num_labels", 2, source)
        return tuple(map("LABEL_{}".format, range(number)))
    require(
        {*map(str, names)} == {*map(str, range(len(names)))},
        f"{source}: id2label {names!r} does not define labels: give an object with a name for "
        "each number from 0",
        WeightsError,
    )
    return tuple(str(names[key]) for key in sorted(names, key=int))


def labels_to_hf(labels: Sequence[str]) -> JsonObject:
    """Returns the fields that name the labels of a classifier."""
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }
