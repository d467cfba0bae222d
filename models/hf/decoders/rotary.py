"""Rotary positions in the Hugging Face format: the object `rope_parameters` and older fields."""

from collections.abc import Mapping, Sequence

from ....data.common.fields import require, without_none
from ....data.common.json_text import JsonObject, JsonValue
from ...decoders.causal_decoder import CausalDecoderConfig
from ...rotary_scaling import RotaryScaling
from ..config_mapping import Settings, check_type, take_field
from ..tensors.mapping import WeightsError

SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""The scalings of rotary frequencies that transformers supports for most families."""


def take_rotary(fields: JsonObject, source: str, *, default_base: float) -> JsonObject:
    """Removes the rotary fields from a `config.json`; returns them as in transformers 5.

    Older files have `rope_theta`, `rope_scaling` and `partial_rotary_factor` instead of the object
    `rope_parameters`.

    Raises:
      WeightsError: Fields contradict each other, or a field has a wrong type.
    """
    # Merge the fields of all objects. If two objects state a value, both values must be equal.
    rotary: JsonObject = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = dict(take_field(fields, name, None, source, kind=Mapping[str, object]) or {})
        # Older files name the type of scaling `type`.
        _merge(rotary, {"rope_type": given.pop("type", None)}, name, source)
        _merge(rotary, given, name, source)
    for name in ("rope_theta", "partial_rotary_factor"):
        _merge(rotary, {name: fields.pop(name, None)}, name, source)
    rotary.setdefault("rope_type", "default")
    rotary.setdefault("rope_theta", default_base)
    for name in ("rope_theta", "partial_rotary_factor"):
        check_type(name, rotary.get(name, 1.0), float, source)
    return rotary


def _merge(rotary: JsonObject, more: JsonObject, name: str, source: str) -> None:
    for key, value in more.items():
        # Null means the default.
        if value is not None and rotary.setdefault(key, value) != value:
            raise WeightsError(
                f"{source}: {name} has {key} {value!r}, and another field has "
                f"{rotary[key]!r}: remove the wrong one"
            )


KINDS_OF_LAYERS = {"full_attention": False, "sliding_attention": True}
"""The kinds of layers in `layer_types`, and whether they have a window."""


def take_windowed_base(
    fields: JsonObject, local: JsonObject, source: str, *, default_base: float
) -> JsonValue:
    """Returns the rotary base of windowed layers, whose frequencies are never scaled.

    Args:
      fields: The content of the file. If `rope_parameters` contains an object for each kind of
        layers, the object for layers without a window replaces it.
      local: The rotary fields of windowed layers, if they come from other fields of the file.
      source: The path of the file, for messages.
      default_base: The base that transformers uses if the file states no base.

    Raises:
      WeightsError: The windowed layers have a different kind of rotation, or fields contradict each
        other.
    """
    given = fields.get("rope_parameters")
    # Newer files have one object for each kind of layer.
    if isinstance(given, dict) and given.keys() & KINDS_OF_LAYERS:
        unknown = min(given.keys() - KINDS_OF_LAYERS, default=None)
        kinds = " and ".join(KINDS_OF_LAYERS)
        problem = f"{source}: rope_parameters {unknown} is unknown: only {kinds}"
        require(unknown is None, problem, WeightsError)
        fields["rope_parameters"] = given.get("full_attention")
        local = {**local, "rope_parameters": given.get("sliding_attention")}
    rotary = take_rotary(local, source, default_base=default_base)
    require(
        rotary.keys() == {"rope_type", "rope_theta"} and rotary["rope_type"] == "default",
        f"{source}: rotary scaling of sliding_attention, {rotary}, is not supported: only the "
        "type 'default'",
        WeightsError,
    )
    return rotary["rope_theta"]


def rotary_by_layers_to_hf(config: CausalDecoderConfig) -> JsonObject:
    """Returns the object `rope_parameters`, which contains an object for each kind of layers."""
    return {
        "full_attention": rotary_to_hf(config.rope_base, config.rope_scaling),
        "sliding_attention": {"rope_type": "default", "rope_theta": config.windowed_rope_base},
    }


def rotary_settings(
    rotary: JsonObject, source: str, *, kinds: Sequence[str], max_length: JsonValue
) -> Settings:
    """Converts the result of `take_rotary` to `rope_base`, `rope_fraction` and `rope_scaling`.

    Raises:
      WeightsError: The kind of scaling, or a field, is not supported.
    """
    kind = rotary.pop("rope_type")
    choices = ("default", *kinds)
    require(
        kind in choices,
        f"{source}: rotary scaling of type {kind!r} is not supported: only "
        f"{', '.join(map(repr, choices))}",
        WeightsError,
    )
    # The base and the rotated fraction are separate from the scaling.
    fraction = rotary.pop("partial_rotary_factor", None)
    settings: Settings = {"rope_base": rotary.pop("rope_theta"), "rope_fraction": fraction}
    settings = without_none(settings)
    for name in _UNUSED.get(str(kind), ()):
        rotary.pop(name, None)
    if kind != "default":
        settings["rope_scaling"] = scaling_from_hf(kind, rotary, max_length, source)
    elif rotary:
        raise WeightsError(
            f"{source}: rotary positions of type 'default' have no {', '.join(sorted(rotary))}: "
            "remove them, or name the type of scaling"
        )
    return settings


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
"""Fields of a scaling in transformers, and their names in flaxzoo."""

_LENGTH = "original_max_position_embeddings"
_UNUSED = {"default": [_LENGTH], "linear": [_LENGTH], "dynamic": [_LENGTH], "yarn": ["finetuned"]}
"""For each kind of scaling, the fields that transformers ignores. For the kind dynamic, it uses
`max_position_embeddings` instead; `finetuned` states whether the model was fine-tuned."""


def scaling_from_hf(
    kind: JsonValue, rotary: JsonObject, max_length: JsonValue, source: str
) -> RotaryScaling:
    """Converts the fields of a rotary scaling to a `RotaryScaling`.

    Raises:
      WeightsError: A field is unknown or missing.
    """
    unknown = sorted(rotary.keys() - _SCALING.keys())
    require(
        not unknown,
        f"{source} has unsupported fields of rotary positions: "
        f"{', '.join(unknown)}; remove them if the model does not depend on them",
        WeightsError,
    )
    # Convert the names of the fields, and fill in values that transformers derives from the maximum
    # length.
    settings: Settings = {_SCALING[name]: value for name, value in rotary.items()}
    if type(settings.get("factor")) is int:  # files may have whole numbers without a decimal point
        settings["factor"] = float(settings["factor"])
    if kind in ("llama3", "yarn", "longrope"):
        settings.setdefault("original_length", max_length)
    require(
        kind != "llama3" or {"low_frequency", "high_frequency"} <= settings.keys(),
        f"{source}: rotary scaling of type 'llama3' needs low_freq_factor and high_freq_factor",
        WeightsError,
    )
    for name in ("short_factors", "long_factors"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    # For the value 0, transformers uses its default, as for a missing field.
    settings = {name: x for name, x in settings.items() if x or not name.startswith("beta_")}
    return RotaryScaling(kind=kind, **settings)  # pyright: ignore[reportArgumentType]


def rotary_to_hf(base: float, scaling: RotaryScaling | None) -> JsonObject:
    """Returns the object `rope_parameters` for rotary positions.

    Raises:
      WeightsError: transformers cannot express the scaling.
    """
    rotary: JsonObject = {"rope_type": "default", "rope_theta": base}
    if scaling is None:
        return rotary
    require(
        scaling.kind != "dynamic" or scaling.original_length is None,
        f"rope_scaling of the kind dynamic has original_length {scaling.original_length}, "
        "which is max_position_embeddings in transformers: export the model with that "
        "max_length and without original_length",
        WeightsError,
    )
    # Write the fields that differ from their defaults; "llama3" always needs both factors.
    rotary["rope_type"] = scaling.kind
    for name, field in _SCALING.items():
        value = getattr(scaling, field)
        read = value != type(scaling).__dataclass_fields__[field].default
        if read or (scaling.kind == "llama3" and name in ("low_freq_factor", "high_freq_factor")):
            rotary[name] = list(value) if isinstance(value, tuple) else value
    return rotary
