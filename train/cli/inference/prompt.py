"""The command `flaxzoo prompt`."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from ....data.errors import UserError
from ....data.io.json_text import to_json
from ...compilation_cache import enable_compilation_cache
from ..options import RunName, log, parse

if TYPE_CHECKING:
    from ....data.prompts.examples import PromptExample
    from ....data.prompts.few_shot import FewShot
    from ....data.prompts.pattern import PromptPattern

MOST_SHOTS = 8
"""The number of examples without --shots, if there are so many."""


@dataclasses.dataclass(frozen=True)
class PromptArguments:
    """Shows a model examples of a task in its prompt, and prints its answers to queries."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    query: tuple[str, ...] = ()
    """The texts to answer, if the pattern has one field besides the answer."""
    queries: str | None = None
    """A file or source of queries, as --examples; answers in it are not read."""
    examples: str | None = None
    """A file of examples (.jsonl, or .csv and .tsv with a line of names), or a source: tsv:GLOB#1,2
    (labels and texts), pairs:A,B, builtin:reviews, …"""
    shots: int | None = None
    """The number of examples in a prompt. By default all that there are, at most 8."""
    pattern: str | None = None
    r"""The name of a pattern (grammar, words, news, question, arithmetic, review, pair,
    translation), or a template with fields in braces, the answer last: 'Q: {question}\nA:
    {answer}\n'. By default the named pattern with the fields of the examples."""
    labels: tuple[str, ...] = ()
    """Instead of a pattern: the label before each field of the examples, which has a line of its
    own: 'Poor English input: ' 'Good English output: '."""
    balanced: bool = False
    """Choose equally many examples of each answer, as far as there are."""
    seed: int = 0
    """Decides which examples are chosen, and the tokens that are sampled."""
    full_context: Literal["drop", "error"] = "drop"
    """What is done with a prompt that is too long: drop its first examples, or stop."""
    max_new_tokens: int | None = None
    """Longest answer, in tokens. By default 64, or a quarter of what the model reads."""
    temperature: float | None = None
    """Above 0 samples tokens; by default the most probable token is taken each time."""
    stop: tuple[str, ...] = ()
    """Further strings that end an answer; a line feed and the first label always do."""
    show: bool = False
    """Print the prompts themselves, without an answer; the model is not read."""
    json: bool = False
    """Print a JSON object for each query, with its prompt."""
    step: int | None = None
    """The checkpoint. By default the newest."""


def prompt_command(arguments: list[str]) -> None:
    """Runs `flaxzoo prompt RUN --examples FILE --shots K --query TEXT`."""
    parsed = parse(PromptArguments, arguments, "flaxzoo prompt")
    if bool(parsed.query) == (parsed.queries is not None):
        raise UserError("prompt needs either --query TEXT or --queries FILE")
    if parsed.pattern is not None and parsed.labels:
        raise UserError("--pattern and --labels are two ways to say the same: give one of them")
    few_shot, queries = _few_shot(parsed)
    if parsed.show:
        print("\n----\n".join(few_shot.prompt(query) for query in queries))
        return
    enable_compilation_cache()
    from ...inference.generate import TextGenerator
    from ...prompting.answer import answer_queries

    given = {"max_new_tokens": parsed.max_new_tokens, "temperature": parsed.temperature}
    answers = answer_queries(
        TextGenerator.of_run(parsed.run, step=parsed.step, log=log),
        few_shot,
        queries,
        stop=parsed.stop,
        drop=parsed.full_context == "drop",
        seed=parsed.seed,
        log=log,
        **{name: value for name, value in given.items() if value is not None},
    )
    for answer in answers:
        print(to_json(dataclasses.asdict(answer)) if parsed.json else answer.text)


def _few_shot(parsed: PromptArguments) -> "tuple[FewShot, list[PromptExample]]":
    from ....data.prompts.examples import PromptExample, prompt_examples
    from ....data.prompts.few_shot import FewShot

    examples = [] if parsed.examples is None else prompt_examples(parsed.examples)
    queries = [] if parsed.queries is None else prompt_examples(parsed.queries, "validation")
    pattern = _pattern(parsed, (examples or queries)[:1])
    if parsed.query:
        *before, _ = pattern.fields
        if len(before) != 1:
            raise UserError(
                f"--query is one text, and the pattern has {len(before)} fields before the answer "
                f"({', '.join(before)}): give them in a file, by --queries"
            )
        queries = [PromptExample({before[0]: text}) for text in parsed.query]
    shots = min(MOST_SHOTS, len(examples)) if parsed.shots is None else parsed.shots
    if shots and not examples:
        raise UserError(f"--shots {shots} needs examples to choose from: give --examples FILE")
    return FewShot(pattern, examples, shots, parsed.seed, parsed.balanced), queries


def _pattern(parsed: PromptArguments, first: "list[PromptExample]") -> "PromptPattern":
    from ....data.prompts.pattern import PromptPattern, pattern_for, prompt_pattern

    if parsed.pattern is not None:
        return prompt_pattern(parsed.pattern)
    if not first:
        raise UserError("without examples there is no pattern: give --pattern")
    fields = [name for name in first[0].fields if name != "task"]
    return PromptPattern.of_labels(parsed.labels, fields) if parsed.labels else pattern_for(fields)
