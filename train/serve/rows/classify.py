"""The endpoint for predictions of classifiers and taggers, in the format of `flaxzoo predict`."""

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....data.common.fields import Checked
from ....data.common.json_text import JsonObject, JsonValue
from ....data.dataset import DataSplit
from ....data.sources.in_memory import Examples
from ....models.config import TransformerConfig
from ....models.text.text_model import Loaded
from ...evaluation.predict import Predictor, token_length
from ..app import Endpoint, Service
from .inputs import as_list
from .worker import Row, RowFunction, computed, outputs_of_rows, usage_of

KIND = "classification"
HEADS = (
    *("sequence_classification", "token_classification", "next_sentence"),
    *("question_answering", "multiple_choice"),
)
"""The heads that compute predictions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyFields(Checked):
    """Examples to classify."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    input: str | tuple[str | Mapping[str, Any], ...]
    """A text, a list of texts, or a list of objects with the fields of an example: `text` and
    `text_b`, `tokens`, `context` and `question`, or `context` and `choices`."""


def fits(config: TransformerConfig) -> bool:
    """Returns whether a model predicts labels, tags or answers."""
    return config.head in HEADS


def classification_function(folder: str | Path, loaded: Loaded) -> RowFunction:
    """Returns the function that computes a model's outputs for encoded examples."""
    predictor = Predictor.of_run(folder, loaded=loaded)

    def parts(items: Sequence[Any]) -> Iterator[list[dict[str, np.ndarray]]]:
        lengths = list(map(token_length, items))
        yield outputs_of_rows(predictor.outputs(items.__getitem__, lengths))

    longest = predictor.config.data.length
    return RowFunction(predictor, parts, longest, predictor.filler)


async def classify(service: Service, fields: ClassifyFields) -> JsonObject:
    """Answers `/v1/classify`."""
    model, worker = service.worker(fields.model, KIND)
    service.engine.check_admission()
    predictor: Predictor = worker.front
    inputs = as_list(fields.input, "input", worker.settings.max_inputs)
    split = await asyncio.to_thread(lambda: predictor.encode(Examples.of(inputs)))
    rows = _rows(split)
    results = await computed(service, model, worker, rows)
    examples: Any = split.examples
    # Join the results of all rows, because a long example may have several rows.
    outputs = {name: np.stack([x[name] for x in results]) for name in results[0]}
    predictions: list[JsonValue] = [
        {"index": i, **prediction} for i, prediction in enumerate(examples.decode(outputs))
    ]
    return {
        "object": "list",
        "data": predictions,
        "model": model.name,
        "notes": [*examples.notes],
        "usage": usage_of(rows),
    }


def _rows(split: DataSplit) -> list[Row]:
    """Returns the sequences of encoded examples. A long example may have several sequences."""
    examples: Any = split.examples
    arrays = [examples.example(0, i) for i in range(examples.num_examples)]
    # Only examples that have arrays of the same shapes can be in the same batch.
    return [
        Row(row, token_length(row), tuple((name, x.shape) for name, x in row.items()))
        for row in arrays
    ]


CLASSIFY = (Endpoint("POST", "/v1/classify", classify, "Labels, tags or answers", ClassifyFields),)
"""The endpoint of this file."""
