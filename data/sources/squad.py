"""Reads questions about passages, in the JSON format of SQuAD 1.1 and 2.0 or in JSON lines.

See Rajpurkar et al. 2016 and 2018. An answer consists of a text and the position of its first
character in the passage. ``"unique": false`` marks an answer whose position is uncertain because
its text occurs several times in the passage. Training does not use such a position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..common.errors import DataError
from ..common.files import Line
from ..common.json_lines import parse_line, pick, picked
from ..common.json_text import parse_json
from .labelled_names import LabelledSource, Record
from .labelled_records import source_lines

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """One correct answer.

    Attributes:
      text: The text of the answer.
      start: The position of its first character in the passage, or None if the passage does not
        have the text at the given position.
      sure: Whether the position is certain.
    """

    text: str
    start: int | None
    sure: bool = True


@dataclass(frozen=True)
class SpanExample:
    """A question about a passage.

    Attributes:
      id: The identifier of the question in the source.
      question: The question.
      passage: The text that may contain an answer.
      answers: The correct answers; empty if the question has no answer, None if the answers are
        unknown (in prediction).
      title: The title of the article that contains the passage; may be empty.
      location: The file and the position of the question in it, for messages.
      group: A key that several questions may share. Questions with the same key are in the same
        split.
    """

    id: str
    question: str
    passage: str
    answers: tuple[Answer, ...] | None
    title: str = ""
    location: str = field(default="", repr=False)
    group: str = field(default="", repr=False)

    @property
    def known_answers(self) -> tuple[Answer, ...]:
        """The correct answers; empty if the question has no answer or its answers are unknown."""
        return self.answers or ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The passage and the question."""
        return self.passage, self.question


def read_questions(source: LabelledSource, *, labelled: bool = True) -> Iterator[SpanExample]:
    """Reads the questions of all files of a source.

    Args:
      source: A source of the kind ``squad``.
      labelled: Whether to read the answers.

    Raises:
      DataError: A file is not in the SQuAD format, or lacks a field (the message names the field
        and its location).
    """
    for lines in source_lines(source):
        yield from _questions(list(lines), labelled)


def questions_to_predict(lines: Iterator[Line], unread: set[str]) -> Iterator[SpanExample]:
    """Reads questions whose answers are to be predicted.

    Args:
      lines: The lines of a file in the SQuAD format, or JSON lines
        ``{"question": …, "context": …}`` with an optional ``id``, which defaults to the line
        number.
      unread: Collects the names of fields of JSON lines that are present but not read.

    Raises:
      DataError: The lines are in neither format.
    """
    read = list(lines)
    first = next((line for _, _, line in read if line.strip()), "")
    # In the SQuAD format, one JSON object has the articles under `data`, on one line or indented.
    if first.strip() == "{" or '"data"' in first:
        yield from _questions(read, labelled=False)
        return
    for file, number, line in read:
        if line.strip():
            location = f"{file} line {number}"
            row = parse_line(line, location)
            question, passage = (_text(row, name, location) for name in ("question", "context"))
            id = str(pick({"id": number, **row}, "id", location))
            unread |= row.keys() - {"question", "context", "id"}
            yield SpanExample(id, question, passage, None, location=location, group=passage)


def from_record(record: Record) -> SpanExample:
    """Makes a question from the values of a record: passage, question, answers, optionally an id.

    The answers are ``{"text": [...], "answer_start": [...]}``, or a list of single answers.

    Raises:
      DataError: The answers are in neither form.
    """
    passage, question, answers, *id = record.values
    # TFDS and the hub store one list for each field, with the values of all answers.
    if isinstance(answers, dict):
        columns = picked(answers, ("text", "answer_start"), record.location)
        answers = [
            {"text": text, "answer_start": start} for text, start in zip(*columns, strict=True)
        ]
    located = _answers({"answers": answers}, passage, record.location)
    (name,) = map(str, id or (record.location,))
    return SpanExample(name, question, passage, located, location=record.location)


def unanswered(record: Record) -> SpanExample:
    """Makes a question with unknown answers from a record: passage, question, optionally an id."""
    passage, question, *id = record.values
    with_answers = Record(record.location, (passage, question, [], *id))
    return replace(from_record(with_answers), answers=None, group=passage)


def locate_answer(text: str, start: object, passage: str, sure: bool = True) -> Answer:
    """Returns a stripped answer, with its position if the passage has the text at ``start``."""
    stripped = text.strip()
    # Do not search for the text elsewhere in the passage, because it may occur several times.
    if isinstance(start, int) and start >= 0 and stripped and passage.startswith(text, start):
        return Answer(stripped, start + text.index(stripped), sure)
    return Answer(text, None, sure)


def in_groups(examples: Sequence[SpanExample]) -> tuple[SpanExample, ...]:
    """Groups questions by article; a passage of several articles belongs to the first of them."""
    # Equal passages must be in one group; otherwise validation could contain training passages.
    first_title: dict[str, str] = {}
    groups = (first_title.setdefault(e.passage, e.title or e.passage) for e in examples)
    return tuple(replace(e, group=group) for e, group in zip(examples, groups, strict=True))


def _questions(lines: Sequence[Line], labelled: bool) -> Iterator[SpanExample]:
    """Yields the questions of a file in the SQuAD format; an empty file has no questions."""
    text = "\n".join(line for _, _, line in lines)
    if not text.strip():
        return
    file = lines[0][0]
    content = parse_json(text, file)
    for i, article in enumerate(_list(content, "data", file), start=1):
        paragraphs = _list(article, "paragraphs", f"{file} article {i}")
        # If an article has no title, its questions are grouped by passage.
        title = str(article.get("title", ""))
        for j, paragraph in enumerate(paragraphs, start=1):
            location = f"{file} article {i} paragraph {j}"
            passage = _text(paragraph, "context", location)
            for qa in _list(paragraph, "qas", location):
                question = _text(qa, "question", location)
                id = str(pick(qa, "id", f"{location} question {question[:60]!r}"))
                source_location = f"{file} question {id}"
                answers = _answers(qa, passage, source_location) if labelled else None
                yield SpanExample(
                    id, question, passage, answers, title, source_location, title or passage
                )


def _answers(qa: dict[str, Any], passage: str, location: str) -> tuple[Answer, ...]:
    # If a question has no answer, it may lack the field `answers`.
    given = [] if qa.get("is_impossible") else _list(qa, "answers", location)
    return tuple(
        locate_answer(
            _text(answer, "text", location),
            answer.get("answer_start"),
            passage,
            answer.get("unique", True) is not False,
        )
        for answer in given
    )


def _list(row: object, field: str, location: str) -> list[Any]:
    return _value(row, field, location, list)


def _text(row: object, field: str, location: str) -> str:
    return _value(row, field, location, str)


def _value(row: object, field: str, location: str, kind: type[T]) -> T:
    value = pick(row, field, location) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        raise DataError(f"{location} is not SQuAD: {field!r} must be a {kind.__name__}")
    return value
