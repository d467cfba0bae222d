"""The command `flaxzoo evaluate`."""

import dataclasses

from ....data.errors import UserError
from ....data.io.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import RunName, log, parse


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
    without_heads: bool = False
    """Print a table instead: by how much the loss rises without each attention head."""


def evaluate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo evaluate RUN [--data SOURCE] [--without-heads]`."""
    parsed = parse(EvaluateArguments, arguments, "flaxzoo evaluate")
    enable_compilation_cache()
    from ...inference.evaluate import losses_without_heads, score_run

    if parsed.without_heads:
        if parsed.max_length is not None:
            raise UserError(
                f"--max-length {parsed.max_length} does not go with --without-heads, which cuts "
                "rows as in training: give one of them"
            )
        if parsed.num_beams is not None:
            raise UserError(
                f"--num-beams {parsed.num_beams} searches, and --without-heads only computes "
                "losses: give one of them"
            )
        losses = losses_without_heads(parsed.run, parsed.data, step=parsed.step, log=log)
        whole = losses.pop("loss")
        print(f"loss {whole:.4f}; without one head, by layer and head:")
        for name, table in losses.items():
            print(f"{name:<20} " + " ".join(f"{n:>7}" for n in range(1, table.shape[1] + 1)))
            for layer, row in enumerate(table - whole, 1):
                print(f"{'layer ' + str(layer):>20} " + " ".join(f"{x:+7.4f}" for x in row))
        return
    scores = score_run(
        parsed.run,
        parsed.data,
        step=parsed.step,
        num_beams=parsed.num_beams,
        max_length=parsed.max_length,
        log=log,
    )
    print(to_json(scores))
