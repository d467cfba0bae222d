"""Read the configuration of a run from the JSON form that `train.config.to_dict` writes."""

from collections.abc import Mapping
from typing import Any

from ...data.common.errors import UserError, checked_record
from ...data.tokenizers.training import TokenizerConfig
from ...models.adapters.lora import LoRAConfig
from ...models.config import Execution
from ...models.registry import config_from_dict
from ..config import MeshConfig, TrainConfig
from ..objectives.table import data_class, objective_class
from ..optimizer_config import OptimizerConfig


def from_dict(fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration that `train.config.to_dict` wrote.

    Raises:
        UserError: A field is missing or unknown; `naming_writer` of models/loading.py adds the file
            to the message, and the version of flaxzoo that wrote it.
    """
    fields = {name: _with_tuples(value) for name, value in fields.items()}
    try:
        data = dict(_section(fields, "data"))
        data["tokenizer"] = checked_record(
            TokenizerConfig, _section(data, "tokenizer", "data."), "data.tokenizer."
        )
        kind = data_class(data.pop("kind"))
        objective = dict(_section(fields, "objective"))
        learned = objective_class(objective.pop("kind"))
        records = {
            "model": config_from_dict(_section(fields, "model")),
            "data": checked_record(kind, data, "data."),
            "objective": checked_record(learned, objective, "objective."),
            "optimizer": checked_record(
                OptimizerConfig, _section(fields, "optimizer"), "optimizer."
            ),
            "execution": checked_record(Execution, _section(fields, "execution"), "execution."),
            "mesh": checked_record(MeshConfig, _section(fields, "mesh"), "mesh."),
        }
        if fields.get("lora") is not None:
            records["lora"] = checked_record(LoRAConfig, _section(fields, "lora"), "lora.")
        return checked_record(TrainConfig, {**fields, **records}, "")
    except KeyError as error:
        raise UserError(f"{error} is not known, or is missing") from error
    except (TypeError, AttributeError) as error:
        raise UserError(f"a value has another form ({error})") from error


def _section(fields: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """Returns a field that is an object; raises UserError if it is something else."""
    if not isinstance(fields[name], Mapping):
        raise UserError(f"{path}{name} {fields[name]!r} is not an object")
    return fields[name]


def _with_tuples(value: object) -> Any:
    """Returns a JSON value with tuples in place of its lists, at any depth."""
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
