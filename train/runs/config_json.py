"""Read the configuration of a run from the JSON form that `train.config.to_dict` writes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from ...data.chat.policy import RolloutConfig
from ...data.errors import UserError
from ...data.tasks.base import DataConfig
from ...data.tokenizers.training import TokenizerConfig
from ...models.adapters.lora import LoRAConfig
from ...models.config import Execution
from ...models.registry import config_from_dict
from ..config import MeshConfig, TrainConfig
from ..objectives.tasks import data_class
from ..optimizer_config import OptimizerConfig

T = TypeVar(
    "T",
    bound=TrainConfig
    | DataConfig
    | TokenizerConfig
    | RolloutConfig
    | OptimizerConfig
    | Execution
    | MeshConfig
    | LoRAConfig,
)


def from_dict(fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration that `train.config.to_dict` wrote.

    Names of kinds of data, heads and settings that older versions wrote are understood too.

    Raises:
        UserError: A field is missing or unknown; `naming_writer` of models/loading.py adds the file
            to the message, and the version of flaxzoo that wrote it.
    """
    fields = {name: _with_tuples(value) for name, value in fields.items()}
    try:
        data = dict(fields["data"])
        data["tokenizer"] = _record(TokenizerConfig, data["tokenizer"], "data.tokenizer.")
        kind = data_class(data.pop("kind"))
        if "rollout" in data:
            data["rollout"] = _record(RolloutConfig, data["rollout"], "data.rollout.")
        records = {
            "model": config_from_dict(fields["model"]),
            "data": _record(kind, data, "data."),
            "optimizer": _record(OptimizerConfig, fields["optimizer"], "optimizer."),
            "execution": _record(Execution, fields["execution"], "execution."),
            "mesh": _record(MeshConfig, fields["mesh"], "mesh."),
        }
        if fields.get("lora") is not None:
            records["lora"] = _record(LoRAConfig, fields["lora"], "lora.")
        return _record(TrainConfig, {**fields, **records}, "")
    except KeyError as error:
        raise UserError(f"{error} is not known, or is missing") from error
    except (TypeError, AttributeError) as error:
        raise UserError(f"a value has another form ({error})") from error


def _record(cls: type[T], fields: Mapping[str, Any], path: str) -> T:
    """Makes a dataclass from its fields; raises UserError for unknown and missing ones."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise UserError(f"unknown field {path}{unknown[0]}")
    missing = [
        name
        for name, field in known.items()
        if name not in fields and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"the field {path}{missing[0]} is missing")
    return cls(**fields)


def _with_tuples(value: object) -> Any:
    """Returns a JSON value with tuples in place of its lists, at any depth."""
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
