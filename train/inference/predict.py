"""Predictions of a fine-tuned model for inputs that have no labels yet."""

from pathlib import Path
from typing import Any

import jax

from ...data.batching import evaluation_batches
from ...data.sources.documents import SourceLike
from ...models.nn.typing import PyTree
from ..errors import RunError
from ..objectives.eval_step import rows_at_once, whole_rows
from ..objectives.tasks import objective_of
from ..progress import LogFn
from ..runs.finite import check_outputs, load_finite
from ..runs.load_run import open_run, vocabulary_note


def predict(
    folder: str | Path, path: SourceLike, *, step: int | None = None, log: LogFn = print
) -> list[Any]:
    """Predicts for each example of a file.

    Args:
        folder: the run folder of a model with a classification, tagging, span or choice head.
        path: the file, in the form that this kind of data reads; "-" is standard input; or a list
          of examples.
        step: which checkpoint; by default the newest.
        log: told what is in the file, in a line.

    Returns:
        One JSON-ready prediction for each example, in the order of the file. The score of a
        regression or of a cross-encoder is the model's output, without the activation that
        sentence-transformers' CrossEncoder applies (a sigmoid, if its folder names no other one).

    Raises:
        FileNotFoundError: it is not a run folder, or has no such checkpoint.
        RunError: the model has no head, or its parameters or outputs are NaN or infinite.
        DataError: the file cannot be read, or the run has nothing of this kind to predict.
    """
    config, tokenizer = open_run(folder)
    note = vocabulary_note(folder, config.model, tokenizer)
    if note is not None:
        log(note)
    if config.model.head == "none":
        raise RunError(
            f"{folder} has no head to predict with: fine-tune it, or use `flaxzoo embed`"
        )
    labels = config.model.labels
    split = config.data.input_split(path, tokenizer, labels)
    log(f"input: {split.summary}")
    model, params = load_finite(folder, step=step)
    objective = objective_of(config)

    @jax.jit
    def predictions(params: PyTree, batch: PyTree) -> PyTree:
        return objective.predictions(objective.outputs(model.apply, params, batch))

    number = split.examples.num_examples
    batches = evaluation_batches(split.examples, batch_size=rows_at_once(config, number))
    parts = [predictions(params, batch) for batch in batches]
    rows: Any = split.examples
    outputs = whole_rows(parts, number)
    check_outputs(outputs)
    return rows.decode(outputs)
