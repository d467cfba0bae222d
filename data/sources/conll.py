"""Reads sentences in columns, the file format of the CoNLL shared tasks.

Each line has a word in its first column. The tag of the word is in the last column, or in the
column that the source specifies. An empty line ends a sentence, and a line ``-DOCSTART-`` ends a
document. Columns are separated by tabs, or by blanks if the text has no tabs (Tjong Kim Sang &
De Meulder 2003).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..common.errors import DataError, counted
from ..common.fields import require
from ..common.files import Line
from .labelled_names import LabelledSource
from .labelled_records import source_lines


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, which are on consecutive lines of a file.

    Attributes:
      file: The name of the file.
      first_line: The line number of the first word, counted from 1.
      words: The words.
      tags: The tag of each word.
      document: The first sentence of the document that contains this sentence, which identifies the
        document; empty if documents are not marked.
    """

    file: str
    first_line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]
    document: str = ""


@dataclass(frozen=True)
class _Block:
    """The lines of a sentence (file, line number, cells), and the index of its document."""

    rows: list[tuple[str, int, list[str]]]
    document: int


def read_sentences(source: LabelledSource) -> Iterator[Sentence]:
    """Reads the sentences of all files of a source.

    Each sentence names its document if at least one file marks several documents; otherwise
    ``document`` is empty.

    Args:
      source: A source of the kind ``conll``. Its field is the number of the tag column, counted
        from 1.

    Raises:
      DataError: A line has too many or too few columns (the message names file and line), or
        the tag column does not exist.
    """
    column = _column(source)
    files = [list(_blocks(list(lines))) for lines in source_lines(source)]
    # Documents count as marked only if some file has several of them; a single mark at the
    # beginning of a file is not enough.
    marked = sum(len({block.document for block in blocks}) for blocks in files) > len(files)
    for blocks in files:
        begins: dict[int, str] = {}
        for block in blocks:
            sentence = _sentence(block.rows, column)
            # Identify a document by its first sentence, which does not change if a file is renamed.
            begin = begins.setdefault(block.document, " ".join(sentence.words))
            yield replace(sentence, document=begin) if marked else sentence


def read_words(lines: Iterator[Line]) -> Iterator[Sentence]:
    """Reads only the words, and ignores all other columns."""
    for block in _blocks(list(lines)):
        file, first, _ = block.rows[0]
        yield Sentence(file, first, tuple(row[0] for _, _, row in block.rows), ())


def _column(source: LabelledSource) -> int:
    """Returns the index of the tag column; -1 means the last column."""
    if not source.fields:
        return -1
    column = ",".join(source.fields)
    require(
        column.isdecimal() and int(column) >= 2,
        f"the tag column of {source.name!r} must be a number from 2, got {column!r}: name it as "
        "conll:GLOB#4, or leave it out for the last column",
        DataError,
    )
    return int(column) - 1


def _sentence(rows: list[tuple[str, int, list[str]]], column: int) -> Sentence:
    file, first, cells = rows[0]
    location = f"{file} line {first}"
    require(len(cells) > 1, f"{location} has a word without a tag: {cells[0]!r}", DataError)
    require(
        column < len(cells),
        f"{location} has {counted(len(cells), 'column')}, and the tag column is {column + 1}: name "
        "it as #COLUMN, or leave it out for the last column",
        DataError,
    )
    words, tags = zip(*((row[0], row[column]) for _, _, row in rows), strict=True)
    return Sentence(file, first, words, tags)


def _blocks(lines: Sequence[Line]) -> Iterator[_Block]:
    """Splits the text into sentences at empty lines, and each line into its columns."""
    tabs = any("\t" in line for _, _, line in lines)
    rows: list[tuple[str, int, list[str]]] = []
    width = document = 0
    # Add an empty line at the end, which ends the last sentence.
    for file, number, line in [*lines, ("", 0, "")]:
        cells = line.split("\t") if tabs else re.split(" +", line.strip(" "))
        begins = line.startswith("-DOCSTART-")
        # A `-DOCSTART-` line also ends the sentence before it.
        if begins or not line.strip():
            if rows:
                yield _Block(rows, document)
            rows = []
            document += begins
            continue
        # All lines must have as many columns as the first line.
        width = width or len(cells)
        if len(cells) != width:
            raise DataError(
                f"{file} line {number} has {counted(len(cells), 'column')} where the first "
                f"line has {width}: give every word as many columns, separated by "
                f"{'tabs' if tabs else 'blanks'}"
            )
        rows.append((file, number, cells))
