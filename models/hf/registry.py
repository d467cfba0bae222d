"""The families that can be read and written in the Hugging Face format.

The list of families is `models.registry.FAMILIES`. A family's record names its module in this
package (`Family.hf_module`), which defines `MAPPING`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Generic, TypeAlias, TypeVar

from ...data.common.errors import suggest
from ...data.common.json_text import JsonObject
from ..config import TransformerConfig
from ..nn.typing import Params
from ..registry import families, family_name
from .config_mapping import HFConfig
from .tensors.mapping import TensorMapping, WeightsError
from .tensors.read import TensorSource

Config = TypeVar("Config", bound=TransformerConfig)


def _unchanged(config: Config, params: Params) -> tuple[Config, Params]:
    return config, params


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFMapping(Generic[Config]):
    """Converts a family's configurations and tensors from and to the Hugging Face format."""

    model_types: tuple[str, ...]
    """The values of `model_type` in `config.json` that denote the family."""
    config_from_hf: Callable[[HFConfig, str], Config]
    """Converts the fields of a `config.json` (and its path, for messages) to a configuration."""
    config_to_hf: Callable[[Config], JsonObject]
    """Converts a configuration to the fields of a `config.json`."""
    tensor_mapping: Callable[[Config], TensorMapping]
    """Returns the mapping of parameters and tensors for a configuration."""
    to_hf_equivalent: Callable[[Config, Params], tuple[Config, Params]] = _unchanged
    """Rewrites a configuration and its parameters as an equivalent model that transformers has."""
    generation_defaults: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """Default token ids of each model type, from transformers' configuration class."""
    is_encoder_decoder: bool = False
    """Whether models generate a target from a source, beginning with a start token."""
    as_stored: Callable[[Config, Callable[[], TensorSource]], Config] = lambda config, tensors: (
        config
    )
    """Adjusts a configuration to facts that are known only from the stored tensors."""
    module_mapping: Callable[[Config], TensorMapping] | None = None
    """Returns the same mapping with the names that modules have in transformers. If None, the names
    in files are the same."""
    in_generate: Callable[[Config], Config] = lambda config: config
    """Returns the configuration of the model that transformers' `generate` runs."""
    notes: Callable[[Config], Sequence[str]] = lambda config: ()
    """Returns notes for the reader of a saved model, one line each."""


AnyMapping: TypeAlias = HFMapping[Any]
"""The mapping of any family, if the family is not known to the type checker."""


@functools.cache
def _mapping(module: str) -> AnyMapping:
    return import_module(f".{module}", __package__).MAPPING


def mapping_of(config: TransformerConfig) -> AnyMapping:
    """Returns the mapping for a configuration.

    Raises:
      WeightsError: The family cannot be converted to the Hugging Face format.
    """
    return mapping_of_family(family_name(config))


def mapping_of_family(name: str) -> AnyMapping:
    """Returns the mapping of a family, by its name in `models.registry.FAMILIES`.

    Raises:
      WeightsError: There is no such family, or it cannot be converted to the Hugging Face format.
    """
    if name not in families():
        raise WeightsError(f"unknown architecture {name!r}: {suggest(name, list(families()))}")
    module = families()[name].hf_module
    if module is None:
        raise WeightsError(
            f"models of the family {name} have no Hugging Face form: export as safetensors, npz or "
            "stablehlo (--form)"
        )
    return _mapping(module)


def mapping_of_type(model_type: object, source: str) -> AnyMapping:
    """Returns the mapping of a `model_type`.

    Args:
      model_type: The field of a `config.json`.
      source: The path of the file, for messages.

    Raises:
      WeightsError: No family has this model type.
    """
    # Try the family of that name first, so that the modules of other families are not imported.
    types: list[str] = []
    likely = str(model_type).replace("-", "_")
    for name in sorted(families(), key=lambda name: name != likely):
        if (module := families()[name].hf_module) is not None:
            mapping = _mapping(module)
            if model_type in mapping.model_types:
                return mapping
            types += mapping.model_types
    raise WeightsError(
        f"{source} is of the family {model_type!r}, which is not supported: "
        f"{suggest(str(model_type), sorted({*types}))}"
    )
