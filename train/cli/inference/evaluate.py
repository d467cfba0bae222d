"""The command `flaxzoo evaluate`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ....data.common.fields import NonNegativeInt, PositiveInt, Seed, require
from ....data.common.json_text import to_json
from ....models.decoding.request import NumBeams
from ...compilation_cache import enable_compilation_cache
from ...evaluate_config import EvaluateConfig
from ...settings.familiar_names import flag_of
from ..options import is_given, log, parse
from .arguments import ModelArguments
from .prompt import chosen_pattern

if TYPE_CHECKING:
    from ....models.text.text_model import Loaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments(ModelArguments):
    """Prints the validation loss (nats) and the metrics of a trained model as JSON.

    With --data beir:FOLDER, prints instead how well a search with the model's vectors finds
    relevant documents, with BM25 for comparison. With --shots, prints the accuracy of the model's
    answers after that many examples in the prompt. With --tasks, prints the model's results on
    evaluation tasks, such as the tasks of lm-evaluation-harness (pip install 'flaxzoo[eval]').
    """

    data: str | None = None
    """A source with the same kind of data as in training. Defaults to the validation data of the
    run. With --shots: examples and questions in the formats of flaxzoo prompt (.jsonl, .csv,
    builtin:reviews, builtin:patterns …). For any model that embeds texts: beir:FOLDER, a folder
    with corpus.jsonl, queries.jsonl and qrels/test.tsv (beir:FOLDER#dev reads qrels/dev.tsv)."""
    yes_no: bool = False
    """With --data beir:FOLDER: the model is a language model that answers whether a document fits a
    query, as Qwen3-Reranker does. The model ranks the best documents of BM25 again."""
    num_beams: NumBeams | None = None
    """For translation: the number of beams, by default 4; 1 decodes greedily."""
    max_length: PositiveInt | None = None
    """Truncate rows to this many tokens, which may exceed the length in training. Defaults to the
    length in training. A model with learned positions cannot exceed the length in training."""
    without_heads: bool = False
    """Print a table that shows how much the loss increases without each attention head."""
    shots: tuple[NonNegativeInt, ...] = ()
    """The numbers of examples in a prompt: --shots 0 1 4 16. With --tasks, --shots has a single
    number, and defaults to the number that each task defines."""
    tasks: str | None = None
    """Tasks separated by commas: names of the harness's tasks, groups or tags (hellaswag,arc_easy),
    your own YAML files, beir:FOLDER (retrieval), and prompts:FILE.jsonl (compares greedy
    continuations of prompts with answers)."""
    chat: bool = False
    """With --tasks: format prompts as a conversation, with the model's chat template."""
    max_new_tokens: PositiveInt = EvaluateConfig.max_new_tokens
    """With --tasks: the maximum number of tokens that the model writes after a prompt of
    prompts:FILE."""
    stop: tuple[str, ...] = ()
    r"""With --tasks: strings, such as '\n', that end the text after a prompt of prompts:FILE."""
    limit: PositiveInt | None = None
    """The maximum number of questions. Defaults to all questions of each task, or with --shots to
    500."""
    queries: str | None = None
    """With --shots: a source of questions that replaces the questions of --data."""
    pattern: str | None = None
    r"""With --shots: the name of a pattern, or a template that ends with the answer: 'Q:
    {question}\nA: {answer}\n'. Defaults to the named pattern that has the fields of the examples.
    """
    answers: Literal["labels", "texts"] | None = None
    """With --shots: choose the most probable label (labels), or compare the text of greedy decoding
    (texts). Defaults to labels if the examples have at most 20 labels."""
    balanced: bool = False
    """With --shots: choose equally many examples of each answer, if available."""
    seed: Seed | None = None
    """With --shots: the seed that shuffles the examples and chooses the questions of --limit. By
    default the first examples are shown, in the order of the file."""
    plot: Path | None = None
    """With --shots: a file for a plot of the accuracy, such as shots.png."""


RETRIEVAL = "--data beir:FOLDER"
PROMPTED = ("queries", "pattern", "answers", "balanced", "seed", "plot")
OPTIONS_OF = {
    "--tasks": {"tasks", "shots", "chat", "limit", "max_new_tokens", "stop", "ema"},
    "--shots": {"shots", "data", "limit", "ema", *PROMPTED},
    "--without-heads": {"without_heads", "data"},
    RETRIEVAL: {"data", "yes_no", "ema"},
    "the loss": {"data", "num_beams", "max_length", "ema"},
}
"""Maps each evaluation mode to the options that apply to it, in addition to `run` and `step`."""


def evaluate_command(arguments: list[str]) -> None:
    """Runs `flaxzoo evaluate RUN [--data SOURCE] [--without-heads | --shots … | --tasks …]`."""
    parsed = parse(EvaluateArguments, arguments, "flaxzoo evaluate")
    evaluate = FUNCTIONS[_mode(parsed)]
    enable_compilation_cache()
    evaluate(parsed)


def _mode(parsed: EvaluateArguments) -> str:
    """Returns the mode of evaluation. Raises UserError if an option would be ignored."""
    names = sorted(set().union(*OPTIONS_OF.values()))
    given = [name for name in names if is_given(parsed, name)]
    is_retrieval = parsed.data is not None and parsed.data.startswith("beir:")
    usual = RETRIEVAL if is_retrieval else "the loss"
    chosen = (flag_of(name) for name in ("tasks", "shots", "without_heads") if name in given)
    mode = next(chosen, usual)
    for name in given:
        modes = [mode for mode, options in OPTIONS_OF.items() if name in options]
        require(
            mode in modes,
            f"{flag_of(name)} applies to {' and '.join(modes)}, not to {mode}: "
            "leave one of them out",
        )
    return mode


def _evaluate_loss(parsed: EvaluateArguments) -> None:
    """Prints the loss and the metrics, as JSON."""
    from ...evaluation.evaluate import score_run

    scores = score_run(
        parsed.run,
        parsed.data,
        step=parsed.step,
        num_beams=parsed.num_beams,
        max_length=parsed.max_length,
        ema=parsed.ema,
        log=log,
    )
    print(to_json(scores))


def _evaluate_retrieval(parsed: EvaluateArguments) -> None:
    """Prints how well a search with the model's vectors finds relevant documents, as JSON."""
    from ...evaluation.vectors.retrieval import evaluate_retrieval

    loaded = _average_of(parsed)
    scores = evaluate_retrieval(
        parsed.run,
        cast(str, parsed.data),
        step=parsed.step,
        loaded=loaded,
        yes_no=parsed.yes_no,
        log=log,
    )
    print(to_json(scores))


def _average_of(parsed: EvaluateArguments) -> "Loaded | None":
    """With --ema, returns the model and the moving average of its parameters; otherwise None."""
    from ....models.finite import load_finite

    return load_finite(parsed.run, step=parsed.step, ema=True) if parsed.ema else None


def _evaluate_without_heads(parsed: EvaluateArguments) -> None:
    """Prints a table that shows how much the loss increases without each attention head."""
    from ...evaluation.evaluate import losses_without_heads

    losses = losses_without_heads(parsed.run, parsed.data, step=parsed.step, log=log)
    # The table shows the differences from the loss of the whole model.
    whole = losses.pop("loss")
    print(f"loss {whole:.4f}; without one head, by layer and head:")
    for name, table in losses.items():
        print(f"{name:<20} " + " ".join(f"{n:>7}" for n in range(1, table.shape[1] + 1)))
        for layer, row in enumerate(table - whole, 1):
            print(f"{f'layer {layer}':>20} " + " ".join(f"{x:+7.4f}" for x in row))


def _evaluate_tasks(parsed: EvaluateArguments) -> None:
    """Prints the results on the tasks, as a table and as JSON."""
    require(
        len(parsed.shots) <= 1,
        f"--tasks requires a single number of examples, got --shots with {len(parsed.shots)}: "
        "give one number",
    )
    from ...evaluation.tasks import Judged, judge, open_all

    tasks = cast(str, parsed.tasks)
    settings = EvaluateConfig(
        tasks=tuple(filter(None, map(str.strip, tasks.split(",")))),
        shots=parsed.shots[0] if parsed.shots else None,
        limit=parsed.limit,
        chat=parsed.chat,
        max_new_tokens=parsed.max_new_tokens,
        stop=parsed.stop,
    )
    require(settings.tasks, f"--tasks must name at least one task, got {tasks!r}: name one")
    results = judge(open_all(settings), Judged(parsed.run, parsed.step, _average_of(parsed), log))
    for name, metrics in results.items():
        for metric, value in metrics.items():
            print(f"{name:<32} {metric:<20} {value:>10.4f}")
    print(to_json({"tasks": results}))


def _evaluate_shots(parsed: EvaluateArguments) -> None:
    """Prints the accuracy for each number of examples, as a table and as JSON."""
    require(parsed.data, "--shots needs examples: give --data SOURCE, or --tasks")
    from ....data.prompts.examples import prompt_examples
    from ....models.text.prompting.continuations import ContinuationScorer
    from ....models.text.prompting.few_shot import (
        LIMIT,
        check_picture,
        draw_accuracy,
        few_shot_accuracy,
        table_of,
    )

    if parsed.plot is not None:
        # Check the path before the model is evaluated, to fail fast.
        check_picture(parsed.plot)
    source = cast(str, parsed.data)
    questions = parsed.queries or source
    examples = prompt_examples(source)
    queries = prompt_examples(questions, "validation")
    accuracies = few_shot_accuracy(
        ContinuationScorer.of_run(parsed.run, step=parsed.step, log=log, ema=parsed.ema),
        chosen_pattern(parsed.pattern, examples),
        examples,
        queries,
        shots=parsed.shots,
        answers=parsed.answers,
        limit=LIMIT if parsed.limit is None else parsed.limit,
        seed=parsed.seed,
        balanced=parsed.balanced,
        log=log,
    )
    print("\n".join(table_of(accuracies)))
    if parsed.plot is not None:
        draw_accuracy(accuracies, parsed.plot, f"{parsed.run} on {questions}")
    print(to_json({"shots": {str(number): x.to_json() for number, x in accuracies.items()}}))


FUNCTIONS = {
    "--tasks": _evaluate_tasks,
    "--shots": _evaluate_shots,
    "--without-heads": _evaluate_without_heads,
    RETRIEVAL: _evaluate_retrieval,
    "the loss": _evaluate_loss,
}
"""Maps each evaluation mode to the function that evaluates the model and prints the results."""
