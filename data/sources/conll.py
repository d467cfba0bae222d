"""Sentences in columns, as the shared tasks of CoNLL have them.

A word per line, in its first column; its tag in the last, or in the one that the source
names; an empty line ends a sentence, a line ``-DOCSTART-`` a document. Columns are parted
by tabs, or by blanks in a text without tabs (Tjong Kim Sang & De Meulder 2003).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import DataError
from ..io.files import Line
from .labelled_records import LabelledSource, source_lines


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, which stand on lines one after the other.

    Attributes:
        file: Where it stands.
        first_line: The line of its first word, from 1.
        words: Its words.
        tags: A tag for each.
        document: The first sentence of its document; empty where no documents are marked.
    """

    file: str
    first_line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]
    document: str = ""


@dataclass(frozen=True)
class _Block:
    """The rows of a sentence: file, number of the line and cells; and its document's number."""

    rows: list[tuple[str, int, list[str]]]
    document: int


def read_sentences(source: LabelledSource) -> Iterator[Sentence]:
    """Reads the sentences of all files of a source.

    Documents count as marked if there are two of them at least.

    Args:
        source: Of the kind ``conll``; its field is the column of the tags, from 1.

    Raises:
        DataError: A line has too many or too few columns (with file and line), or there is
            no such column.
    """
    column = _column(source)
    files = [list(_blocks(list(lines))) for lines in source_lines(source)]
    marked = sum(len({block.document for block in blocks}) for blocks in files) > len(files)
    for blocks in files:
        begins: dict[int, str] = {}
        for block in blocks:
            sentence = _sentence(block.rows, column)
            if marked:
                begin = begins.setdefault(block.document, " ".join(sentence.words))
                sentence = replace(sentence, document=begin)
            yield sentence


def _sentence(rows: list[tuple[str, int, list[str]]], column: int | None) -> Sentence:
    file, first, cells = rows[0]
    for _, number, row in rows:
        if column is not None and column > len(row):
            raise DataError(
                f"{file} line {number} has {len(row)} columns, so there is no column "
                f"{column}: name the tags' column as #COLUMN, or leave it out for the last"
            )
    if len(cells) < 2:
        raise DataError(f"{file} line {first} has a word without a tag: {cells[0]!r}")
    location = -1 if column is None else column - 1
    words = tuple(row[0] for _, _, row in rows)
    return Sentence(file, first, words, tuple(row[location] for _, _, row in rows))


def read_words(lines: Iterator[Line]) -> Iterator[Sentence]:
    """Reads the words alone; whatever else the lines hold is left out."""
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
    """Parts lines at empty ones, and each into its columns, which must be equally many."""
    tabs = any("\t" in line for _, _, line in lines)
    rows: list[tuple[str, int, list[str]]] = []
    width = document = 0
    for file, number, line in lines:
        cells = line.split("\t") if tabs else [cell for cell in line.split(" ") if cell]
        begins = line.startswith("-DOCSTART-")
        if begins or not any(cell.strip() for cell in cells):
            if rows:
                yield _Block(rows, document)
            rows = []
            document += begins
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise DataError(
                f"{file} line {number} has {len(cells)} columns where the first has {width}: "
                f"give every word as many, separated by {'tabs' if tabs else 'blanks'}"
            )
        rows.append((file, number, cells))
    if rows:
        yield _Block(rows, document)
