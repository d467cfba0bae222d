"""Records of any form: the objects of JSON lines, of a published data set, or in memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..common.errors import DataError
from ..common.files import file_lines, matching_files
from ..common.json_lines import parse_line
from ..filters.conditions import LeftOut, keeps, split_conditions
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import Split
from ..sources.in_memory import Examples, plain
from ..sources.load_documents import load_documents
from ..sources.source_names import Source, parse_sources
from .calculations import NAME as CALCULATIONS
from .calculations import calculations
from .instructions import KIND as INSTRUCTIONS
from .instructions import read_instructions

Row = Mapping[str, Any]


def read_rows(
    source: SourceLike, split: Split = "train", left_out: LeftOut | None = None
) -> Iterator[tuple[str, Row]]:
    """Yields each record of a source with its location, for messages.

    Args:
      source: ``jsonl:GLOB``, the name of a file of JSON lines, ``tfds:NAME``, or a list of dicts;
        several of them joined by `` + ``; after ``#?`` conditions on fields. The documents of
        other sources are records with the field ``text``. ``instructions:FILE.toml`` makes
        conversations of labeled data, see ``instructions``; ``builtin:calculations`` has
        conversations with a tool.
      split: The split, for sources that have splits.
      left_out: Counts the records that do not satisfy the conditions.

    Raises:
      DataError: A source is unknown, unreadable or empty, or a record is not an object.
    """
    name, left_out = as_source(source), LeftOut() if left_out is None else left_out
    if isinstance(name, Examples):
        conditions = split_conditions(name.partition(":")[2], name)[1]
        for i, row in enumerate(name.rows):
            location = f"examples[{i}]"
            row = {"text": row} if isinstance(row, str) else row
            if keeps(conditions, checked(row, location), location, left_out):
                yield location, checked(row, location)
        return
    # A plain file name means JSON lines.
    if ":" not in name and name.removesuffix(".gz").endswith((".jsonl", ".json")):
        name = f"jsonl:{name}"
    if name == CALCULATIONS:
        yield from calculations()
        return
    kind, _, rest = name.partition(":")
    if kind == INSTRUCTIONS:
        yield from read_instructions(rest, split)
        return
    found = False
    for part in parse_sources(name):
        for location, row in _read(part, split, left_out):
            found = True
            yield location, row
    if not found:
        raise DataError(f"no records in {name!r}: it is empty, or its conditions keep none")


def _read(source: Source, split: Split, left_out: LeftOut) -> Iterator[tuple[str, Row]]:
    if source.kind == "jsonl":
        for path in matching_files(source.location, source.name):
            for file, number, line in file_lines(path):
                if line.strip():
                    location = f"{file} line {number}"
                    row = checked(parse_line(line, location), location)
                    if keeps(source.conditions, row, location, left_out):
                        yield location, row
    elif source.kind == "tfds":
        yield from _read_published(source, split, left_out)
    else:
        # All other sources have documents, which become records.
        for number, text in enumerate(load_documents(source.name, "train", validation_fraction=0)):
            yield f"{source.name} document {number + 1}", {"text": text}


def _read_published(source: Source, split: Split, left_out: LeftOut) -> Iterator[tuple[str, Row]]:
    from ..sources.tfds_documents import download, open_builder, open_split

    builder = open_builder(source)
    if not builder.is_prepared():
        download(builder, source)
    has = list(builder.info.splits)
    # Published data sets name their validation split differently.
    wanted = "train" if split == "train" else next((s for s in _VALIDATION if s in has), None)
    if wanted not in has:
        raise DataError(f"{source.name!r} has no {split} split: it has {', '.join(has)}")
    for number, row in enumerate(open_split(builder, wanted, source.name), start=1):
        location = f"{source.name} {wanted} example {number}"
        fields = checked(plain(row), location)
        if keeps(source.conditions, fields, location, left_out):
            yield location, fields


_VALIDATION = ("validation", "dev", "test")


def checked(row: object, location: str) -> Row:
    """Returns a record; raises DataError if it is not an object."""
    if not isinstance(row, Mapping):
        raise DataError(
            f"{location} is a {type(row).__name__}, no object of fields: write "
            '{"prompt": "…", "completion": "…"}'
        )
    return row
