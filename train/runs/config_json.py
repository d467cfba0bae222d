"""Read the configuration of a run from the JSON form that `train.config.to_dict` writes."""

from collections.abc import Mapping
from typing import Any

from ...data.errors import UserError
from ...data.tokenizers.training import TokenizerConfig
from ...models.config import Execution
from ...models.registry import config_from_dict
from ..config import MeshConfig, TrainConfig
from ..objectives.tasks import data_class
from ..optimizer_config import OptimizerConfig


def from_dict(fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration that `train.config.to_dict` wrote.

    Names of kinds of data, heads and settings that older versions wrote are understood too.

    Raises:
        UserError: A field is missing or unknown.
    """
    fields = {name: _with_tuples(value) for name, value in fields.items()}
    try:
        data = dict(fields["data"])
        data["tokenizer"] = TokenizerConfig(**data["tokenizer"])
        records = {
            "model": config_from_dict(fields["model"]),
            "data": data_class(data.pop("kind"))(**data),
            "optimizer": OptimizerConfig(**fields["optimizer"]),
            "execution": Execution(**fields["execution"]),
            "mesh": MeshConfig(**fields["mesh"]),
        }
        return TrainConfig(**{**fields, **records})
    except (KeyError, TypeError) as error:
        raise UserError(
            f"config.json does not fit this version of flaxzoo ({error}): use the one that wrote it"
        ) from error


def _with_tuples(value: object) -> Any:
    """Returns a JSON value with tuples in place of its lists, at any depth."""
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
