"""Reads examples for prompts from any source, with each field as text."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.errors import DataError
from ..common.fields import require
from ..common.files import matching_lines
from ..common.json_lines import parse_lines, pick
from ..sources.builtin.patterns import Patterns
from ..sources.builtin.toys import Toy
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import Split
from ..sources.in_memory import Examples
from ..sources.labelled_names import LabelledSource, parse_labelled
from ..sources.labelled_records import read_fields
from ..sources.parallel_corpus import open_parallel
from ..sources.squad import read_questions
from ..sources.tables import ColumnRoles, column_names
from ..tasks.question_answering import NO_ANSWER
from ..tasks.sequence_classification import SequenceClassificationData
from ..tokenizers.training import TokenizerConfig

TASK = "task"
"""The name of the field that says which examples belong to the same task."""
_FILES = ("jsonl", "csv", "tsv")
_ANY_COLUMNS = ColumnRoles("the columns of the fields", {})


@dataclass(frozen=True)
class PromptExample:
    """An example for a prompt.

    Attributes:
      fields: The text of each field, by the field's name.
      task: The task that the example demonstrates, or None. All examples of a prompt belong to one
        task.
    """

    fields: Mapping[str, str]
    task: str | None = None


def prompt_examples(source: SourceLike, split: Split | None = None) -> list[PromptExample]:
    """Reads examples for prompts.

    The source determines the names of the fields. JSON lines and tables (``examples.jsonl``,
    ``csv:GLOB``, ``tsv:GLOB``, or dicts in memory) keep their fields; a field ``task`` says which
    examples belong to the same task. A labeled source (``builtin:reviews``, ``tfds:glue/cola``,
    ``tsv:GLOB#1,2``) has the fields ``label``, ``text`` and, for text pairs, ``text_b``.
    ``squad:GLOB`` has ``context``, ``question`` and ``answer`` (the first answer, or ``no
    answer``). Sentence pairs (``pairs:A,B``, ``builtin:numbers-en-fr``, other published data) have
    ``source`` and ``target``. ``builtin:patterns`` has ``query`` and ``answer``; its examples
    demonstrate held-out tasks that training never uses. ``builtin:sums`` has ``question``
    (``What is 7 plus 5?``) and ``answer``; it contains each sum once, in a fixed order.

    Args:
      source: The name of a file or a source, or a list of dicts.
      split: The split to read, if the source has splits. Defaults to the training split. Files and
        examples in memory have no splits and are read completely.

    Raises:
      DataError: The source is unknown, unreadable or empty, or a record is not an object of fields.
    """
    name = as_source(source)
    examples = list(_read(name, split or "train"))
    require(examples, f"no examples in {name!r}: it is empty", error=DataError)
    return examples


def _read(name: str | Examples, split: Split) -> Iterable[PromptExample]:
    if isinstance(name, Examples):
        return (_example(row, f"examples[{i}]") for i, row in enumerate(name.rows))
    kind, colon, rest = name.partition(":")
    # If the name has no kind or is the path of an existing file, infer the kind from the suffix.
    if not colon or Path(name).exists():
        kind, rest = Path(name.removesuffix(".gz")).suffix.removeprefix("."), name
        choices = "a file .jsonl, .csv or .tsv, or a source such as builtin:reviews"
        problem = f"the source of examples must be {choices}, got {name!r}"
        require(kind in _FILES, problem, error=DataError)
    if (patterns := Patterns.parse(name)) is not None:
        return _episodes(patterns)
    if name == "builtin:sums":
        return _sums(Toy(name, "sums"))
    fields = rest.rpartition("#")[2] if "#" in rest else ""
    numbered = all(map(str.isdecimal, fields.partition("?")[0].split(",")))
    # Only labeled tables can have numbered columns; all other files have named fields.
    if kind in _FILES and not numbered:
        return (
            _objects(name, rest) if kind == "jsonl" and not fields else _records(name, kind, rest)
        )
    published = SequenceClassificationData.published_fields
    labeled = {*_FILES, "corpora", "builtin:reviews", *map("tfds:{}".format, published)}
    if labeled & {kind, f"{kind}:{rest.partition('#')[0]}"}:
        return _labeled(name, split)
    return _questions(name) if kind == "squad" else _pairs(name, split)


def _episodes(patterns: Patterns) -> Iterator[PromptExample]:
    for episode in patterns.held_out:
        for query, answer in episode.examples:
            yield PromptExample({"query": query, "answer": answer}, episode.task.name)


def _sums(toy: Toy) -> Iterator[PromptExample]:
    texts = [*toy.validation_texts()]
    random.Random(0).shuffle(texts)
    for text in texts:
        first, second = text.prompt.removesuffix("=").split("+")
        question = f"What is {first} plus {second}?"
        yield PromptExample({"question": question, "answer": text.fields["answer"]})


def _objects(name: str, glob: str) -> Iterator[PromptExample]:
    for location, row in parse_lines(matching_lines(glob, name)):
        yield _example(row, location)


def _records(name: str, kind: str, rest: str) -> Iterator[PromptExample]:
    source = LabelledSource(name, kind, rest, (), True)
    if "#" in rest:
        source = parse_labelled(f"{kind}:{rest}", dict.fromkeys(_FILES, ""))
    else:
        source = replace(source, fields=column_names(source))
    for record in read_fields(source, _ANY_COLUMNS):
        yield _example(dict(zip(source.fields, record.values, strict=True)), record.location)


def _example(row: Any, location: str) -> PromptExample:
    """Returns an example with the fields that are texts or numbers, and omits all other fields."""
    require(
        isinstance(row, Mapping),
        f'{location} must be an object of fields, as {{"question": "…", "answer": "…"}}, got a '
        f"{type(row).__name__}",
        error=DataError,
    )
    # `pick` rejects values that cannot be encoded as UTF-8.
    texts = {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name in row
        if isinstance(value := pick(row, name, location), str | int | float)
    }
    return PromptExample(texts, texts.get(TASK))


def _labeled(name: str, split: Split) -> Iterator[PromptExample]:
    # Reading does not use the tokenizer, but the config must have one.
    config = SequenceClassificationData(source=name, tokenizer=TokenizerConfig())
    whole = config.read(config.open(name), split)
    for example in whole.examples:
        texts = dict(zip(("text", "text_b"), example.texts, strict=False))
        yield PromptExample({**texts, "label": str(example.label)})


def _questions(name: str) -> Iterator[PromptExample]:
    source = parse_labelled(name, {"squad": ""})
    for question in read_questions(source):
        # A prompt shows only one of the correct answers.
        answer = question.answers[0].text if question.answers else NO_ANSWER
        fields = {"context": question.passage, "question": question.question, "answer": answer}
        yield PromptExample(fields)


def _pairs(name: str, split: Split) -> Iterator[PromptExample]:
    for pair in open_parallel(name, split):
        yield PromptExample({"source": pair.source, "target": pair.target})
