"""Predictions of a fine-tuned model for unlabeled inputs."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...data.batching import Batch
from ...data.common.errors import RunError
from ...data.common.fields import require
from ...data.common.progress import LogFn
from ...data.dataset import ExampleSource
from ...data.sources.documents import SourceLike
from ...data.tasks.base import DataConfig
from ...data.tasks.sequence_classification import SequenceClassificationData
from ...models.finite import check_outputs, load_finite
from ...models.hf.cross_encoder import PairScoring, read_pair_scoring
from ...models.hub import local_folder
from ...models.nn.typing import PyTree
from ...models.text.bucketing import padded_batches, padded_length
from ...models.text.folder import vocabulary_note
from ..config import TrainConfig, objective_of
from ..runs.load_run import config_of_model, open_run


def predict(
    folder: str | Path, path: SourceLike, *, step: int | None = None, log: LogFn = print
) -> list[Any]:
    """Returns a prediction for each example of a file.

    Args:
        folder: the run folder of a model with a classification, tagging, span or choice head.
        path: a file in the format of this kind of data, "-" for standard input, or a list of
          examples.
        step: the checkpoint. Defaults to the newest.
        log: called with a line that describes the file.

    Returns:
        One JSON-ready prediction per example, in the order of the file. The score of a folder of
        sentence-transformers' CrossEncoder has the activation that the folder names. Any other
        score is the raw output of the model.

    Raises:
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        RunError: the model has no head, or its parameters or outputs are NaN or infinite.
        DataError: the file cannot be read, or this kind of run does not predict.
    """
    config, tokenizer = open_run(folder)
    scoring = None
    if config.model.head == "sequence_classification":
        scoring = read_pair_scoring(local_folder(folder))
    if scoring is not None:
        config = _of_pairs(config, scoring)
    note = vocabulary_note(folder, config.model, tokenizer)
    if note is not None:
        log(note)
    require(
        config.model.head != "none",
        f"{folder} has no head to predict with: fine-tune it, or use `flaxzoo embed`",
        error=RunError,
    )
    command = config.objective.next_command.format(run=folder)
    require(
        type(config.data).input_split is not DataConfig.input_split,
        f"{config.data.kind} data has no labels to predict: use flaxzoo {command}",
        error=RunError,
    )
    split = config.data.input_split(path, tokenizer, config.model.labels)
    log(f"input: {split.summary}")
    model, params = load_finite(folder, step=step)
    objective = objective_of(config)

    @jax.jit
    def predictions(params: PyTree, batch: PyTree) -> PyTree:
        found = objective.predictions(objective.outputs(model.apply, params, batch))
        # Several labels get probabilities of their logits instead.
        if scoring is not None and config.data.label_target == "regression":
            return {"logits": scoring(found["logits"])}
        return found

    rows: Any = split.examples
    outputs = _by_length(functools.partial(predictions, params), rows)
    check_outputs(outputs)
    return rows.decode(outputs)


def _of_pairs(config: TrainConfig, scoring: PairScoring) -> TrainConfig:
    """Returns the configuration of a cross-encoder that reads pairs of texts to predict."""
    if not isinstance(config.data, SequenceClassificationData):
        config = config_of_model(config.model)
    longest = config.model.max_length
    length = min(longest, scoring.max_length or longest)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))


def _by_length(
    predictions: Callable[[Batch], dict[str, jax.Array]], examples: ExampleSource
) -> dict[str, np.ndarray]:
    """Returns the predictions for all examples, computed in batches of similar length.

    Predictions for trailing padding, which is not computed, are 0.
    """
    rows = [examples.example(0, i) for i in range(examples.num_examples)]
    whole = {name: x[None] for name, x in rows[0].items()}
    # Shapes of the full-length predictions, found without computing them.
    found = {
        name: np.zeros((len(rows), *x.shape[1:]), x.dtype)
        for name, x in jax.eval_shape(predictions, whole).items()
    }
    shape = rows[0]["input_ids"].shape
    # Trailing padding is not part of a row's length.
    lengths = [1 + int(np.nonzero(row["attention_mask"])[-1].max(initial=0)) for row in rows]
    for batch, num_rows in padded_batches(lengths, shape[-1]):
        length = padded_length(lengths[batch[0]], shape[-1])
        # Pad the batch to `num_rows` and the bucket's length, so that few programs are compiled.
        given = {name: np.zeros((num_rows, *x.shape), x.dtype) for name, x in rows[0].items()}
        for name, array in given.items():
            array[: len(batch)] = [rows[i][name] for i in batch]
            # Truncate only arrays with one value per token.
            if array.shape[1:] == shape:
                given[name] = array[..., :length]
        for name, part in predictions(given).items():
            # Predictions per token are shorter than the full length.
            own = tuple(slice(size) for size in part.shape[1:])
            found[name][(batch, *own)] = np.asarray(part)[: len(batch)]
    return found
