"""The command `flaxzoo predict`."""

import dataclasses
import json

import tyro

from ..compilation_cache import enable_compilation_cache
from .arguments import RunName, log


@dataclasses.dataclass(frozen=True)
class PredictArguments:
    """Prints the predictions of a fine-tuned model, one JSON object per line."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    input: str
    """The file of examples; - reads standard input. Sequence classification: one text per line, or
    two separated by a tab. A pretraining run: two texts separated by a tab (does the second follow
    the first?). Token classification: words in the first CoNLL column, or one text per line.
    Question answering: SQuAD's JSON, or JSON lines with "context" and "question". Multiple choice:
    JSON lines with "context" and "choices"."""
    step: int | None = None
    """The checkpoint. By default the newest."""


def predict_command(arguments: list[str]) -> None:
    """Runs `flaxzoo predict RUN --input FILE`."""
    parsed = tyro.cli(PredictArguments, args=arguments, prog="flaxzoo predict")
    enable_compilation_cache()
    from ..inference.predict import predict

    for prediction in predict(parsed.run, parsed.input, step=parsed.step, log=log):
        print(json.dumps(prediction, ensure_ascii=False))
