r"""Opens sources of sentence pairs; ``source_names`` defines the syntax of their names.

=============================  ======================================================
``pairs:SRC,TGT``              two files; line n of one file translates line n of the other
``tsv:GLOB#1,2``               columns separated by tabs, first the source column; selected by
                               number from 1, or by name if the files begin with a line of names;
                               ``csv:`` likewise, see ``tables``
``jsonl:GLOB#en,de``           JSON lines, fields selected by name; ``parquet:`` and ``arrow:``
                               likewise
``tfds:NAME/CONFIG#en,de``     a published TensorFlow Dataset, fields selected by name; by default
                               the dataset's languages in their published order
``hf:NAME/CONFIG#en,de``       a data set of the Hugging Face hub, or a saved one
``builtin:numbers-en-fr``      see ``spelled_numbers``
``SOURCE + SOURCE``            several sources, concatenated (built-in sources are not allowed)
=============================  ======================================================

To translate in the other direction, swap the two names. Files ending in ``.gz`` are decompressed
while they are read; ``common.files`` defines the end of a line. With ``pairs:``, no line is
skipped, so that the two files stay aligned. If a file has both sentences of a pair on one line,
empty lines are skipped.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..common.errors import DataError, counted
from ..common.fields import require
from ..common.files import matching_files
from ..common.hashing import digest
from .builtin.spelled_numbers import NumberWords
from .documents import SourceLike, as_source
from .hash_split import HashSplit, Split, text_digest
from .in_memory import KIND, Examples
from .labelled_names import PUBLISHED, LabelledSource, forms_of_rows, parse_labelled
from .published.opening import open_published
from .published.records import PublishedRecords
from .sentence_pairs import FieldPairs, FilePairs, PairSource, PublishedPairs, SentencePair
from .source_names import check_kind

FORMS = {
    "pairs": "pairs:SRC,TGT",
    "tsv": "tsv:GLOB#1,2",
    "csv": "csv:GLOB#1,2",
    "jsonl": "jsonl:GLOB#en,de",
    "parquet": "parquet:GLOB#en,de",
    "arrow": "arrow:GLOB#en,de",
    "tfds": "tfds:NAME/CONFIG#en,de",
    "hf": "hf:NAME/CONFIG#en,de",
    "builtin": "builtin:numbers-en-fr",
}
# The kinds of sources that have named fields, with their default fields.
_FIELDS = {
    **forms_of_rows("source,target"),
    **dict.fromkeys(("tsv", "csv"), "1,2"),
    **dict.fromkeys(PUBLISHED, ""),
    KIND: "source,target",
}
_JOIN = re.compile(rf"\s\+\s+(?=(?:{'|'.join(FORMS)}):)")

Which = Split | Literal["whole"]
"""A split, or the whole source. For a published source, ``whole`` means its validation split."""


@dataclass(frozen=True)
class SplitView(PairSource):
    """The pairs of one split of a source; the hash of the source text determines the split.

    Attributes:
      source: The source.
      division: The rule that divides the pairs into splits.
      split: The split.
    """

    source: PairSource
    division: HashSplit
    split: Split

    def __iter__(self) -> Iterator[SentencePair]:
        for pair in self.source:
            if self.division.split(text_digest(pair.source)) == self.split:
                yield pair

    def notes(self) -> tuple[str, ...]:
        """See ``PairSource``; only the training split has notes."""
        return self.source.notes() if self.split == "train" else ()


@dataclass(frozen=True)
class ParallelText:
    """The pairs of a split as they are read, including pairs with an empty source or target.

    Attributes:
      parts: The pairs of each source, in order.
    """

    parts: tuple[PairSource, ...]

    def __iter__(self) -> Iterator[SentencePair]:
        return itertools.chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def name(self) -> str:
        """The names of the sources."""
        return " + ".join(part.name for part in self.parts)

    def notes(self) -> tuple[str, ...]:
        """Returns lines for the log that describe how the sources were read."""
        return tuple(note for part in self.parts for note in part.notes())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all pairs in their order."""
        return digest(part.fingerprint for part in self.parts)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """All source texts, which are read into memory on first access."""
        return tuple(pair.source for pair in self)

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """All target texts; the n-th target text translates the n-th source text."""
        return tuple(pair.target for pair in self)


def open_parallel(
    source: SourceLike, which: Which, *, validation_fraction: float = 0.0, like: str | None = None
) -> ParallelText:
    """Opens a source of sentence pairs.

    Args:
      source: A source name, several names joined by ``+`` (built-in sources cannot be joined), or
        the pairs themselves.
      which: A split, or the whole source. Local sources, and published sources without a validation
        split, are divided together by the hash of each source text. The endless source of spelled
        numbers has one fixed sample for training a vocabulary, and another for validation.
      validation_fraction: The fraction of the divided pairs that is used for validation, in [0, 1).
      like: The name of the run's source. If ``source`` specifies no fields, it gets the fields of
        the first source in ``like`` that has the same kind.

    Raises:
      DataError: The kind or a field is unknown, a file is missing, or validation data are
        missing. Errors inside files are raised when the pairs are read.
    """
    name = as_source(source)
    # An endless source cannot be read completely, so return one of its fixed samples.
    if (numbers := NumberWords.parse(name)) is not None:
        return ParallelText((numbers.vocabulary if which == "train" else numbers.validation,))
    parts = [name] if isinstance(name, Examples) else _JOIN.split(name)
    # Opening only checks the names and the files; the pairs are read later.
    opened = [_open(part, like) for part in parts]
    if which == "whole":
        return ParallelText(tuple(part.of_split("validation") for part in opened))
    # Divide only the sources that have no published validation split.
    divided = [part for part in opened if not part.has_validation]
    require(
        which == "train" or validation_fraction or not divided,
        f"{name!r} has no validation split: set validation_fraction above 0, or name a source to "
        "validate on",
        DataError,
    )
    if not divided or not validation_fraction:
        return ParallelText(tuple(part.of_split(which) for part in opened))
    # All divided sources share one limit. Equal source texts have equal digests, so all
    # translations of a sentence are in the same split.
    digests = {text_digest(pair.source) for part in divided for pair in part}
    division = HashSplit.of(digests, validation_fraction, name)
    shares = (
        part.of_split(which) if part.has_validation else SplitView(part.name, part, division, which)
        for part in opened
    )
    return ParallelText(tuple(shares))


def _open(name: str, like: str | None) -> PairSource:
    if name.startswith(f"{KIND}:"):
        return FieldPairs(name, _with_two_fields(parse_labelled(name, _FIELDS, _like(KIND, like))))
    name = name.strip()
    kind = check_kind(name, FORMS)
    problem = f"{name!r} is endless and cannot be joined with another source: give it alone"
    require(kind != "builtin", problem, DataError)
    if kind == "pairs":
        return _open_files(name)
    source = parse_labelled(name, _FIELDS, _like(kind, like))
    if kind in PUBLISHED:
        return PublishedPairs(name, _open_published(source), "train")
    return FieldPairs(name, _with_two_fields(source))


def _like(kind: str, like: str | None) -> LabelledSource | None:
    """Returns the first source of the given kind among the joined sources of a name."""
    # If a validation source names no fields, the fields of the training source are used.
    for part in map(str.strip, _JOIN.split(like or "")):
        if part.startswith(f"{kind}:"):
            return parse_labelled(part, _FIELDS)
    return None


def _open_files(name: str) -> FilePairs:
    patterns = name.partition(":")[2].split(",")
    problem = f"source {name!r} must name two files: write {FORMS['pairs']}"
    require(len(patterns) == 2 and all(patterns), problem, DataError)
    files = [file for pattern in patterns for file in matching_files(pattern, name)]
    # Require one file per language: the lines of several matching files would not be aligned.
    require(len(files) == 2, problem, DataError)
    return FilePairs(name, *files)


def _open_published(source: LabelledSource) -> PublishedRecords:
    if not source.fields:
        # By default, use the input and output fields that the data set declares.
        source = replace(source, fields=open_published(source, {}).pair_fields())
    return open_published(_with_two_fields(source), {})


def _with_two_fields(source: LabelledSource) -> LabelledSource:
    seen = counted(len(source.fields), "field")
    problem = f"{source.name!r} names {seen}: name the fields of the source and the target"
    require(len(source.fields) == 2, f"{problem} after a #, as #1,2 or #en,de", DataError)
    return source
