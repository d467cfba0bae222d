"""The command `flaxzoo evaluate`."""

import dataclasses

from ...data.io.json_text import to_json
from ..compilation_cache import enable_compilation_cache
from .options import RunName, log, parse


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """Prints the validation loss (nats) and the metrics of a trained model as JSON."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    data: str | None = None
    """A source of the kind that the model was trained on. By default its validation data."""
    step: int | None = None
    """The checkpoint. By default the newest."""
    num_beams: int | None = None
    """For translation: the number of beams, by default 4; 1 decodes greedily."""
    max_length: int | None = None
    """Cut rows to this many tokens, also to more than in training. By default as in training. A
    model whose positions are a table (learned ones) has no others."""


def evaluate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo evaluate RUN [--data SOURCE]`."""
    parsed = parse(EvaluateArguments, arguments, "flaxzoo evaluate")
    enable_compilation_cache()
    from ..inference.evaluate import score_run

    scores = score_run(
        parsed.run,
        parsed.data,
        step=parsed.step,
        num_beams=parsed.num_beams,
        max_length=parsed.max_length,
        log=log,
    )
    print(to_json(scores))
