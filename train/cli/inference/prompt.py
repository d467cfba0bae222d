"""The command `flaxzoo prompt`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ....data.errors import UserError
from ...compilation_cache import enable_compilation_cache
from ..options import RunName, log, parse
from .generate import (
    RENAMED,
    DecodingArguments,
    check_requested,
    complete,
    print_completed,
)

if TYPE_CHECKING:
    from ....data.prompts.examples import PromptExample
    from ....data.prompts.few_shot import FewShot
    from ....data.prompts.pattern import PromptPattern
    from ...inference.generate import TextGenerator

NO_MODEL = "-"
SHOTS = 4
NEW_TOKENS = 64
TABLES = (".jsonl", ".csv", ".tsv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptArguments(DecodingArguments):
    """Answers queries with a trained model, which is shown some examples in the same prompt.

    The prompt repeats one pattern: instance, label, instance, label, …, and last the query. The
    answer ends at a line feed, or where the label of the next example begins.
    """

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub; with
    --show, - for none."""
    examples: str | None = None
    """The examples: a file .jsonl, .csv or .tsv with the names of the fields, or a source such as
    builtin:reviews or tsv:GLOB#1,2. Without them the model is asked with no example."""
    query: tuple[str, ...] = ()
    """The text to answer; several are answered one by one. Where a pattern has several fields
    before the answer: a JSON object with them."""
    query_file: str | None = None
    """The queries of a file, one on each line, or with named fields as for --examples. - reads
    lines from standard input."""
    shots: int | None = None
    """The number of examples in the prompt. By default 4, or all if there are fewer."""
    balanced: bool = False
    """Choose equally many examples of each answer."""
    drop: bool = True
    """Leave out the first examples of a prompt that is longer than the model reads. With --no-drop
    it is an error."""
    pattern: str | None = None
    """A template with the fields in braces, the answer last, such as 'Q: {question} A: {answer}',
    or one of the names grammar, words, news, question, arithmetic, review, pair, translation. By
    default the named one that has the fields of the examples."""
    labels: tuple[str, ...] = ()
    r"""Instead of a pattern: the label that begins the line of each field, such as
    'Poor English input: ' 'Good English output: '."""
    task: str | None = None
    """The task of --query, where the examples say theirs."""
    max_new_tokens: int | None = None
    """Longest answer, in tokens. By default 64, or a quarter of what the model reads if that is
    less."""
    temperature: float | None = None
    """Above 0 samples the answers: the higher, the more varied. By default, unless another option
    makes tokens be sampled, the most probable token is taken each time."""
    seed: int = 0
    """Decides which examples are chosen, and is the seed for sampling the first answer; each that
    follows has one more."""
    show: bool = False
    """Print the prompts, and do not answer them."""
    json: bool = False
    """Print a JSON object for each query, with the prompt, the answers, why they ended and their
    log-probabilities, as generate --prompt-file does."""


def prompt_command(arguments: list[str]) -> None:
    """Runs `flaxzoo prompt RUN --examples FILE --query TEXT`."""
    parsed = parse(PromptArguments, arguments, "flaxzoo prompt", renamed=RENAMED)
    _check(parsed)
    few, queries = read_shots(parsed)
    if parsed.run == NO_MODEL:
        print("\n----\n".join(few.prompt(query) + few.pattern.line_feeds for query in queries))
        return
    enable_compilation_cache()
    from ...inference.completions import Prompt
    from ...inference.generate import TextGenerator

    check_requested(parsed)
    generator = TextGenerator.of_run(
        parsed.run, step=parsed.step, log=log, max_length=parsed.max_length
    )
    new_tokens = parsed.max_new_tokens or max(1, min(NEW_TOKENS, generator.max_length // 4))
    texts = _fitting(few, queries, generator, new_tokens, drop=parsed.drop)
    if parsed.show:
        print("\n----\n".join(texts))
        return
    stop = parsed.stop or few.pattern.stops
    prompts = [
        Prompt(text, stop=stop, fields={"query": dict(query.fields)})
        for text, query in zip(texts, queries, strict=True)
    ]
    options: dict[str, int | float] = {"max_new_tokens": new_tokens}
    chosen = (parsed.temperature, parsed.top_k, parsed.top_p, parsed.num_beams, parsed.num_samples)
    if all(value is None for value in chosen):
        options["temperature"] = 0.0
    completed = complete(generator, prompts, parsed, **options)
    if parsed.json:
        print_completed(completed, json=True)
        return
    for each in completed:
        for one in each.completions:
            print(one.text.strip())


def _check(parsed: PromptArguments) -> None:
    if bool(parsed.query) == (parsed.query_file is not None):
        raise UserError(
            "prompt needs either --query TEXT or --query-file FILE (see flaxzoo prompt --help)"
        )
    if parsed.labels and parsed.pattern is not None:
        raise UserError("--labels and --pattern are both given: leave one out")
    if parsed.examples is None and parsed.shots:
        raise UserError(f"--shots {parsed.shots} needs --examples: name a file or a source of them")
    if parsed.examples is None and parsed.pattern is None:
        raise UserError(
            "prompt needs --examples FILE, or a --pattern such as 'Q: {question} A: {answer}'"
        )
    if parsed.run == NO_MODEL and not parsed.show:
        raise UserError("- is no run: it stands for none, with --show")


def read_shots(parsed: PromptArguments) -> "tuple[FewShot, list[PromptExample]]":
    """Reads the examples and the queries that the options name.

    Raises:
        UserError: they are not there, or do not fit the pattern.
    """
    from ....data.prompts.examples import TASK, prompt_examples
    from ....data.prompts.few_shot import FewShot
    from ....data.prompts.pattern import PromptPattern, pattern_for, prompt_pattern

    examples = [] if parsed.examples is None else prompt_examples(parsed.examples)
    if parsed.pattern is not None:
        pattern = prompt_pattern(parsed.pattern)
    else:
        names = [name for name in examples[0].fields if name != TASK]
        pattern = (
            PromptPattern.of_labels(parsed.labels, names) if parsed.labels else pattern_for(names)
        )
    shots = min(SHOTS, len(examples)) if parsed.shots is None else parsed.shots
    few = FewShot(pattern, examples, shots, seed=parsed.seed, balanced=parsed.balanced)
    queries = _queries(parsed, pattern)
    for query in queries:
        few.prompt(query)  # a field may be missing, or examples of its task
    return few, queries


def _queries(parsed: PromptArguments, pattern: "PromptPattern") -> "list[PromptExample]":
    """Returns the queries, each with the fields of the pattern before the answer."""
    from ....data.io.files import read_lines
    from ....data.io.json_text import parse_object
    from ....data.prompts.examples import PromptExample, prompt_examples

    texts, name = parsed.query, parsed.query_file
    if name is not None:
        if Path(name.removesuffix(".gz")).suffix in TABLES or ":" in name:
            return prompt_examples(name, "validation")
        texts = tuple(read_lines(name))
    before = pattern.fields[:-1]
    queries = []
    for text in texts:
        if len(before) == 1:
            fields = {before[0]: text}
        elif text.startswith("{"):
            fields = parse_object(text, f"the query {text!r}", "correct it", UserError)
        elif before:
            named = ", ".join(f'"{name}": "…"' for name in before)
            raise UserError(
                f"the query {text!r} is one text, and the pattern has the fields "
                f"{', '.join(before)} before the answer: give them as {{{named}}}"
            )
        else:
            raise UserError(
                f"the pattern {pattern.template!r} has no field for a query: add one before the "
                "answer"
            )
        strings = {name: str(value) for name, value in fields.items()}
        queries.append(PromptExample(strings, parsed.task or strings.get("task")))
    return queries


def _fitting(
    few: "FewShot",
    queries: "list[PromptExample]",
    generator: "TextGenerator",
    new_tokens: int,
    *,
    drop: bool,
) -> list[str]:
    """Returns prompts that leave the model room for an answer; says how many lost examples."""
    room, ending = generator.max_length - new_tokens, few.pattern.line_feeds
    if room < 1:
        raise UserError(
            f"max_new_tokens {new_tokens} leaves no room for a prompt: the model reads "
            f"{generator.max_length} tokens"
        )
    texts = [
        few.fitting(query, lambda text: generator.num_tokens(text + ending), room, drop=drop)
        for query in queries
    ]
    shortened = sum(
        len(text) < len(few.prompt(query)) for text, query in zip(texts, queries, strict=True)
    )
    if shortened:
        log(
            f"{shortened:,} of {len(queries):,} prompts have fewer examples than requested: the "
            f"model reads {generator.max_length:,} tokens, and {new_tokens:,} of them are for the "
            "answer"
        )
    return [text + ending for text in texts]
