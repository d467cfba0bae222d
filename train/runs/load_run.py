"""Reads the configuration of a run folder, or derives a configuration for a published model."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.embedding.embedding_data import EmbeddingData
from ...data.tasks.base import Target
from ...data.tasks.translation import encode_source
from ...data.tokenizers.base import Tokenizer
from ...models.config import TransformerConfig
from ...models.heads.specs import CAUSAL_HEADS, HEADS
from ...models.hf.sparse_encoder import read_vector_settings
from ...models.hub import local_folder
from ...models.loading import model_config
from ...models.run_files import (
    IMPORTED_FROM,
    check_run,
    is_foreign,
    naming_writer,
    object_field,
    read_fields,
)
from ...models.text.folder import open_folder
from ..config import TrainConfig
from ..recipes import RECIPES, recipe
from .config_json import from_dict

TARGETS: Mapping[str, Target] = {
    "regression": "regression",
    "multi_label_classification": "multi_label",
}
"""Maps the field `problem_type` of a classifier in transformers to flaxzoo's kind of labels. Any
other type is single_label."""
MOST_TOKENS = 512
"""The largest default for the maximum text length of an embedding model, in tokens."""


def open_run(folder: str | Path) -> tuple[TrainConfig, Tokenizer]:
    """Opens the folder of a model, and returns its configuration and its tokenizer.

    Args:
        folder: A run folder, a folder in the Hugging Face format, or a name on the hub. Unless it
          is a run folder, the configuration is derived from the model.

    Raises:
        FileNotFoundError: No such folder or model exists.
        UserError: The folder is broken, or its model or tokenizer is not supported.
    """
    folder = local_folder(folder)
    model, tokenizer = open_folder(folder)
    fields = read_fields(folder)
    if is_foreign(fields):
        return config_of_model(model, fields.get("problem_type")), tokenizer
    return config_of_run(folder), tokenizer


def config_of_run(folder: Path) -> TrainConfig:
    """Reads the configuration of a run from its `config.json`.

    Raises:
        UserError: The file is broken, or does not describe a run.
    """
    fields = read_fields(folder)
    check_run(fields, folder)
    train = object_field(fields, "train", folder)
    with naming_writer(fields, folder):
        return from_dict({**train, "model": fields["model"]})


def config_of_model(model: TransformerConfig, problem_type: object = None) -> TrainConfig:
    """Returns the configuration of a run that could have trained a model.

    Args:
        model: The configuration of the model.
        problem_type: The field `problem_type` of a classifier in transformers. If None, a
          classifier with a single label is a regression, and several labels are mutually exclusive.
    """
    config = recipe(HEADS[model.head].default_recipe)
    # Without a problem type, transformers treats a classifier with a single label as a regression.
    by_count = "regression" if len(model.labels) == 1 else None
    target = TARGETS.get(str(problem_type or by_count), "single_label")
    data = config.data.of_imported_model(target, model.max_length)
    return dataclasses.replace(config, model=model, data=data, sample_prompt=None)


def begin_with(name: str, folder: Path) -> TrainConfig:
    """Returns the configuration of a recipe, adapted to the model that the run starts from.

    The settings for a published model, which may be in the Hugging Face format or imported as a
    run, come from a preset of its size. If the run trains an embedding model, the
    maximum length of texts is the length that the folder states, but at most `MOST_TOKENS`. The
    settings for a model that flaxzoo trained come from the recipe, except for precision and
    rematerialization, which come from the folder.

    Args:
        name: A recipe that trains models of any family.
        folder: A folder that has a `config.json`.

    Raises:
        UserError: The `config.json` is broken, or its model is not supported.
    """
    config, fields = RECIPES[name].config, read_fields(folder)
    if is_foreign(fields) or IMPORTED_FROM in fields:
        of_model = cast(Callable[[TransformerConfig], TrainConfig], RECIPES[name].of_model)
        config = dataclasses.replace(of_model(model_config(folder)), init_from=config.init_from)
        return _with_stated_length(config, folder)
    made = config_of_run(folder).execution
    execution = dataclasses.replace(config.execution, dtype=made.dtype, remat=made.remat)
    return dataclasses.replace(config, execution=execution)


def _with_stated_length(config: TrainConfig, folder: Path) -> TrainConfig:
    """Sets the length of texts to the length that the folder of an embedding model states."""
    if not isinstance(config.data, EmbeddingData):
        return config
    settings = read_vector_settings(folder)
    stated = None if settings is None else settings.texts.max_length
    if stated is None:
        return config
    # A folder may state thousands of tokens, but a batch of 64 such pairs would not fit into
    # memory.
    length = min(stated, config.model.max_length, MOST_TOKENS)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))


def check_sample_prompt(model: TransformerConfig, tokenizer: Tokenizer, prompt: str | None) -> None:
    """Raises RunError if the trained model could not generate a sample for the prompt."""
    if prompt is None:
        return
    head = model.head
    if HEADS[head].predicts_masked:
        ids = tokenizer.encode_with_mask(prompt)
        require(
            tokenizer.special_ids.mask in ids and len(ids) <= model.max_length,
            f"sample_prompt {prompt!r} must have a [MASK] and at most {model.max_length} "
            f"tokens, got {len(ids)}",
            error=RunError,
        )
    elif head == "seq2seq_lm":
        number = len(encode_source(tokenizer, prompt))
        require(
            number <= model.max_length,
            f"sample_prompt has {number} tokens, more than model.max_length "
            f"{model.max_length}: shorten it",
            error=RunError,
        )
    else:
        problem = f"sample_prompt is not supported by a model with the head {head}: leave it out"
        require(head in CAUSAL_HEADS, problem, RunError)
