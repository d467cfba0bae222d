r"""Parses the names of sources of labeled examples; ``source_names`` defines their syntax.

=============================  ======================================================
``tsv:GLOB#LABEL,TEXT``        columns separated by tabs, selected by number from 1 or by name, see
                               ``tables``
``csv:GLOB#LABEL,TEXT``        comma-separated values, likewise
``jsonl:GLOB#label,text``      JSON lines, fields selected by name
``parquet:GLOB#label,text``    Parquet files, likewise; ``arrow:GLOB`` Arrow files
``conll:GLOB#COLUMN``          a word and its tag per line, see ``conll``
``squad:GLOB``                 questions about passages, see ``squad``
``beir:FOLDER``                queries and their documents, see ``retrieval``
``tfds:NAME/CONFIG#fields``    a published TensorFlow Dataset, fields selected by name
``hf:NAME/CONFIG#fields``      a data set of the Hugging Face hub or a saved one, likewise
``builtin:reviews``            reviews made from templates, see ``builtin.reviews``
``corpora:A=SOURCE | B=SOURCE``  the documents of several sources, labeled A, B …
=============================  ======================================================

Each kind of data defines which of these names it accepts and which fields it uses. Fields joined by
``+`` are combined into one list. ``#label,text?score>=3`` reads only the records that satisfy a
condition, see ``conditions``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..common.errors import DataError
from ..common.fields import require
from ..filters.conditions import Condition, split_conditions
from .in_memory import KIND, fields_of
from .source_names import (
    FILE_KINDS,
    Source,
    check_kind,
    has_weights,
    parse_name,
    parse_sources,
)

FORMS = {
    "tsv": "tsv:GLOB#LABEL,TEXT",
    "csv": "csv:GLOB#LABEL,TEXT",
    "jsonl": "jsonl:GLOB#fields",
    "parquet": "parquet:GLOB#fields",
    "arrow": "arrow:GLOB#fields",
    "conll": "conll:GLOB#COLUMN",
    "squad": "squad:GLOB",
    "beir": "beir:FOLDER",
    "tfds": "tfds:NAME/CONFIG#fields",
    "hf": "hf:NAME/CONFIG#fields",
    "builtin": "builtin:reviews",
    "corpora": "corpora:LABEL=SOURCE | LABEL=SOURCE",
}
PUBLISHED = ("tfds", "hf")
"""The kinds of source whose data sets may be published with splits."""
_NEXT_CORPUS = re.compile(r"\s\|\s+(?=[\w-]+=\w+:)")


def forms_of_rows(fields: str) -> dict[str, str]:
    """Returns the kinds of source whose rows have named fields, each with its default fields."""
    return dict.fromkeys(("jsonl", *FILE_KINDS, *PUBLISHED), fields)


@dataclass(frozen=True)
class LabelledSource:
    """A parsed source name.

    Attributes:
      name: The name as the user wrote it.
      kind: The kind, a key of ``FORMS``, or ``memory``.
      location: The glob, or the ``name/config`` of a TensorFlow Dataset.
      fields: The names or numbers of the fields to read.
      named: Whether the user named the fields. If False, they are the default fields.
      conditions: The conditions that a record must satisfy to be read.
    """

    name: str
    kind: str
    location: str
    fields: tuple[str, ...]
    named: bool = True
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Record:
    """One labeled record as it was read from its source.

    Attributes:
      location: The file and line, for messages, such as ``train.tsv line 7``.
      values: One value for each field of the source, in order.
      first: Whether the record is the first line of a table, which might be a header.
      part: The part of the source that the record belongs to, if the source has named parts.
    """

    location: str
    values: tuple[Any, ...]
    first: bool = False
    part: str | None = None


def parse_labelled(
    name: str, forms: Mapping[str, str], like: LabelledSource | None = None
) -> LabelledSource:
    """Parses a source name, without access to files or the network.

    Args:
      name: A name such as ``tsv:cola.train.tsv#2,4``; or examples in memory.
      forms: The kinds that can be read, with the default fields of each.
      like: Another source of the same run. If it has the same kind and ``name`` specifies no
        fields, the fields of ``like`` are read. If ``like`` is a published data set, this applies
        only to the same data set.

    Raises:
      DataError: The kind is not in ``forms``, or nothing follows it.
    """
    if name.startswith(f"{KIND}:"):
        fields = fields_of(name, ",".join(_with_usual_fields(KIND, forms, like).fields))
        location = name.partition(":")[2]
        conditions = split_conditions(location, name)[1]
        return LabelledSource(name, KIND, location, fields, conditions=conditions)
    shown = {kind: FORMS[kind] for kind in forms if kind != KIND}
    # Only sources of documents can have weights, or be joined with a plus sign.
    _, _, kind = name.partition(":")[0].rpartition("*")
    joined = re.search(rf"\s\+\s+(?:{'|'.join(forms)}):", name) is not None
    remedy = (
        f"name one source, or several files by a glob, as {kind}:FOLDER/*, or, to train vectors, "
        "several data sets as sets:A=SOURCE | B=SOURCE"
    )
    problem = f"labeled sources cannot be joined or mixed, got {name!r}: {remedy}"
    is_allowed = kind == "corpora" or not (joined or has_weights(name))
    require(is_allowed, problem, DataError)
    kind = check_kind(name, shown)
    _, location, part, conditions = parse_name(name, shown)
    if kind == "corpora":
        parse_corpora(location, name)
    # If no fields are named, use the fields of the run's source, or else the default of the kind.
    if not part:
        usual = _with_usual_fields(kind, forms, like)
        named = usual.named and (kind not in PUBLISHED or usual.location == location)
        return LabelledSource(name, kind, location, usual.fields, named, conditions)
    fields = tuple(part.split(","))
    problem = f"source {name!r} has an empty field after the #: write {FORMS[kind]}"
    require(all(fields), problem, DataError)
    return LabelledSource(name, kind, location, fields, True, conditions)


def _with_usual_fields(
    kind: str, forms: Mapping[str, str], like: LabelledSource | None
) -> LabelledSource:
    """Returns ``like`` if it has this kind, or else a source with the default fields."""
    if like is not None and like.kind == kind:
        return like
    fields = tuple(filter(None, forms[kind].split(",")))
    return LabelledSource("", kind, "", fields, named=False)


def parse_corpora(rest: str, name: str) -> list[tuple[str, tuple[Source, ...]]]:
    """Parses labeled sources of documents such as ``good=text:a/*.txt | crawl=jsonl:b.jsonl``.

    Args:
      rest: The labels and sources.
      name: The whole name, for messages.

    Returns:
      At least two labels, each with its sources.

    Raises:
      DataError: There are fewer than two labels, or a source does not contain documents.
    """
    problem = f"source {name!r} needs at least two labels: write {FORMS['corpora']}"
    return [(label, parse_sources(source)) for label, source in named_parts(rest, problem)]


def named_parts(rest: str, problem: str) -> list[tuple[str, str]]:
    """Splits a list of named sources such as ``good=text:a/*.txt | crawl=jsonl:b.jsonl``.

    Raises:
      DataError: There are fewer than two entries, or an entry lacks its name or its source. The
        message begins with ``problem``.
    """
    parts = [part.partition("=")[::2] for part in _NEXT_CORPUS.split(rest)]
    named = [(name.strip(), source.strip()) for name, source in parts]
    require(len(named) > 1 and all(map(all, named)), problem, DataError)
    return named


def with_known_fields(source: LabelledSource, known: Mapping[str, str]) -> LabelledSource:
    """Sets the fields of a well-known published data set, unless the user named fields."""
    if source.kind not in PUBLISHED or source.named:
        return source
    # Look up the data set with its configuration first, and then without. Ignore the version.
    name, _, _ = source.location.partition(":")
    # On the hub, a name may begin with an owner, as in nyu-mll/glue/sst2; the columns are the same.
    names = (name, name.split("/")[0], name.partition("/")[2].partition("[")[0])
    fields = next((known[name] for name in names if name in known), None)
    return replace(source, fields=tuple(fields.split(","))) if fields else source
