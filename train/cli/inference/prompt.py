"""The command `flaxzoo prompt`."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ....data.common.errors import UserError
from ....data.common.fields import NonNegative, NonNegativeInt, Seed, require
from ....data.common.json_text import to_json
from ....models.decoding.request import NewTokens
from ...compilation_cache import enable_compilation_cache
from ..options import check_one_given, log, parse
from .arguments import DecodingArguments
from .generate import check_requested, log_acceptance, open_generator

if TYPE_CHECKING:
    from ....data.prompts.examples import PromptExample
    from ....data.prompts.few_shot import FewShot
    from ....data.prompts.pattern import PromptPattern

MOST_SHOTS = 8
"""The maximum number of examples if --shots is not given."""
NAMED = re.compile(r":|\.(jsonl|csv|tsv)(\.gz)?$")
"""Matches sources and files with named fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptArguments(DecodingArguments):
    """Shows a model examples of a task in its prompt, and prints its answers to queries.

    The prompt repeats one pattern: instance, label, instance, label, …, and ends with the query.
    """

    query: tuple[str, ...] = ()
    """The texts to answer, or JSON objects if the pattern has several fields before the answer."""
    query_file: str | None = None
    """A file of queries, one per line; or a file or source with named fields, as for --examples,
    whose answers are ignored. - reads lines from standard input."""
    examples: str | None = None
    """A file of examples (.jsonl, or .csv and .tsv with a line of names), or a source: tsv:GLOB#1,2
    (labels and texts), pairs:A,B, builtin:reviews, …"""
    shots: NonNegativeInt | None = None
    """The number of examples in a prompt. The first examples of the file are shown, in their order.
    Defaults to all examples, but at most 8."""
    pattern: str | None = None
    r"""The name of a pattern (grammar, words, news, question, arithmetic, review, pair,
    translation, patterns), or a template with fields in braces that ends with the answer: 'Q:
    {question}\nA: {answer}\n'. Defaults to the named pattern with the fields of the examples."""
    labels: tuple[str, ...] = ()
    """Instead of a pattern: the label before each field of the examples, one field per line: 'Poor
    English input: ' 'Good English output: '."""
    task: str | None = None
    """The task of --query, if the examples have a field task. The prompt then shows only examples
    of this task."""
    balanced: bool = False
    """Choose equally many examples of each answer, if available."""
    full_context: Literal["drop", "error"] = "drop"
    """Whether to drop the first examples of a prompt that is too long (drop), or to raise an error
    (error)."""
    show: bool = False
    """Print the prompts without answers; the model is not loaded."""
    json: bool = False
    """Print a JSON object for each query: the prompt, the answer, and its "completions" with the
    fields of generate --prompt-file."""
    max_new_tokens: NewTokens | None = None
    """Maximum length of an answer, in tokens. Defaults to 64, or to a quarter of the context window
    if that is less."""
    temperature: NonNegative | None = None
    """With a value above 0, tokens are sampled. By default, decoding is greedy."""
    stop_strings: tuple[str, ...] = ()
    """Additional strings that end an answer. An answer always ends at a line feed, at the text that
    follows the answer in the pattern, and before a line that begins with the first label."""
    seed: Seed | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """The seed that shuffles the examples before they are chosen. By default, the first examples of
    the file are shown, in their order. This seed is also the sampling seed of the first query (by
    default 0), and increases by one with each query."""


def prompt_command(arguments: list[str]) -> None:
    """Runs `flaxzoo prompt RUN --examples FILE --shots K --query TEXT`."""
    parsed = parse(PromptArguments, arguments, "flaxzoo prompt")
    check_one_given(parsed, "query", "query_file")
    check_one_given(parsed, "pattern", "labels", least=0)
    few_shot, queries = _few_shot(parsed)
    # Build all prompts first, so that a missing field fails before the model is loaded.
    prompts = list(map(few_shot.prompt, queries))
    if parsed.show:
        print("\n----\n".join(prompts))
        return
    enable_compilation_cache()
    from ....data.common.progress import Progress
    from ....models.text.prompting.answer import answer_queries

    # Check the options before the model is loaded, to fail fast.
    check_requested(parsed)
    generator = open_generator(parsed, parsed.run)
    with Progress().counter(
        "answers", len(queries) * (parsed.num_return_sequences or 1)
    ) as advance:
        answers = answer_queries(
            generator,
            few_shot,
            queries,
            stop_strings=parsed.stop_strings,
            drop=parsed.full_context == "drop",
            seed=parsed.seed or 0,
            batch_size=parsed.batch_size,
            on_batch=advance,
            log=log,
            **parsed.requested(),
        )
    for answer in answers:
        if parsed.json:
            print(to_json(dataclasses.asdict(answer)))
        else:
            print("\n".join(each.text.strip() for each in answer.completions))
    log_acceptance(generator)


def _few_shot(parsed: PromptArguments) -> "tuple[FewShot, list[PromptExample]]":
    """Returns the examples with their pattern, and the queries."""
    from ....data.common.files import read_lines
    from ....data.prompts.examples import prompt_examples
    from ....data.prompts.few_shot import FewShot

    examples = [] if parsed.examples is None else prompt_examples(parsed.examples)
    file = parsed.query_file or ""
    # Sources and tables have named fields. Other files have one text per line.
    if NAMED.search(file):
        queries = prompt_examples(file, "validation")
        queries = [query for query in queries if parsed.task in (None, query.task)]
        require(queries, f"{file} has no query of the task {parsed.task!r}: check --task")
        pattern = chosen_pattern(parsed.pattern, examples or queries, parsed.labels)
    else:
        # The pattern names the fields of plain texts.
        pattern = chosen_pattern(parsed.pattern, examples, parsed.labels)
        texts = parsed.query or read_lines(file)
        queries = [_query(text, pattern, parsed.task) for text in texts]
    # By default, show all examples, up to the maximum.
    shots = min(MOST_SHOTS, len(examples)) if parsed.shots is None else parsed.shots
    problem = f"--shots {shots} needs examples to choose from: give --examples FILE"
    require(not shots or examples, problem)
    return FewShot(pattern, examples, shots, parsed.seed, parsed.balanced), queries


def _query(text: str, pattern: "PromptPattern", task: str | None) -> "PromptExample":
    """Returns the fields of a query: a JSON object, or the text if there is only one field."""
    from ....data.common.json_text import parse_object
    from ....data.prompts.examples import TASK, PromptExample

    *before, _ = pattern.fields
    # A plain text can only be the value of a single field before the answer; several fields need
    # names.
    if len(before) == 1:
        return PromptExample({before[0]: text}, task)
    if before and text.startswith("{"):
        row = parse_object(text, "--query", "correct it", UserError)
        fields = {
            name: value if isinstance(value, str) else to_json(value) for name, value in row.items()
        }
        return PromptExample(fields, task or fields.get(TASK))
    raise UserError(
        f"--query {text!r} is one text, and the pattern has {len(before)} fields before the answer "
        f"({', '.join(before)}): give a JSON object with them, or a file by --query-file"
    )


def chosen_pattern(
    given: str | None, examples: "Sequence[PromptExample]", labels: Sequence[str] = ()
) -> "PromptPattern":
    """Returns the given pattern, or the named pattern whose fields match the examples.

    Args:
        given: a name or a template.
        examples: examples or queries.
        labels: the label before each field, instead of a named pattern.

    Raises:
        UserError: the pattern is invalid, or there is neither a pattern nor an example.
    """
    from ....data.prompts.pattern import PromptPattern, pattern_for, prompt_pattern

    if given is not None:
        return prompt_pattern(given)
    require(examples, "--query without --examples needs a pattern: give --pattern")
    fields = [name for name in examples[0].fields if name != "task"]
    return PromptPattern.of_labels(labels, fields) if labels else pattern_for(fields)
