"""Sentences in columns, the format of the CoNLL shared tasks.

Each line has a word in its first column and the tag of the word in its last column, or in the
column that the source names. An empty line ends a sentence, and a line ``-DOCSTART-`` ends a
document. Columns are separated by tabs, or by blanks if the text has no tabs (Tjong Kim Sang &
De Meulder 2003).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..common.errors import DataError, counted
from ..common.files import Line
from .labelled_names import LabelledSource
from .labelled_records import source_lines


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, from consecutive lines.

    Attributes:
      file: The name of the file.
      first_line: The line number of the first word, from 1.
      words: The words.
      tags: A tag for each word.
      document: The first sentence of the document; empty if documents are not marked.
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

    Documents count as marked if there are at least two of them.

    Args:
      source: A source of the kind ``conll``; its field is the number of the tag column, from 1.

    Raises:
      DataError: A line has too many or too few columns (the message names file and line), or
        the tag column does not exist.
    """
    column = _column(source)
    files = [list(_blocks(list(lines))) for lines in source_lines(source)]
    # Documents count as marked if some file has several; a single mark at its head is not enough.
    marked = sum(len({block.document for block in blocks}) for blocks in files) > len(files)
    for blocks in files:
        begins: dict[int, str] = {}
        for block in blocks:
            sentence = _sentence(block.rows, column)
            if marked:
                # Identify a document by its first sentence, which stays when files are renamed.
                begin = begins.setdefault(block.document, " ".join(sentence.words))
                sentence = replace(sentence, document=begin)
            yield sentence


def _sentence(rows: list[tuple[str, int, list[str]]], column: int | None) -> Sentence:
    file, first, cells = rows[0]
    for _, number, row in rows:
        if column is not None and column > len(row):
            raise DataError(
                f"{file} line {number} has {counted(len(row), 'column')}, so there is no column "
                f"{column}: name the tags' column as #COLUMN, or leave it out for the last"
            )
    if len(cells) < 2:
        raise DataError(f"{file} line {first} has a word without a tag: {cells[0]!r}")
    index = -1 if column is None else column - 1
    words = tuple(row[0] for _, _, row in rows)
    return Sentence(file, first, words, tuple(row[index] for _, _, row in rows))


def read_words(lines: Iterator[Line]) -> Iterator[Sentence]:
    """Reads only the words; ignores all other columns."""
    for block in _blocks(list(lines)):
        file, first, _ = block.rows[0]
        yield Sentence(file, first, tuple(row[0] for _, _, row in block.rows), ())


def _column(source: LabelledSource) -> int | None:
    if not source.fields:
        return None
    column = ",".join(source.fields)
    if not column.isdecimal() or int(column) < 2:
        raise DataError(
            f"{source.name!r} names no column: give the number of the tags' column from 2, "
            "as conll:GLOB#4, or leave it out for the last"
        )
    return int(column)


def _blocks(lines: Sequence[Line]) -> Iterator[_Block]:
    """Splits lines into sentences at empty lines, and lines into a fixed number of columns."""
    tabs = any("\t" in line for _, _, line in lines)
    rows: list[tuple[str, int, list[str]]] = []
    width = document = 0
    for file, number, line in lines:
        cells = line.split("\t") if tabs else [cell for cell in line.split(" ") if cell]
        begins = line.startswith("-DOCSTART-")
        # A mark of a document also ends the sentence before it.
        if begins or not any(cell.strip() for cell in cells):
            if rows:
                yield _Block(rows, document)
            rows = []
            document += begins
            continue
        # All lines must have as many columns as the first.
        width = width or len(cells)
        if len(cells) != width:
            raise DataError(
                f"{file} line {number} has {counted(len(cells), 'column')} where the first "
                f"has {width}: give every word as many, separated by {'tabs' if tabs else 'blanks'}"
            )
        rows.append((file, number, cells))
    if rows:
        yield _Block(rows, document)
