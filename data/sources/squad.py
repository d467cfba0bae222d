"""Questions on passages in the JSON of SQuAD 1.1 and 2.0, and in JSON lines.

Rajpurkar et al. 2016 and 2018. An answer is a text and the character of the passage that it
begins at. ``"unique": false`` marks an answer whose place is not sure, because its text
occurs several times; such a place is not trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from ..io.files import Line
from ..io.json_lines import parse_line, pick
from ..io.json_text import parse_json
from .labelled_records import LabelledSource, Record, are_json_lines, source_lines


@dataclass(frozen=True)
class Answer:
    """One right answer.

    Attributes:
        text: What it says.
        start: The character of the passage that it begins at; None if it is not there.
        sure: Whether this is the place that is meant.
    """

    text: str
    start: int | None
    sure: bool = True


@dataclass(frozen=True)
class SpanExample:
    """A question on a passage.

    Attributes:
        id: What its source calls it.
        question: The question.
        passage: The text that answers it, or does not.
        answers: The right answers, none if there is none; None if to be predicted.
        title: Of the article that the passage is from; may be empty.
        place: Where it stands, for messages.
        group: Questions of one group are never parted into training and validation.
    """

    id: str
    question: str
    passage: str
    answers: tuple[Answer, ...] | None
    title: str = ""
    location: str = field(default="", repr=False)
    group: str = field(default="", repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """Passage and question."""
        return self.passage, self.question


def read_questions(source: LabelledSource, *, labelled: bool = True) -> Iterator[SpanExample]:
    """Reads the questions of all files of a source.

    Args:
        source: Of the kind ``squad``.
        labelled: Whether to read the answers.

    Raises:
        DataError: A file is not JSON of the form, or lacks a part (which, and where).
    """
    for lines in source_lines(source):
        for file, text in _whole(lines):
            yield from _questions(parse_json(text, file), file, labelled)


def questions_to_predict(lines: Iterator[Line]) -> Iterator[SpanExample]:
    """Reads questions without answers.

    Args:
        lines: SQuAD's JSON, or JSON lines ``{"question": …, "context": …}``, perhaps with
            an ``id``, which is else the number of the line.

    Raises:
        DataError: It is neither.
    """
    read = list(lines)
    first = next((line for _, _, line in read if line.strip()), "")
    file = read[0][0] if read else ""
    if first and not (are_json_lines(file) or _is_question(first)):
        content = parse_json("\n".join(line for _, _, line in read), file)
        yield from _questions(content, file, labelled=False)
        return
    for file, number, line in read:
        if line.strip():
            location = f"{file} line {number}"
            row = parse_line(line, location)
            question, passage = (_text(row, name, location) for name in ("question", "context"))
            id = str(pick(row, "id", location) if "id" in row else number)
            yield SpanExample(id, question, passage, None, location=location, group=passage)


def from_record(record: Record) -> SpanExample:
    """Makes a question of a published record: passage, question, answers and perhaps an id.

    The answers are ``{"text": [...], "answer_start": [...]}``.
    """
    passage, question, answers, *id = record.values
    fields = ("text", "answer_start")
    if not isinstance(answers, dict) or not all(name in answers for name in fields):
        raise DataError(
            f"{record.location} has no answers of text and answer_start: name the fields as "
            "#context,question,answers"
        )
    pairs = zip(answers["text"], answers["answer_start"], strict=True)
    placed = tuple(place_answer(text, start, passage) for text, start in pairs)
    name = str(id[0]) if id else record.location
    return SpanExample(name, question, passage, placed, location=record.location)


def unanswered(record: Record) -> SpanExample:
    """Makes a question to predict of a published record: passage, question and perhaps an id."""
    passage, question, *id = record.values
    name = str(id[0]) if id else record.location
    return SpanExample(name, question, passage, None, location=record.location, group=passage)


def place_answer(text: str, start: Any, passage: str, sure: bool = True) -> Answer:
    """Looks whether an answer is where it is said to be; blanks around it are left out."""
    kept = text.strip()
    if not kept or not isinstance(start, int) or start < 0:
        return Answer(text, None, sure)
    if passage[start : start + len(text)] != text:
        return Answer(text, None, sure)
    return Answer(kept, start + text.index(kept), sure)


def in_groups(examples: Sequence[SpanExample]) -> tuple[SpanExample, ...]:
    """Groups questions by article, and a passage that several articles have by the first."""
    first_title: dict[str, str] = {}
    return tuple(
        SpanExample(
            e.id, e.question, e.passage, e.answers, e.title, e.location,
            first_title.setdefault(e.passage, e.title or e.passage),
        )
        for e in examples
    )  # fmt: skip


def _whole(lines: Iterator[Line]) -> Iterator[tuple[str, str]]:
    """The whole text of a file, with the file's name; nothing for an empty file."""
    read = list(lines)
    if read:
        yield read[0][0], "\n".join(line for _, _, line in read)


def _is_question(line: str) -> bool:
    """Whether a first line is meant to be a question; it may have a fault."""
    return ('"question"' in line or '"context"' in line) and '"data"' not in line


def _questions(content: Any, file: str, labelled: bool = True) -> Iterator[SpanExample]:
    articles = _list(content, "data", file) if isinstance(content, dict) else None
    if articles is None:
        raise DataError(f'{file} is not SQuAD: it must be a JSON object with a list "data"')
    for i, article in enumerate(articles, start=1):
        title = str(article.get("title", "")) if isinstance(article, dict) else ""
        for j, paragraph in enumerate(_list(article, "paragraphs", f"{file} article {i}"), start=1):
            location = f"{file} article {i} paragraph {j}"
            passage = _text(paragraph, "context", location)
            for qa in _list(paragraph, "qas", location):
                yield _question(qa, passage, title, file, location, labelled)


def _question(
    qa: Any, passage: str, title: str, file: str, location: str, labelled: bool
) -> SpanExample:
    question = _text(qa, "question", location)
    if "id" not in qa:
        raise DataError(f"{location} has a question without an id: {question[:60]!r}")
    location = f"{file} question {qa['id']}"
    answers = None
    if labelled:
        given = [] if qa.get("is_impossible") else _list(qa, "answers", location)
        answers = tuple(
            place_answer(
                _text(answer, "text", location),
                answer.get("answer_start"),
                passage,
                answer.get("unique", True) is not False,
            )
            for answer in given
        )
    return SpanExample(str(qa["id"]), question, passage, answers, title, location, title or passage)


def _list(row: Any, field: str, location: str) -> list[Any]:
    value = pick(row, field, location) if isinstance(row, dict) else None
    if not isinstance(value, list):
        raise DataError(f"{location} is not SQuAD: {field!r} must be a list")
    return value


def _text(row: Any, field: str, location: str) -> str:
    value = pick(row, field, location) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise DataError(f"{location} is not SQuAD: {field!r} must be a text")
    return value
