"""Saves a model that was trained in a loop of one's own as a run folder."""

import dataclasses
from pathlib import Path

import jax

from ...data.common.errors import RunError
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
    """Saves a model that was trained by hand as a run folder, for all commands and `--init-from`.

    `models.load`, `train.open_run`, `flaxzoo generate`, `predict`, `embed`, `fill-mask`,
    `translate`, `evaluate`, `export` and `average` take the folder. Training cannot be resumed
    from it, because it has no optimizer state.

    Example::

        state, metrics = step(state, batch, key)  # a loop of one's own
        train.save_run("runs/mine", model, state.params, tokenizer)

    Args:
        folder: The folder to make, completely or not at all; it may exist if it is empty.
        model: The model, from `models.create` or `models.load`.
        params: Its parameters, a nested dict of arrays of any floating type, layers stacked; they
            are stored as float32.
        tokenizer: Its tokenizer; for translation one with two sides where the model has two
            vocabularies.
        data: The data of the model: `flaxzoo evaluate` then validates on them without being told,
            and `predict` reads its input likewise. By default those of a recipe for such a model:
            a classifier of several labels per text, or of scores, needs its own, for example
            `SequenceClassificationData(…, target="multi_label")`.
        embedding: How `embed` and an export make the vector of a text, as in `models.save`; by
            default the mean of the hidden states.
        step: The number of steps taken, which names the checkpoint.

    Raises:
        UserError: The folder holds something, a parameter does not fit the model (the message
            names its path) or is not finite, the tokenizer has more tokens than the model, the
            data are not for such a model, or there are several processes.
    """
    if jax.process_count() > 1:
        raise RunError(
            f"save_run in one of {jax.process_count()} processes: gather the parameters, and save "
            "them in a program of one process"
        )
    if step < 0:
        raise RunError(f"step {step} must be at least 0")
    params = fitting_params(model, params)
    check_finite(params, "the model", "save the parameters of an earlier step")
    check_vocabulary(tokenizer, model.config)
    config = config_of_model(model.config)
    if data is not None:
        objective = default_objective(data)
        heads = objective.heads(data)
        if model.config.head not in heads:
            raise RunError(
                f"{data.kind} data are for a model with the head {' or '.join(heads)}, not "
                f"{model.config.head}: give the data of this model"
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
        embedding.width(model.config.d_model)  # raises if a layer does not fit
    make_params_only_run(
        Path(folder),
        fields,
        save_tokenizer=tokenizer.save,
        save_more=save_embedding,
        step=step,
        params=params,
    )
