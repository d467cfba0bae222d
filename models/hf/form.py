"""The base class of the conversions of families from and to the Hugging Face format.

Each kind of model derives its own class from `Form`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ...data.common.fields import require
from ...data.common.json_text import JsonObject
from ..config import TransformerConfig
from ..heads.specs import HEADS
from .config_mapping import (
    ConfigMapping,
    HFConfig,
    Settings,
    check_exportable,
    labels_from_hf,
    labels_to_hf,
    model_class,
    settings_to_hf,
)
from .registry import HFMapping
from .tensors.mapping import TensorMapping, WeightsError

Config = TypeVar("Config", bound=TransformerConfig)


def head_classes(config: type[TransformerConfig], name: str, **renamed: str) -> dict[str, str]:
    """Returns the transformers class for each head of a family, the default class first.

    Args:
      config: The configuration of the family.
      name: The prefix of the class names, such as "Bert".
      **renamed: For each head whose class name does not end in `HeadSpec.hf_class_suffix`, the
        class.
    """
    choices = config.__dataclass_fields__["head"].metadata["choices"]
    # transformers has no value head. Every family has a class without a head.
    heads = [head for head in (*choices, "none") if head != "causal_lm_with_value"]
    return {head: name + HEADS[head].hf_class_suffix for head in heads} | renamed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form(Generic[Config]):
    """Describes how one family is converted from and to the Hugging Face format."""

    config: type[Config]
    model_type: str
    classes: Mapping[str, str]
    """The transformers class of each head; "none" is the class without a head."""
    fields: ConfigMapping
    allowed: Mapping[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)
    """Allowed values of settings that the family cannot vary. An empty tuple marks a setting that
    the family can vary although other families of its kind cannot.
    """
    own_settings: Callable[[JsonObject, Settings, str], None] | None = None
    """Reads the fields that `fields` cannot describe: removes them from the given fields, and adds
    the resulting settings. Its arguments are the fields, the settings, and a path for messages."""
    own_fields: Callable[[Config], JsonObject] | None = None
    """The inverse of `own_settings`, for export: returns additional fields for a configuration."""
    generation_defaults: Mapping[str, int] = dataclasses.field(default_factory=dict)
    in_generate: Callable[[Config], Config] = lambda config: config
    """Returns the configuration of the model that transformers' `generate` runs."""

    def mapping(self) -> HFMapping[Config]:
        """Returns the family's `HFMapping`."""
        return HFMapping(
            model_types=(self.model_type,),
            config_from_hf=self.config_from_hf,
            config_to_hf=self.config_to_hf,
            tensor_mapping=self.tensor_mapping,
            generation_defaults={self.model_type: self.generation_defaults},
            in_generate=self.in_generate,
        )

    def config_from_hf(self, hf_config: HFConfig, source: str) -> Config:
        """Converts the content of a `config.json`.

        Args:
          hf_config: The content of the file.
          source: The path of the file, for messages.

        Raises:
          WeightsError: A field, or the class that wrote the model, is not supported.
        """
        raise NotImplementedError

    def config_to_hf(self, config: Config) -> JsonObject:
        """Converts a configuration to the content of a `config.json`.

        Raises:
          WeightsError: transformers has no such model.
        """
        raise NotImplementedError

    def tensor_mapping(self, config: Config) -> TensorMapping:
        """Returns the mapping from the parameters of a model, including its head, to tensors."""
        raise NotImplementedError

    def read_own_settings(self, fields: JsonObject, source: str) -> Settings:
        """Returns the settings that `own_settings` reads, and removes their fields."""
        settings: Settings = {}
        if self.own_settings is not None:
            self.own_settings(fields, settings, source)
        return settings

    def read_head(self, hf_config: HFConfig, settings: Settings, source: str) -> str:
        """Returns the head of the class that wrote a model; sets `labels` and `tie_output`.

        Raises:
          WeightsError: The class, or the labels, are not supported.
        """
        heads = {name: head for head, name in self.classes.items()}
        head = heads[model_class(hf_config, tuple(heads), source)]
        # Without token logits, assume a tied output, which needs no tensor.
        settings["tie_output"] |= not HEADS[head].has_token_logits
        if HEADS[head].needs_labels:
            settings |= {"head": head, "labels": labels_from_hf(hf_config, source)}
        return head

    def write_fields(
        self,
        config: Config,
        head: str,
        *,
        fixed: Mapping[str, tuple[object, ...]],
        explicit: Settings,
    ) -> JsonObject:
        """Returns the content of a `config.json`.

        Args:
          config: The configuration.
          head: The head of the model, or the corresponding head in transformers.
          fixed: Settings that families of this kind cannot vary; `allowed` overrides them.
          explicit: Values to write for settings that are None in the configuration.

        Raises:
          WeightsError: transformers has no such model.
        """
        # Before anything is written, reject settings that transformers lacks.
        check_exportable(config, {**fixed, **self.allowed}, self.model_type)
        problem = f"{self.model_type} has no class with the head {head}"
        require(head in self.classes, problem, WeightsError)
        fields = settings_to_hf(
            self.fields,
            dataclasses.replace(config, **explicit),
            model_type=self.model_type,
            architecture=self.classes[head],
        )
        fields |= {} if self.own_fields is None else self.own_fields(config)
        return fields | (labels_to_hf(config.labels) if HEADS[head].needs_labels else {})


def join_forms(
    forms: Sequence[Form[Config]], form_of: Callable[[Config], Form[Config]], **more: Any
) -> HFMapping[Config]:
    """Returns the `HFMapping` of a family that has several model types in transformers.

    Args:
      forms: The conversions of the model types.
      form_of: Returns the conversion that a configuration needs.
      **more: Additional fields of the `HFMapping`.
    """
    by_type = {form.model_type: form for form in forms}
    return HFMapping(
        model_types=tuple(by_type),
        config_from_hf=lambda hf_config, source: by_type[
            str(hf_config["model_type"])
        ].config_from_hf(hf_config, source),
        config_to_hf=lambda config: form_of(config).config_to_hf(config),
        tensor_mapping=lambda config: form_of(config).tensor_mapping(config),
        generation_defaults={name: form.generation_defaults for name, form in by_type.items()},
        **more,
    )
