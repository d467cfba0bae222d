"""Examples for prompts: fields as texts, from any of the sources."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..common.errors import DataError
from ..common.files import file_lines, matching_files
from ..common.json_lines import parse_line
from ..sources.builtin.patterns import Patterns
from ..sources.builtin.spelled_numbers import NumberWords
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import Split
from ..sources.in_memory import Examples
from ..sources.labelled_names import LabelledSource, parse_labelled
from ..sources.labelled_records import read_fields
from ..sources.parallel_corpus import open_parallel
from ..sources.sentence_pairs import SentencePair
from ..sources.squad import read_questions
from ..sources.tables import ColumnRoles, column_names
from ..sources.tfds_records import open_published
from ..tasks.question_answering import NO_ANSWER
from ..tasks.sequence_classification import SequenceClassificationData
from ..tokenizers.training import TokenizerConfig

TASK = "task"
"""The field that groups examples of the same task."""
_FILES = ("jsonl", "csv", "tsv")
_ANY_COLUMNS = ColumnRoles("those of the fields", {})


@dataclass(frozen=True)
class PromptExample:
    """An example for a prompt.

    Attributes:
      fields: Texts by their names.
      task: The task that the example shows, or None. A prompt combines examples of one task.
    """

    fields: Mapping[str, str]
    task: str | None = None


def prompt_examples(source: SourceLike, split: Split | None = None) -> list[PromptExample]:
    """Reads examples for prompts.

    JSON lines and tables (``examples.jsonl``, ``csv:GLOB``, ``tsv:GLOB``, or dicts in memory) keep
    their fields; a field ``task`` says which examples belong together. A labeled
    source (``builtin:reviews``, ``tfds:glue/cola``, ``tsv:GLOB#1,2``) has the fields ``label``,
    ``text`` and perhaps ``text_b``; ``squad:GLOB`` has ``context``, ``question`` and ``answer``
    (the first of several, ``no answer`` if there is none); sentence pairs (``pairs:A,B``,
    ``builtin:numbers-en-fr``, other published data) have ``source`` and ``target``;
    ``builtin:patterns`` has ``query`` and ``answer``, and its examples show held-out tasks that
    training never uses.

    Args:
      source: The name of a file or a source, or a list of dicts.
      split: The split of a source that has splits. Defaults to the training split. Files and
        examples in memory have no splits and are read whole.

    Raises:
      DataError: The source is unknown, unreadable or empty, or a record is not an object of fields.
    """
    name = as_source(source)
    examples = list(_read(name, split or "train"))
    if not examples:
        raise DataError(f"no examples in {name!r}: it is empty")
    return examples


def _read(name: str | Examples, split: Split) -> Iterable[PromptExample]:
    if isinstance(name, Examples):
        return (_example(row, f"examples[{i}]") for i, row in enumerate(name.rows))
    # A name without a kind, or the path of an existing file: infer the kind from the suffix.
    kind, colon, rest = name.partition(":")
    if not colon or Path(name).exists():
        kind, rest = Path(name.removesuffix(".gz")).suffix.removeprefix("."), name
        if kind not in _FILES:
            raise DataError(
                f"{name!r} is no source of examples: name a file .jsonl, .csv or .tsv, or a source "
                "such as builtin:reviews"
            )
    if (patterns := Patterns.parse(name)) is not None:
        return (
            PromptExample({"query": query, "answer": answer}, episode.task.name)
            for episode in patterns.held_out
            for query, answer in episode.examples
        )
    # Files with named fields; numbered columns are the columns of a labeled table.
    location, mark, part = rest.rpartition("#") if "#" in rest else (rest, "", "")
    if kind == "jsonl" and not mark:
        return _objects(name, location)
    if kind in _FILES and not (mark and _are_numbers(part)):
        source = LabelledSource(name, kind, location, (), True)
        if mark:
            source = parse_labelled(f"{kind}:{rest}", dict.fromkeys(_FILES, ""))
        else:
            source = replace(source, fields=column_names(source))
        return _records(source)
    # Labeled sources, questions about passages, and sentence pairs for everything else.
    published = SequenceClassificationData.published_fields
    if kind in (*_FILES, "corpora") or (kind, rest) == ("builtin", "reviews"):
        return _labeled(name, split)
    if kind == "squad":
        return _questions(name)
    if kind == "tfds" and rest.partition("#")[0] in published:
        return _labeled(name, split)
    return (
        PromptExample({"source": pair.source, "target": pair.target})
        for pair in _pairs(name, split)
    )


def _are_numbers(part: str) -> bool:
    return all(field.isdecimal() for field in part.partition("?")[0].split(","))


def _objects(name: str, location: str) -> Iterator[PromptExample]:
    for path in matching_files(location, name):
        for file, number, line in file_lines(path):
            if line.strip():
                where = f"{file} line {number}"
                yield _example(parse_line(line, where), where)


def _records(source: LabelledSource) -> Iterator[PromptExample]:
    for record in read_fields(source, _ANY_COLUMNS):
        yield _example(dict(zip(source.fields, record.values, strict=True)), record.location)


def _example(row: object, location: str) -> PromptExample:
    """Returns an example with the fields that are texts or numbers; leaves out the others."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{location} is a {type(row).__name__}, no object of fields: write "
            '{"question": "…", "answer": "…"}'
        )
    # A lone surrogate is valid in JSON, but cannot be encoded as UTF-8.
    for key, value in row.items():
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise DataError(
                    f"{location} has half a character in its field {key!r}: remove it"
                ) from None
    texts = {
        str(key): value if isinstance(value, str) else json.dumps(value)
        for key, value in row.items()
        if isinstance(value, str | int | float)
    }
    return PromptExample(texts, texts.get(TASK))


def _labeled(name: str, split: Split) -> Iterator[PromptExample]:
    # Reading needs no tokenizer; the default only completes the config.
    config = SequenceClassificationData(source=name, tokenizer=TokenizerConfig())
    source = parse_labelled(name, config.forms)
    published = open_published(source, config.published_fields) if source.kind == "tfds" else None
    whole = config.read(source if published is None else published.source, published, split)
    for example in whole.examples:
        texts = dict(zip(("text", "text_b"), example.texts, strict=False))
        yield PromptExample({**texts, "label": str(example.label)})


def _questions(name: str) -> Iterator[PromptExample]:
    source = parse_labelled(name, {"squad": ""})
    for question in read_questions(source):
        # A prompt shows one answer.
        answer = question.answers[0].text if question.answers else NO_ANSWER
        fields = {"context": question.passage, "question": question.question, "answer": answer}
        yield PromptExample(fields)


def _pairs(name: str, split: Split) -> Iterable[SentencePair]:
    numbers = NumberWords.parse(name)
    if numbers is not None:
        return numbers.vocabulary if split == "train" else numbers.validation
    return open_parallel(name, split)
