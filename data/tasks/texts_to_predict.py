"""Reads the texts or pairs of texts to classify, from named fields or from tab-separated lines.

A model trained with flaxzoo reads as many texts per example as its training source had. For an
imported model this number is unknown, so it reads one or two texts, as in transformers.
"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..common.errors import DataError, counted
from ..common.fields import require
from ..common.files import Line, input_lines, matching_lines
from ..common.json_lines import picked
from ..filters.conditions import Condition
from ..sources.in_memory import Examples
from ..sources.labelled_names import LabelledSource, Record
from ..sources.labelled_records import are_json_lines, read_fields
from ..sources.read_documents import json_rows
from ..sources.tables import LABELED_TEXTS, ColumnRoles, column_names

PAIRS = (
    *(("text", "text_b"), ("text", "text_pair"), ("text_a", "text_b"), ("text1", "text2")),
    *(("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("sentence_A", "sentence_B")),
    *(("question1", "question2"), ("premise", "hypothesis"), ("question", "context")),
    *(("question", "passage"), ("question", "sentence"), ("question", "answer")),
    *(("query", "document"), ("query", "passage"), ("query", "text"), ("source", "target")),
)
"""Pairs of names that the first and the second text usually have."""
SECOND = frozenset(
    "text_b text_pair text2 sentence2 sentence_b sentence_B question2 hypothesis".split()
)
"""Names that only the second text of a pair usually has."""
SINGLE = (*LABELED_TEXTS.fields["text"], "query")
"""Names that a single text usually has."""
IMPORTED = "memory:imported model#label,text,text_b?"
"""The source name that an imported model gets; the second text is optional."""


@dataclass(frozen=True)
class TextReader:
    """Reads the texts of examples to predict.

    Attributes:
      fields: The names or column numbers of the texts in the source of the run.
      imported: Whether the model accepts both one and two texts.
      unread: Collects the names of fields that are present but not read.
    """

    fields: tuple[str, ...]
    imported: bool
    unread: set[str]

    def of_file(self, path: str) -> Iterator[Record]:
        """Reads a file: JSON lines, a table whose first line contains names, or lines of text.

        The file suffix or the first line identifies JSON lines. A line of text contains one text,
        or two texts separated by a tab. An empty line is an empty text.

        Raises:
          DataError: The number of texts does not fit the model (the message names file and line),
            or the file is a CSV table without column names.
        """
        kind = path.removesuffix(".gz").rpartition(".")[2]
        # The first line of a table must name the text columns; TSV may also be lines of text.
        if kind in ("csv", "tsv"):
            named = self._named_columns(LabelledSource(f"{kind}:{path}", kind, path, (), True))
            require(
                named is not None or kind == "tsv",
                f"{path} is a table, and its first line does not name its texts: name their "
                f"columns there, as text and text_b, or one column, as csv:{path}#1",
                error=DataError,
            )
            if named is not None:
                return read_fields(named, _COLUMNS)
        lines = input_lines(path)
        # Standard input has no suffix, so also check the first line.
        first = list(itertools.islice(lines, 1))
        has_json = are_json_lines(path) or any(is_object(line) for _, _, line in first)
        read = self._of_json_lines if has_json else self._of_lines
        return read(itertools.chain(first, lines))

    def _of_lines(self, lines: Iterable[Line]) -> Iterator[Record]:
        for file, number, line in lines:
            texts, location = line.split("\t"), f"{file} line {number}"
            remedy = (
                "give its texts alone, separated by tabs, or name a file of labeled examples as "
                f"tsv:{file}#LABEL,TEXT[,TEXT_B]"
            )
            self.check_number(len(texts), location, remedy)
            yield Record(location, tuple(texts))

    def check_number(self, number: int, location: str, remedy: str) -> None:
        """Checks whether the model reads this number of texts.

        Args:
          number: The number of texts in an example or a source.
          location: The location of the example, or the source, for the message.
          remedy: What the user can do, for the message.

        Raises:
          DataError: The model reads a different number of texts.
        """
        allowed = (1, 2) if self.imported else (len(self.fields),)
        require(
            number in allowed,
            f"{location} has {counted(number, 'text')} but this model reads "
            f"{' or '.join(map(str, allowed))}: {remedy}",
            error=DataError,
        )

    def _of_json_lines(
        self, lines: Iterable[Line], conditions: tuple[Condition, ...] = ()
    ) -> Iterator[Record]:
        for location, row in json_rows(lines, conditions, None):
            yield self.of_row(row, location)

    def of_source(self, source: LabelledSource) -> Iterator[Record] | None:
        """Reads a source if the user named no columns; None if the header names no texts."""
        if source.kind == "jsonl":
            lines = matching_lines(source.location, source.name)
            return self._of_json_lines(lines, source.conditions)
        named = self._named_columns(source)
        return None if named is None else read_fields(named, _COLUMNS)

    def of_examples(self, name: Examples) -> Iterator[Record]:
        """Reads examples in memory, which are texts or dicts of fields."""
        for i, row in enumerate(name.rows):
            location = f"examples[{i}]"
            if isinstance(row, dict):
                yield self.of_row(row, location)
            else:
                self.check_number(1, location, "give a dict of the fields text and text_b")
                yield Record(location, (row,))

    def of_row(self, row: Mapping[str, object], location: str) -> Record:
        """Reads the texts from a mapping of field names to values."""
        chosen = self.names_in(row, location)
        return Record(location, picked(row, chosen, location))

    def names_in(self, names: Mapping[str, object], location: str) -> tuple[str, ...]:
        """Returns the names of the fields that are texts, and records all other names as unread.

        Raises:
          DataError: No field is a text, the number of texts does not fit the model, or it is
            ambiguous which fields are texts.
        """
        chosen = self._known(names)
        # If the fields are column numbers, they are not names that the user could give.
        trained = () if self.imported else tuple(itertools.filterfalse(str.isdecimal, self.fields))
        require(
            chosen,
            f"{location} has the fields {', '.join(map(str, names)) or 'none'}, and none is "
            f"{' or '.join(dict.fromkeys((*trained, 'text')))}: give the text this name, and a "
            "second text the name text_b",
            error=DataError,
        )
        require(
            chosen == self.fields or "text" not in names or "text" in chosen,
            f"{location} has the field text, and also {' and '.join(chosen)}: leave out the "
            f"fields that should not be read",
            error=DataError,
        )
        # Reject a second text, which a model for single texts would otherwise ignore silently.
        second = sorted((SECOND & names.keys()) - {*self.fields, *chosen})
        texts = (*chosen, *(second if len(chosen) == 1 else ()))
        require(
            self.imported or len(chosen) == len(texts) == len(self.fields),
            f"{location} has the texts {', '.join(map(repr, texts))}, and this model was trained "
            f"on {('single texts', 'pairs')[len(self.fields) - 1]}: give "
            f"{' and '.join(trained or ('text', 'text_b')[: len(self.fields)])}",
            error=DataError,
        )
        # The log lists fields that are present but not read.
        self.unread.update(names.keys() - {*chosen})
        return chosen

    def _known(self, names: Mapping[str, object]) -> tuple[str, ...]:
        """Returns the texts' names: names in the run's source, else usual names, else empty."""
        return self.fields if {*self.fields} <= names.keys() else _customary(names)

    def _named_columns(self, source: LabelledSource) -> LabelledSource | None:
        """Returns the source of a table with its text columns; None if the header lacks names."""
        names: Mapping[str, object] = {}
        # The first line may not contain names, which raises an error.
        with contextlib.suppress(DataError):
            names = dict.fromkeys(column_names(source))
        if not self._known(names):
            return None
        return replace(source, fields=self.names_in(names, source.location), named=True)


_COLUMNS = ColumnRoles("the columns of texts", {})


def _customary(names: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names that usually stand for a pair of texts or a single text, else empty."""
    for pair in PAIRS:
        if {*pair} <= names.keys():
            return pair
    # If several names could be the single text, the choice is ambiguous unless one is `text`.
    single = list(filter(names.__contains__, SINGLE))
    return ("text",) if "text" in single else tuple(single) if len(single) == 1 else ()


def is_object(line: str) -> bool:
    """Returns whether a line is a JSON object."""
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def are_pair(fields: tuple[str, ...]) -> bool:
    """Returns whether the names of two fields usually stand for a pair of texts."""
    return fields in PAIRS
