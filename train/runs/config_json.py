"""Reads the configuration of a run from the JSON form that `train.config.to_dict` writes."""

from collections.abc import Callable, Mapping
from typing import Any

from ...data.common.errors import UserError
from ...data.common.fields import make_record, require
from ...models.registry import config_from_dict
from ..config import TrainConfig
from ..objectives.table import data_class, objective_class


def from_dict(fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration that `train.config.to_dict` wrote.

    Raises:
        UserError: A field is missing or unknown. If this function is called within `naming_writer`
          of models/run_files.py, the message also names the file and the version of flaxzoo that
          wrote it.
    """
    # The classes of these sections depend on their content. `make_record` reads all other sections.
    sections = {
        "model": config_from_dict(_section(fields, "model")),
        "data": _of_kind(fields, "data", data_class),
        "objective": _of_kind(fields, "objective", objective_class),
    }
    return make_record(TrainConfig, {**fields, **sections})


def _of_kind(fields: Mapping[str, Any], name: str, class_of: Callable[[str], type]) -> Any:
    """Makes the record of a section. The section's field `kind` determines its class."""
    section = dict(_section(fields, name))
    kind = str(section.pop("kind", None))
    try:
        cls = class_of(kind)
    except KeyError:
        raise UserError(f"{name}.kind {kind!r} is unknown") from None
    return make_record(cls, section, f"{name}.")


def _section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = fields.get(name)
    require(isinstance(section, Mapping), f"{name} {section!r} is not an object")
    return fields[name]
