"""Saves a model from a custom training loop as a run folder."""

import dataclasses
from pathlib import Path

import jax

from ...data.common.errors import RunError
from ...data.common.fields import NonNegativeInt, check_value, require
from ...data.tasks.base import DataConfig
from ...data.tokenizers.base import Tokenizer
from ...models.finite import check_finite
from ...models.hf.save import check_vocabulary
from ...models.hf.sentence_embedding import (
    IN_RUN,
    EmbeddingSettings,
    write_embedding_settings,
)
from ...models.init import fitting_params
from ...models.model import Model
from ...models.nn.typing import Params
from ..config import check_length, to_dict
from ..objectives.table import default_objective
from .load_run import config_of_model
from .params_only_run import SAVED_FROM_PYTHON, make_params_only_run


def save_run(
    folder: str | Path,
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    *,
    data: DataConfig | None = None,
    embedding: EmbeddingSettings | None = None,
    step: int = 0,
) -> None:
    """Saves a model from a custom training loop as a run folder.

    `models.load`, `train.open_run`, `--init-from`, `flaxzoo generate`, `predict`, `embed`,
    `fill-mask`, `translate`, `evaluate`, `export` and `average` accept the folder. Training cannot
    be resumed from the folder, because the folder has no optimizer state.

    Example::

        state, metrics = step(state, batch, key)  # a custom loop
        train.save_run("runs/mine", model, state.params, tokenizer)

    Args:
        folder: The folder to create. It is created completely or not at all, and may exist if it is
          empty.
        model: The model, from `models.create` or `models.load`.
        params: The parameters with stacked layers, as a nested dict of arrays of any floating type.
            They are stored as float32.
        tokenizer: The tokenizer. A translation model with two vocabularies needs a tokenizer with a
          source and a target vocabulary.
        data: The configuration of the model's data. By default, `flaxzoo evaluate` validates on
            these data, and `predict` reads its input in their format. Defaults to the data of a
            recipe for this kind of model. A classifier with several labels per text, or a
            regression, requires this argument, for example `SequenceClassificationData(…,
            target="multi_label")`.
        embedding: How `embed` and an exported model compute the vector of a text, as in
            `models.save`. Defaults to the mean of the hidden states.
        step: The number of training steps of the model, which becomes the name of the checkpoint.

    Raises:
        UserError: The folder is not empty, a parameter does not fit the model (the message names
            its path) or is not finite, the tokenizer has more tokens than the model, the data do
            not suit the model, or there are several processes.
    """
    require(
        jax.process_count() == 1,
        f"save_run requires a single process, got {jax.process_count()}: gather the "
        f"parameters, and save them in a program of one process",
        error=RunError,
    )
    check_value("step", step, NonNegativeInt)
    # Check everything before the folder is created.
    params = fitting_params(model, params)
    check_finite(params, "the model", "save the parameters of an earlier step")
    check_vocabulary(tokenizer, model.config)
    # Store the configuration of a run that could have trained this model.
    config = config_of_model(model.config)
    if data is not None:
        objective = default_objective(data)
        # The data determine how the folder is evaluated, so the data must suit the model's head.
        heads = objective.heads(data)
        require(
            model.config.head in heads,
            f"{data.kind} data require a model with the head {' or '.join(heads)}, got "
            f"{model.config.head}: give the data of this model",
            error=RunError,
        )
        config = dataclasses.replace(config, data=data, objective=objective)
        check_length(config)
    train = to_dict(config)
    fields = {"model": train.pop("model"), "train": train, SAVED_FROM_PYTHON: data is not None}

    def save_embedding(run: Path) -> None:
        if embedding is not None:
            write_embedding_settings(
                run / IN_RUN,
                embedding,
                d_model=model.config.d_model,
                max_length=model.config.max_length,
            )

    if embedding is not None:
        # `width` raises UserError if a layer does not fit the width of the model.
        embedding.width(model.config.d_model)
    make_params_only_run(
        Path(folder),
        fields,
        save_tokenizer=tokenizer.save,
        save_more=save_embedding,
        step=step,
        params=params,
    )
