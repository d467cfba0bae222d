"""Reads the configuration of a run from a folder: a run's own, or one for a published model."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ...data.tasks.sequence_classification import SequenceClassificationData, Target
from ...data.tasks.texts_to_predict import IMPORTED
from ...data.tokenizers.base import Tokenizer
from ...models.config import TransformerConfig
from ...models.hub import local_folder
from ...models.loading import (
    IMPORTED_FROM,
    check_run,
    is_foreign,
    model_config,
    naming_writer,
    object_field,
    read_fields,
)
from ...models.nn.heads import HEADS
from ...models.text.folder import open_folder
from ..config import TrainConfig
from ..recipes import RECIPES, recipe
from .config_json import from_dict

TARGETS: Mapping[str, Target] = {
    "regression": "regression",
    "multi_label_classification": "multi_label",
}
"""The kind of labels for each `problem_type` of a classifier; any other is single_label."""


def open_run(folder: str | Path) -> tuple[TrainConfig, Tokenizer]:
    """Returns the configuration and tokenizer of a folder with a model.

    Args:
        folder: A run folder; or a folder in Hugging Face's form, or a name on the hub, whose
          configuration is that of a run that would have made such a model.

    Raises:
        FileNotFoundError: The folder is neither.
        UserError: It is broken, or its model or tokenizer is not supported.
    """
    folder = local_folder(folder)
    model, tokenizer = open_folder(folder)
    fields = read_fields(folder)
    if is_foreign(fields):
        return config_of_model(model, fields.get("problem_type")), tokenizer
    return config_of_run(folder), tokenizer


def config_of_run(folder: Path) -> TrainConfig:
    """Returns the configuration in the `config.json` of a run.

    Raises:
        UserError: It is broken, or that of something else.
    """
    fields = read_fields(folder)
    check_run(fields, folder)
    train = object_field(fields, "train", folder)
    with naming_writer(fields, folder):
        return from_dict({**train, "model": fields["model"]})


def config_of_model(model: TransformerConfig, problem_type: object = None) -> TrainConfig:
    """Returns the configuration of a run that would have made a model.

    Args:
        model: The configuration of the model.
        problem_type: The kind of a classifier's labels, as transformers names it; by default one
          label is a number, and several exclude each other.
    """
    config = recipe(HEADS[model.head].default_recipe)
    data = dataclasses.replace(config.data, length=min(config.data.length, model.max_length))
    if model.head == "sequence_classification" and isinstance(data, SequenceClassificationData):
        by_count = "regression" if len(model.labels) == 1 else None
        target = TARGETS.get(str(problem_type or by_count), "single_label")
        data = dataclasses.replace(data, target=target, source=IMPORTED, validation=None)
    return dataclasses.replace(config, model=model, data=data, sample_prompt=None)


def begin_with(name: str, folder: Path) -> TrainConfig:
    """Returns the configuration of a recipe for a run that begins with the model of a folder.

    A published model has the settings of a preset of its size, whether the folder is in Hugging
    Face's form or an imported run. A run that was trained here has the recipe's settings, and the
    precision and rematerialization that it was trained with.

    Args:
        name: A recipe that trains models of any family.
        folder: A folder that has a `config.json`.

    Raises:
        UserError: The `config.json` is broken, or its model is not supported.
    """
    config, of_model = RECIPES[name].config, RECIPES[name].of_model
    fields = read_fields(folder)
    if of_model is not None and (is_foreign(fields) or IMPORTED_FROM in fields):
        return dataclasses.replace(of_model(model_config(folder)), init_from=config.init_from)
    made = config_of_run(folder).execution
    execution = dataclasses.replace(config.execution, dtype=made.dtype, remat=made.remat)
    return dataclasses.replace(config, execution=execution)
