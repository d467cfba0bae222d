"""Pairs of sentences as they stand in files and published data sets, in order and one to one.

Lines end at a line feed only; a carriage return before it is dropped. No line is ever left
out here, so nothing shifts the two sides against each other.
"""

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .documents import Split
from .errors import DataError
from .labelled_data import digest
from .labelled_sources import STANDARD_INPUT, LabelledSource, Record, read_fields, source_lines
from .published_records import PublishedRecords
from .sources import raw_lines


class Pair(NamedTuple):
    """A sentence, its translation, and where the two stand, for messages."""

    source: str
    target: str
    place: str


@dataclass(frozen=True)
class Part(ABC):
    """The pairs of one source, read anew each time.

    Attributes:
        name: Of the source, for messages.
    """

    name: str

    @abstractmethod
    def __iter__(self) -> Iterator[Pair]:
        """Reads the pairs."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal pairs in equal order."""
        return digest(text for pair in self for text in (pair.source, pair.target))


@dataclass(frozen=True)
class FilePairs(Part):
    """Two files whose lines translate each other.

    Attributes:
        source: The file of the sources.
        target: The file of the targets.
    """

    source: Path
    target: Path

    def __iter__(self) -> Iterator[Pair]:
        sources, targets = text_lines(self.source), text_lines(self.target)
        number = 0
        for number, (source, target) in enumerate(itertools.zip_longest(sources, targets), 1):
            if source is None or target is None:
                more = 1 + sum(1 for _ in (targets if source is None else sources))
                raise self._of_different_lengths(number - 1, more, source is None)
            yield Pair(source, target, f"line {number} of {self.source} and {self.target}")

    def _of_different_lengths(self, both: int, more: int, source_is_shorter: bool) -> DataError:
        shorter, longer = self.source, self.target
        if not source_is_shorter:
            shorter, longer = longer, shorter
        return DataError(
            f"{longer} has {both + more:,} lines, {shorter} has {both:,}: its line {both + 1:,} "
            "is missing; line n of one must translate line n of the other"
        )


@dataclass(frozen=True)
class FieldPairs(Part):
    """Files each of whose lines has both sides.

    Attributes:
        fields: The source, of the kind ``tsv`` or ``jsonl``, with two fields.
    """

    fields: LabelledSource

    def __iter__(self) -> Iterator[Pair]:
        if self.fields.kind == "tsv" and not self.fields.named:
            self._check_customary()
        for record in read_fields(self.fields):
            yield _pair(record, self.fields)

    def _check_customary(self) -> None:
        """Columns that nobody named are taken only where there can be no others."""
        for file, number, line in itertools.islice(next(source_lines(self.fields)), 1):
            if (columns := line.count("\t") + 1) != 2:
                raise DataError(
                    f"{file} line {number} has {columns} columns: name the source's and the "
                    "target's after a #, as #1,2 or by the names in the first line"
                )


@dataclass(frozen=True)
class PublishedPairs(Part):
    """One split of a published data set.

    Attributes:
        records: The data set, with two fields.
        split: ``train`` or ``validation``.
    """

    records: PublishedRecords
    split: Split

    def __iter__(self) -> Iterator[Pair]:
        for record in self.records.read(self.split):
            yield _pair(record, self.records.source)

    def __len__(self) -> int:
        return self._info.num_examples

    @cached_property
    def fingerprint(self) -> str:
        """What is known of a published split without reading it."""
        builder, info = self.records.builder, self._info
        facts = (builder.info.full_name, info.name, self.records.source.fields)
        return digest(map(str, (*facts, info.num_examples, info.num_bytes)))

    @property
    def _info(self) -> Any:
        name = "train" if self.split == "train" else self.records.validation
        return self.records.builder.info.splits[name]


def _pair(record: Record, source: LabelledSource) -> Pair:
    for field, text in zip(source.fields, record.values, strict=True):
        if not isinstance(text, str):
            raise DataError(
                f"{record.place} has a {type(text).__name__} in the field {field!r}, where a text "
                "should be: name the fields of the two texts after a #"
            )
    source_text, target_text = record.values
    return Pair(source_text, target_text, record.place)


def text_lines(path: Path) -> Iterator[str]:
    """Reads the lines of a file, which may be packed by gzip, without their ends.

    Raises:
        DataError: It cannot be read, or is not UTF-8 (with the line).
    """
    return _decoded((raw for _, raw in raw_lines(path)), str(path))


def read_lines(path: str) -> list[str]:
    """Reads lines to translate; an empty line is an empty text, so none is lost.

    Args:
        path: A file, or ``-`` for standard input.

    Raises:
        DataError: The file is missing, a folder, not whole or not UTF-8 (with the line).
    """
    if path == STANDARD_INPUT:
        return list(_decoded(sys.stdin.buffer, "standard input"))
    return list(text_lines(existing_file(Path(path).expanduser())))


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    for number, raw in enumerate(lines, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} line {number} is not UTF-8: byte 0x{raw[error.start]:02x} at its byte "
                f"{error.start + 1}; convert the file to UTF-8, or mend the line"
            ) from None
        line = line.removeprefix("\ufeff") if number == 1 else line
        yield line.removesuffix("\n").removesuffix("\r")


def existing_file(path: Path, of: str = "") -> Path:
    """Checks that a file is there.

    Args:
        path: Of the file.
        of: What names it, for the message.

    Raises:
        DataError: It is not, or is a folder.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder{of}: name a file in it")
    if not path.exists():
        raise DataError(f"no such file: {path}{of}, in folder {Path.cwd()}: check the path")
    return path
