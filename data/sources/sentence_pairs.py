"""Reads sentence pairs from files and published data sets: one target per source, in order."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..common.errors import DataError
from ..common.files import File, file_lines
from ..common.hashing import digest
from ..filters.conditions import LeftOut, left_out_notes, written
from .hash_split import Split
from .labelled_names import LabelledSource, Record
from .labelled_records import read_fields
from .published.records import PublishedRecords
from .tables import SENTENCE_PAIRS, header_notes


class SentencePair(NamedTuple):
    """A sentence, its translation, and the location of the pair (``file:line``) for messages."""

    source: str
    target: str
    location: str


@dataclass(frozen=True)
class PairSource(ABC):
    """The pairs of one source, which are read again on each iteration.

    Attributes:
      name: The name of the source, for messages.
    """

    name: str

    @abstractmethod
    def __iter__(self) -> Iterator[SentencePair]:
        """Reads the pairs."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def has_validation(self) -> bool:
        """Whether the source has a published validation split."""
        return False

    def of_split(self, split: Split) -> "PairSource":
        """Returns the pairs of a published split, or the whole source if it has no splits."""
        return self

    def notes(self) -> tuple[str, ...]:
        """Returns lines for the log that describe how the source was read."""
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all pairs in their order."""
        return digest(text for pair in self for text in (pair.source, pair.target))


@dataclass(frozen=True)
class FilePairs(PairSource):
    """Two files with the same number of lines; line n of one translates line n of the other.

    Attributes:
      source: The file that contains the sources.
      target: The file that contains the targets.
    """

    source: File
    target: File

    def __iter__(self) -> Iterator[SentencePair]:
        lines = itertools.zip_longest(file_lines(self.source), file_lines(self.target))
        for number, (source, target) in enumerate(lines, 1):
            if source is None or target is None:
                # Count the remaining lines of the longer file, because the message needs them.
                total = number + sum(1 for _ in lines)
                files = (self.source, self.target) if target is None else (self.target, self.source)
                raise DataError(
                    f"{files[0]} has {total:,} lines, {files[1]} has {number - 1:,}: line n of one "
                    "must translate line n of the other"
                )
            location = f"line {number} of {self.source} and {self.target}"
            yield SentencePair(source[2], target[2], location)


@dataclass(frozen=True)
class FieldPairs(PairSource):
    """Files whose lines or records each contain both sentences of a pair.

    Attributes:
      fields: A source of the kind ``tsv``, ``csv``, ``jsonl`` or ``memory``, with two fields.
    """

    fields: LabelledSource

    def __iter__(self) -> Iterator[SentencePair]:
        for record in read_fields(self.fields, SENTENCE_PAIRS):
            yield _pair(record, self.fields)

    def notes(self) -> tuple[str, ...]:
        """See ``PairSource``; the lines report recognized headers and filtered pairs."""
        notes = header_notes(self.fields, SENTENCE_PAIRS)
        # The pairs are read lazily, so count the filtered pairs in a separate pass.
        left_out = LeftOut()
        if self.fields.conditions:
            for _ in read_fields(self.fields, SENTENCE_PAIRS, left_out):
                pass
        return (*notes, *left_out_notes(left_out, "pair"))


@dataclass(frozen=True)
class PublishedPairs(PairSource):
    """One split of a published dataset.

    Attributes:
      records: The dataset, with two fields.
      split: ``train`` or ``validation``.
    """

    records: PublishedRecords
    split: Split

    def __iter__(self) -> Iterator[SentencePair]:
        for record in self.records.read(self.split):
            yield _pair(record, self.records.source)

    @property
    def has_validation(self) -> bool:
        """See ``PairSource``."""
        return self.records.validation is not None

    def of_split(self, split: Split) -> PairSource:
        """See ``PairSource``."""
        self.records.split_name(split)
        return replace(self, split=split)

    def __len__(self) -> int:
        # Without a filter, the published number of examples is exact.
        filtered = self.records.source.conditions
        return sum(1 for _ in self) if filtered else int(str(self._identity[-1]))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the split's published metadata; the pairs themselves are not read."""
        # The name, the fields, the filter and the size identify the content of a published version.
        *name, size, number = self._identity
        metadata = (*name, self.records.source.fields)
        if self.records.source.conditions:
            metadata = (*metadata, written(self.records.source.conditions))
        return digest(map(str, (*metadata, number, size)))

    @property
    def _identity(self) -> tuple[object, ...]:
        return self.records.identity(self.split)


def _pair(record: Record, source: LabelledSource) -> SentencePair:
    for field, text in zip(source.fields, record.values, strict=True):
        if not isinstance(text, str):
            raise DataError(
                f"{record.location} field {field!r} must be a text, got a {type(text).__name__}: "
                "name the fields of the two texts after a #"
            )
    source_text, target_text = record.values
    return SentencePair(source_text, target_text, record.location)
