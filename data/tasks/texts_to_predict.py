"""Reads texts or pairs of texts to classify, from named fields or from lines separated by tabs.

A model trained with flaxzoo reads as many texts as its source had. An imported model has no source:
it reads one or two texts, like transformers.
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
"""Usual names of the first and the second text."""
SECOND = frozenset(
    "text_b text_pair text2 sentence2 sentence_b sentence_B question2 hypothesis".split()
)
"""Usual names of the second text alone."""
SINGLE = (*LABELED_TEXTS.fields["text"], "query")
"""Usual names of a single text."""
IMPORTED = "memory:imported model#label,text,text_b?"
"""The source of an imported model, whose second text is optional."""


@dataclass(frozen=True)
class TextReader:
    """Reads the texts of examples to predict.

    Attributes:
      fields: The names, or the numbers of columns, of the texts in the source of the run.
      imported: Whether the model accepts both one and two texts.
      unread: Collects the names of fields that are present but not read.
    """

    fields: tuple[str, ...]
    imported: bool
    unread: set[str]

    def of_file(self, path: str) -> Iterator[Record]:
        """Reads a file: JSON lines, a table with a line of names, or lines of texts.

        The file suffix or the first line identifies JSON lines. A line of texts has one text, or
        two texts separated by a tab; an empty line is an empty text.

        Raises:
          DataError: The number of texts does not fit the model (with file and line), or the file
            is a CSV table without names.
        """
        kind = path.removesuffix(".gz").rpartition(".")[2]
        # A table needs names of its texts in the first line; TSV may also be lines of texts.
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
        # Standard input has no suffix, so look at the first line.
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
        """Checks the number of texts of an example or a source.

        Args:
          number: The number of texts.
          location: The example or the source, for the message.
          remedy: The remedy, for the message.

        Raises:
          DataError: The model reads another number of texts.
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
        """Reads a source without named columns; returns None if its header names no texts."""
        if source.kind == "jsonl":
            lines = matching_lines(source.location, source.name)
            return self._of_json_lines(lines, source.conditions)
        named = self._named_columns(source)
        return None if named is None else read_fields(named, _COLUMNS)

    def of_examples(self, name: Examples) -> Iterator[Record]:
        """Reads texts, or dicts of fields."""
        for i, row in enumerate(name.rows):
            location = f"examples[{i}]"
            if isinstance(row, dict):
                yield self.of_row(row, location)
            else:
                self.check_number(1, location, "give a dict of the fields text and text_b")
                yield Record(location, (row,))

    def of_row(self, row: Mapping[str, object], location: str) -> Record:
        """Reads the texts of an object of fields."""
        chosen = self.names_in(row, location)
        return Record(location, picked(row, chosen, location))

    def names_in(self, names: Mapping[str, object], location: str) -> tuple[str, ...]:
        """Returns the names of the texts among the names of fields; other names are unread.

        Raises:
          DataError: No field is a text, the number of texts does not fit the model, or the choice
            of fields is ambiguous.
        """
        chosen = self._known(names)
        # Column numbers are not names that the user could give.
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
        # Refuse a second text, which a model of single texts would silently ignore.
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
        """Returns the names of the texts: the names in the run's source, the usual names, or ()."""
        return self.fields if {*self.fields} <= names.keys() else _customary(names)

    def _named_columns(self, source: LabelledSource) -> LabelledSource | None:
        """Returns a table with its text columns, if the first line names them."""
        names: Mapping[str, object] = {}
        # The first line may have no names.
        with contextlib.suppress(DataError):
            names = dict.fromkeys(column_names(source))
        if not self._known(names):
            return None
        return replace(source, fields=self.names_in(names, source.location), named=True)


_COLUMNS = ColumnRoles("the columns of texts", {})


def _customary(names: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names that usually mean a pair of texts or a single text, or ()."""
    for pair in PAIRS:
        if {*pair} <= names.keys():
            return pair
    # Several names of single texts are ambiguous unless one is `text`.
    single = list(filter(names.__contains__, SINGLE))
    return ("text",) if "text" in single else tuple(single) if len(single) == 1 else ()


def is_object(line: str) -> bool:
    """Returns whether a line is a JSON object."""
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def are_pair(fields: tuple[str, ...]) -> bool:
    """Returns whether two fields are usual names of a pair of texts."""
    return fields in PAIRS
