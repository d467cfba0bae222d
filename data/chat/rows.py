"""Reads records of any form from JSON lines, published data sets or memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..common.errors import DataError
from ..common.fields import require
from ..common.files import matching_lines
from ..common.json_lines import parse_lines
from ..filters.conditions import Condition, LeftOut, keeps, split_conditions
from ..sources.documents import SourceLike, as_source
from ..sources.hash_split import Split
from ..sources.in_memory import Examples, plain
from ..sources.labelled_names import PUBLISHED, LabelledSource
from ..sources.load_documents import load_documents
from ..sources.published.opening import open_published
from ..sources.read_documents import rows_of
from ..sources.source_names import FILE_KINDS, Source, parse_sources
from .calculations import NAME as CALCULATIONS
from .calculations import calculations
from .instructions import KIND as INSTRUCTIONS
from .instructions import read_instructions

Row = Mapping[str, Any]
Rows = Iterable[tuple[str, Any]]
"""Pairs of the location of a record and the record."""


def read_rows(
    source: SourceLike, split: Split = "train", left_out: LeftOut | None = None
) -> Iterator[tuple[str, Row]]:
    """Yields each record of a source and its location, for error messages.

    Args:
      source: ``jsonl:GLOB``, the name of a file of JSON lines, ``parquet:GLOB``, ``arrow:GLOB``,
        ``tfds:NAME``, ``hf:NAME``, or a list of dicts; `` + `` joins several sources, and
        conditions on fields follow ``#?``. Each document of any other source becomes a record with
        the field ``text``. ``instructions:FILE.toml`` makes conversations from labeled data; see
        ``instructions``. ``builtin:calculations`` provides conversations with a tool.
      split: The split, for sources that have splits.
      left_out: Counter of the records that do not satisfy the conditions.

    Raises:
      DataError: A source is unknown, unreadable or empty, or a record is not an object.
    """
    # A source without records is probably a mistake.
    name, empty = as_source(source), True
    for conditions, rows in _parts(name, split):
        for location, row in rows:
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{location} must be an object of fields, as "
                    f'{{"prompt": "…", "completion": "…"}}, got a {type(row).__name__}'
                )
            if keeps(conditions, row, location, left_out):
                empty = False
                yield location, row
    problem = f"no records in {name!r}: it is empty, or no record fits its conditions"
    require(not empty, problem, error=DataError)


def _parts(name: str, split: Split) -> Iterator[tuple[tuple[Condition, ...], Rows]]:
    """Yields the conditions and the records of each joined source."""
    kind, _, rest = name.partition(":")
    if isinstance(name, Examples):
        located = (
            (f"examples[{i}]", row if isinstance(row, Mapping) else {"text": row})
            for i, row in enumerate(name.rows)
        )
        yield split_conditions(rest, name)[1], located
    elif name == CALCULATIONS:
        yield (), calculations()
    elif kind == INSTRUCTIONS:
        yield (), read_instructions(rest, split)
    else:
        # A file name without a prefix names a file of JSON lines.
        is_file = not rest and name.removesuffix(".gz").endswith((".jsonl", ".json"))
        for source in parse_sources(f"jsonl:{name}" if is_file else name):
            yield source.conditions, _read(source, split)


def _read(source: Source, split: Split) -> Rows:
    if source.kind in PUBLISHED:
        named = LabelledSource(source.name, source.kind, source.location, ())
        return open_published(named, {}).rows(split)
    if source.kind in FILE_KINDS:
        return ((location, plain(row)) for location, _, row in rows_of(source).read(None))
    if source.kind == "jsonl":
        return parse_lines(matching_lines(source.location, source.name))
    # All other sources provide documents, which become records.
    documents = load_documents(source.name, "train", validation_fraction=0)
    return (
        (f"{source.name} document {number}", {"text": text})
        for number, text in enumerate(documents, start=1)
    )
