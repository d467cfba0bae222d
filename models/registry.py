"""The model families, with their published sizes and the JSON format of their configurations.

Each family has a file in the folder of its kind, which defines a record, `FAMILY`. Only `FAMILIES`
and `VARIANTS` below list these files. For a family `llama`,

- `models/decoders/llama.py` defines the configuration, the module, and `FAMILY`;
- `models/hf/decoders/llama.py` (if `FAMILY.hf_module` names it) converts weights and configuration
  from and to Hugging Face transformers;
- `train/recipes/llama.py` has the family's recipes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any

import flax.linen as nn
import numpy as np

from ..data.common.errors import UserError, suggest
from ..data.common.fields import make_record
from ..data.common.lazy_names import LazyRecords
from .config import Execution, TransformerConfig

FAMILIES = {
    "gpt": "decoders.gpt",
    "bert": "encoders",
    "roberta": "encoders",
    "distilbert": "encoders",
    "electra": "encoders",
    "xlm_roberta": "encoders",
    "camembert": "encoders",
    "roberta_prelayernorm": "encoders",
    "mpnet": "encoders",
    "modernbert": "encoders",
    "deberta": "encoders.deberta",
    "albert": "encoders",
    "nomic_bert": "encoders",
    "gte": "encoders",
    "transformer": "encoder_decoders",
    "llama": "decoders",
    "mistral": "decoders",
    "qwen2": "decoders",
    "qwen3": "decoders",
    "gemma": "decoders.gemma",
    "gemma2": "decoders.gemma",
    "gemma3": "decoders.gemma",
    "phi3": "decoders",
    "mixtral": "decoders",
    "gpt_neo": "decoders.gpt",
    "gptj": "decoders.gpt",
    "gpt_neox": "decoders.gpt",
    "opt": "decoders.gpt",
    "bloom": "decoders.gpt",
    "falcon": "decoders.gpt",
    "qwen3_moe": "decoders",
    "olmo2": "decoders",
    "olmo3": "decoders",
    "smollm3": "decoders",
    "granite": "decoders",
    "stablelm": "decoders",
    "t5": "encoder_decoders",
    "bart": "encoder_decoders",
}
"""The folder that contains each family's file, by the file's name."""
VARIANTS = {
    "lecture_gpt": "lectures",
    "lecture_bert": "lectures",
    "lecture_transformer": "lectures",
}
"""The same for families whose options no published model uses. These families have no presets."""

AxisRules = Mapping[str, tuple[str | None, ...]]
"""Maps a pattern of parameter paths (a regular expression for the whole path) to the logical axis
of each dimension: "layers", "model", "heads", "feed_forward", "vocabulary", or None. `mesh_axes`
maps logical axes to mesh axes."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published model size."""

    config: TransformerConfig
    paper: str
    published: str
    """The number of parameters in the paper, as text."""
    note: str = ""
    """A note, for example that the numbers in the paper are inconsistent, and which numbers are
    used."""


def preset_maker(
    config: type[TransformerConfig], paper: str, sizes: Sequence[str] = (), **common: Any
) -> Callable[..., Preset]:
    """Returns a function that makes the presets of a family.

    Example::

        make = preset_maker(MistralConfig, "Jiang et al. 2023", ("num_layers",), vocab_size=32_000)
        # the published number of parameters, then the sizes
        make("7.24B", (32,), d_model=4096, note="…")

    Args:
      config: The configuration of the family.
      paper: The paper of the presets. A preset can override it.
      sizes: The names of the fields that every preset sets by position, in order.
      **common: The fields that presets share. A preset can override them.
    """

    def make(
        published: str,
        numbers: Sequence[int] = (),
        *,
        note: str = "",
        paper: str = paper,
        **fields_of_preset: Any,
    ) -> Preset:
        fields = {**common, **dict(zip(sizes, numbers, strict=True)), **fields_of_preset}
        return Preset(config(**fields), paper, published, note)

    return make


def one_token(config: TransformerConfig) -> dict[str, np.ndarray]:
    """Returns the smallest inputs, `[1, 1]`, of a model that reads token sequences."""
    del config
    return {"input_ids": np.zeros((1, 1), np.int32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The record of one family of models.

    Patterns of parameter paths apply only to the models of this family.
    """

    config: type[TransformerConfig]
    module: Callable[..., nn.Module]
    """The Flax module, a function of a configuration and an `Execution`."""
    presets: Mapping[str, Preset]
    num_parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The number of parameters of each preset, stored because counting takes seconds."""
    smallest_inputs: Callable[[Any], dict[str, np.ndarray]] = one_token
    """Maps a configuration to the smallest valid inputs of the model."""
    parameter_axes: AxisRules
    """The logical axes of every parameter. Exactly one pattern matches each path."""
    below_layers: str = (
        r"(token|position|token_type)_embedding|position_bias|embedding_(norm|projection)"
    )
    """A pattern that matches the top-level names of parameters before the layers, for layer-wise
    learning rates."""
    above_layers: str = r"final_norm|pooler|head|output_(embedding|projection)"
    """A pattern that matches the top-level names of parameters after the layers. A family with
    other parameters (an encoder-decoder) does not support layer-wise learning rates."""
    hf_module: str | None = None
    """The file of `models/hf` that converts the family from and to Hugging Face transformers, or
    None."""


@functools.cache
def families() -> MutableMapping[str, Family]:
    """Returns the record of every family by name. Access to a record imports its file."""

    def load(room: str, name: str) -> Family:
        return import_module(f".{room}.{name}", __package__).FAMILY

    return LazyRecords(
        {name: functools.partial(load, room, name) for name, room in (FAMILIES | VARIANTS).items()}
    )


def family_name(config: TransformerConfig) -> str:
    """Returns the name of a configuration's family.

    Raises:
      UserError: The configuration does not belong to any family.
    """
    # Usually, the file that defines the configuration is named after the family. Try this file
    # first, so that the other files are not imported.
    names = sorted(families(), key=lambda name: not type(config).__module__.endswith(f".{name}"))
    for name in names:
        if families()[name].config is type(config):
            return name
    raise UserError(
        f"{config!r} is not the configuration of a model: give one, such as models.preset('gpt2')"
    )


def family_of(config: TransformerConfig) -> Family:
    """Returns the record of a configuration's family."""
    return families()[family_name(config)]


def families_of(model: TransformerConfig | None) -> list[Family]:
    """Returns a list that contains a model's family, or all families if the model is unknown."""
    return list(families().values()) if model is None else [family_of(model)]


def smallest_inputs(config: TransformerConfig) -> dict[str, np.ndarray]:
    """Returns the smallest valid inputs of a model."""
    return family_of(config).smallest_inputs(config)


def presets() -> dict[str, Preset]:
    """Returns all presets, by name."""
    return {name: p for family in families().values() for name, p in family.presets.items()}


def family_of_preset(name: str) -> str:
    """Returns the name of the family that a preset belongs to.

    Raises:
      UserError: The preset is unknown. The message suggests similar names.
    """
    # Many presets begin with the name of their family. Try this family first, to import few files.
    likely = name.replace("-", "_")
    for family in sorted(families(), key=lambda family: not likely.startswith(family)):
        if name in families()[family].presets:
            return family
    raise UserError(f"no preset named {name!r}: {suggest(name, list(presets()))}")


def preset(name: str) -> TransformerConfig:
    """Returns the configuration of a preset, e.g. `preset("gpt2")`.

    Raises:
      UserError: The preset is unknown. The message suggests similar names.
    """
    return families()[family_of_preset(name)].presets[name].config


def create(config: TransformerConfig, execution: Execution | None = None) -> Any:
    """Returns the Flax module of `config`: `create(preset("gpt2")).init(key, input_ids=…)`."""
    return family_of(config).module(config, execution or Execution())


def config_to_dict(config: TransformerConfig) -> dict[str, Any]:
    """Returns `config` as a JSON-ready dict, with the family's name under "architecture"."""
    return {"architecture": family_name(config), **dataclasses.asdict(config)}


def config_from_dict(fields: Mapping[str, object]) -> TransformerConfig:
    """Returns the configuration that `config_to_dict` converted to a dict.

    Raises:
      UserError: The family or a field is unknown.
    """
    values = dict(fields)
    name = values.pop("architecture", None)
    if not isinstance(name, str) or name not in families():
        raise UserError(f"unknown architecture {name!r}: choose from {', '.join(families())}")
    cls = families()[name].config
    return make_record(cls, values)
