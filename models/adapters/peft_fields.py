"""The fields of `adapter_config.json`: which adapters are supported, and what they target.

A field whose value changes what an adapter computes, and an unknown field, is rejected by name
unless its value shows that it is unused.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ...data.common.json_text import JsonObject, JsonValue
from ..hf.tensor_mapping import WeightsError

READ = frozenset(
    """
    r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora
    modules_to_save layers_to_transform layers_pattern rank_pattern alpha_pattern
    trainable_token_indices lora_bias ensure_weight_tying init_lora_weights
    task_type peft_type base_model_name_or_path revision
    """.split()
)
"""Fields that describe the tensors and their targets. All are honored."""
WITHOUT_EFFECT = frozenset(
    """
    auto_mapping peft_version inference_mode megatron_core loftq_config eva_config corda_config
    lora_ga_config velora_config qalora_group_size runtime_config
    """.split()
)
"""Fields on how an adapter was made, or that have no effect unless another field is set."""
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initializations that leave the base unchanged."""
MERGE = "merge the adapter with peft (merge_and_unload), and import the model"
USE_PEFT = "no merged model computes the same: use it with peft"
CONVERT = (
    "save it with path_initial_model_for_weight_conversion of peft's save_pretrained, which turns "
    "it into an ordinary adapter"
)
REMEDIES = {
    "alora_invocation_tokens": USE_PEFT,
    "arrow_config": USE_PEFT,
    "monteclora_config": USE_PEFT,
    "layer_replication": USE_PEFT,
    "corda": CONVERT,
}
"""Remedies by the name of a field, or by the value of `init_lora_weights`; else `MERGE`."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "use_rslora": (bool,),
    "lora_bias": (bool,),
    "ensure_weight_tying": (bool,),
    "bias": (str,),
    "target_modules": (str, list, type(None)),
    "exclude_modules": (str, list, type(None)),
    "modules_to_save": (list, type(None)),
    "layers_to_transform": (int, list, type(None)),
    "layers_pattern": (str, list, type(None)),
    "rank_pattern": (dict, type(None)),
    "alpha_pattern": (dict, type(None)),
    "trainable_token_indices": (list, dict, type(None)),
    "task_type": (str, type(None)),
    "base_model_name_or_path": (str, type(None)),
    "revision": (str, type(None)),
}
ITEMS: Mapping[str, tuple[type, ...]] = {
    "layers_to_transform": (int,),
    "rank_pattern": (int,),
    "alpha_pattern": (int, float),
    "trainable_token_indices": (int, list),
}
"""Types of the values in a list or an object; else str."""
MAX_REPEATS = 5
"""Largest number of repetitions in a regular expression, which bounds the time of a match."""


def check_fields(fields: JsonObject, file: Path) -> None:
    """Raises WeightsError for an adapter that is more than products, biases and whole modules."""
    if fields.get("peft_type") != "LORA":
        raise WeightsError(f"{file} is of the type {fields.get('peft_type')!r}: only LORA is read")
    for name, value in fields.items():
        _check_type(name, value, file)
        if name in READ | WITHOUT_EFFECT or not value:
            continue
        remedy = REMEDIES.get(name, MERGE)
        raise WeightsError(f"{file}: {name} {value!r} is not supported: {remedy}")
    initial = fields.get("init_lora_weights", True)
    if initial not in INITIAL:
        remedy = REMEDIES.get(str(initial), MERGE)
        raise WeightsError(f"{file}: init_lora_weights {initial!r} is not supported: {remedy}")


def _check_type(name: str, value: JsonValue, file: Path) -> None:
    types = TYPES.get(name)
    if types is None:
        return
    items = [*value.values()] if isinstance(value, dict) else value
    valid = _is_of(value, types)
    if valid and isinstance(items, list):
        valid = all(_is_of(item, ITEMS.get(name, (str,))) for item in items)
    if not valid:
        raise WeightsError(f"{file}: {name} {value!r} is of a wrong type: restore it")


def _is_of(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (type(value) is not bool or bool in types)


def scale_of(fields: JsonObject, module: str, rank: int, file: Path) -> float:
    """Returns the factor of the product of a module's adapter."""
    patterns = fields.get("alpha_pattern") or {}
    assert isinstance(patterns, dict)
    found = [x for key, x in patterns.items() if _matches(rf"(.*\.)?({key})", module, key, file)]
    alpha = found[0] if found else fields.get("lora_alpha", 8)
    assert isinstance(alpha, int | float)
    return alpha / (rank**0.5 if fields.get("use_rslora") else rank)


def trained_tokens(fields: JsonObject, module: str, file: Path) -> tuple[int, ...]:
    """Returns the tokens whose rows of a module are trained."""
    stored = fields.get("trainable_token_indices")
    if isinstance(stored, dict):
        stored = next((x for name, x in stored.items() if module.endswith(name)), None)
    listed = stored if isinstance(stored, list) else []
    tokens = tuple(x for x in listed if type(x) is int and x >= 0)
    if not listed or len(tokens) != len(listed):
        raise WeightsError(
            f"{file}: trainable_token_indices does not name the tokens of {module}: restore it"
        )
    return tokens


def is_saved(fields: JsonObject, module: str) -> bool:
    """Returns whether the adapter replaces a module of the base with a copy."""
    return any(module.endswith(str(end)) for end in _listed(fields, "modules_to_save"))


def is_targeted(fields: JsonObject, module: str, file: Path) -> bool:
    """Returns whether peft adapts a module, which its tensors alone do not show."""
    excluded = fields.get("exclude_modules")
    if excluded and _is_named(excluded, module, file):
        return False
    targets = fields.get("target_modules")
    # If weights are kept tied, peft also adapts the modules that share them.
    if targets is None or targets == "all-linear" or fields.get("ensure_weight_tying"):
        return True
    if not _is_named(targets, module, file):
        return False
    layers = fields.get("layers_to_transform")
    # A module listed by its full name is adapted regardless of the layers.
    is_whole = isinstance(targets, str) or module in _listed(fields, "target_modules")
    if is_whole or layers is None or layers == []:
        return True
    patterns = _listed(fields, "layers_pattern") or [r"[^.]*"]
    for pattern in patterns:
        pattern = str(pattern)
        if found := _matches(rf"(?:^|.*?\.){pattern}\.(\d+)\..*", module, pattern, file):
            return int(found[1]) in (layers if isinstance(layers, list) else [layers])
    return False


def _is_named(names: JsonValue, module: str, file: Path) -> bool:
    if isinstance(names, str):
        return _matches(names, module, names, file) is not None
    assert isinstance(names, list)
    return any(f".{module}".endswith(f".{name}") for name in names)


def _listed(fields: JsonObject, name: str) -> list[JsonValue]:
    value = fields.get(name) or []
    return value if isinstance(value, list) else [value]


def _matches(pattern: str, module: str, written: str, file: Path) -> re.Match[str] | None:
    """Matches a whole name, after checking that the expression cannot take long."""
    if re.search(r"\)[*+{]", written) or len(re.findall(r"[*+{]", written)) > MAX_REPEATS:
        raise WeightsError(
            f"{file}: {written!r} repeats too often: name the modules, or use up to {MAX_REPEATS} "
            "repetitions and none of a group"
        )
    try:
        return re.fullmatch(pattern, module)
    except re.error as error:
        raise WeightsError(f"{file}: {written!r} is not a regular expression ({error})") from None
