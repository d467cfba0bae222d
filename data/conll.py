"""Sentences in columns, as the shared tasks of CoNLL have them.

A word per line, in its first column; its tag in the last, or in the one that the source
names; an empty line ends a sentence, a line ``-DOCSTART-`` a document. Columns are parted
by tabs, or by blanks in a file without tabs (Tjong Kim Sang & De Meulder 2003).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .errors import DataError
from .labelled import LabelledSource, Line, source_lines


@dataclass(frozen=True)
class Sentence:
    """The words of a sentence, which stand on lines one after the other.

    Attributes:
        file: Where it stands.
        first_line: The line of its first word, from 1.
        words: Its words.
        tags: A tag for each.
    """

    file: str
    first_line: int
    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_sentences(source: LabelledSource) -> Iterator[Sentence]:
    """Reads the sentences of all files of a source.

    Args:
        source: Of the kind ``conll``; its field is the column of the tags, from 1.

    Raises:
        DataError: A line has too many or too few columns (with file and line), or there is
            no such column.
    """
    column = _column(source)
    for lines in source_lines(source):
        for rows in _blocks(lines):
            file, first, cells = rows[0]
            for _, number, row in rows:
                if column is not None and column > len(row):
                    raise DataError(
                        f"{file} line {number} has {len(row)} columns, so there is no column "
                        f"{column}: name the tags' column as #COLUMN, or leave it out for the last"
                    )
            if len(cells) < 2:
                raise DataError(f"{file} line {first} has a word without a tag: {cells[0]!r}")
            place = -1 if column is None else column - 1
            words = tuple(row[0] for _, _, row in rows)
            yield Sentence(file, first, words, tuple(row[place] for _, _, row in rows))


def read_words(lines: Iterator[Line]) -> Iterator[Sentence]:
    """Reads the words alone; whatever else the lines hold is left out."""
    for rows in _blocks(lines):
        file, first, _ = rows[0]
        yield Sentence(file, first, tuple(row[0] for _, _, row in rows), ())


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


def _blocks(lines: Iterator[Line]) -> Iterator[list[tuple[str, int, list[str]]]]:
    """Parts lines at empty ones, and each into its columns, which must be equally many."""
    block: list[tuple[str, int, list[str]]] = []
    width = 0
    for file, number, line in lines:
        cells = line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]
        if line.startswith("-DOCSTART-") or not any(cell.strip() for cell in cells):
            if block:
                yield block
            block = []
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise DataError(
                f"{file} line {number} has {len(cells)} columns where the first has {width}: "
                "give every word as many, parted by tabs or blanks"
            )
        block.append((file, number, cells))
    if block:
        yield block
