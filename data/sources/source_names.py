r"""Defines the sources of text and the syntax of their names.

=========================  ==========================================================
``builtin:python-docs``    the English prose that is part of every CPython, in ``pydoc_data``
``builtin:patterns``       examples of small random tasks, see ``patterns``; ``#map,count``
                           selects some kinds of tasks
``builtin:sums``           sums such as ``17+5=22``, see ``builtin.toys``
``builtin:words``          six random words per document, see ``builtin.toys``
``text:GLOB``              plain text; ``#file`` (default), ``#line`` or ``#block`` says
                           what a document is (blocks are separated by blank lines)
``text:GLOB#sentences``    blocks with one sentence on each line, the input format of
                           google-research/bert
``jsonl:GLOB#field``       JSON lines; the string in ``field`` (default ``text``)
``parquet:GLOB#field``     Parquet files; the string in a column (default ``text``)
``arrow:GLOB#field``       Arrow files, likewise
``tfds:name/config#field`` a published TensorFlow Dataset (field default ``text``)
``hf:name/config#field``   a data set of the Hugging Face hub, or a folder of
                           ``save_to_disk``, see ``columnar.huggingface``
``prepared:FOLDER``        the output of ``flaxzoo prepare``, in place of documents
``…#field?score>=3``       only the records that satisfy a condition on a field, for all kinds of
                           records with fields, see ``conditions``
``0.7*SOURCE + 0.3*SOURCE``  a mixture, see ``split_mixture``
``SOURCE + SOURCE``        several sources, concatenated. Only a ``+`` between spaces and
                           before a kind joins sources: ``text:a + b.txt`` is a file
=========================  ==========================================================

``parse_name`` implements the syntax for all kinds of data. ``read_documents`` reads local sources
only, and ``load_documents`` reads all sources of documents.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

from ..common.errors import DataError
from ..common.fields import require, require_one_of, require_value
from ..common.files import absolute, matching_files
from ..filters.conditions import Condition, split_conditions, written
from .builtin.patterns import Patterns
from .in_memory import KIND, Examples, fields_of

SourceKind = Literal[
    "builtin", "text", "jsonl", "parquet", "arrow", "tfds", "hf", "prepared", "memory"
]

FILE_KINDS = ("parquet", "arrow")
"""The kinds of source whose files store data by column."""

_FORMS: dict[str, str] = {
    "builtin": "builtin:python-docs",
    "text": "text:GLOB",
    "jsonl": "jsonl:GLOB#field",
    "parquet": "parquet:GLOB#field",
    "arrow": "arrow:GLOB#field",
    "tfds": "tfds:name/config#field",
    "hf": "hf:name/config#field",
    "prepared": "prepared:FOLDER",
}
_DEFAULT_PART = {"text": "file", **dict.fromkeys(("jsonl", *FILE_KINDS, "tfds", "hf"), "text")}
_UNITS = ("file", "line", "block", "sentences")
_BUILTINS = ("builtin:python-docs", "builtin:patterns", "builtin:sums", "builtin:words")
_OTHER_KINDS = ("tsv", "csv", "conll", "squad", "pairs", "corpora", "beir", "instructions")
_KINDS = f"(?:{'|'.join([*_FORMS, *_OTHER_KINDS])}):"
_JOIN = re.compile(rf"\s\+\s+(?=(?:{'|'.join(_FORMS)}):)")
_WEIGHT = re.compile(rf"(?P<weight>[-+\w.]+)\s*\*\s*(?P<source>{_KINDS}.*)", re.DOTALL)
_WEIGHTED = re.compile(rf"(?:^|\+)\s*[-+\w.]+\s*\*\s*{_KINDS}")
# The blanks between the terms of a mixture are optional.
_NEXT_TERM = re.compile(rf"\s*\+\s*(?=[-+\w.]+\s*\*\s*{_KINDS})|\s\+\s+(?={_KINDS})")
# The kinds of source whose records have fields, so that a condition can filter them.
_FILTERED = ("tsv", "csv", "jsonl", *FILE_KINDS, "tfds", "hf")
# The kinds of source whose location is everything after the colon, even if it contains a #.
_WITHOUT_PART = ("prepared", "corpora")


class ParsedName(NamedTuple):
    """The parts of a source name ``KIND:LOCATION#PART?CONDITIONS``.

    Attributes:
      kind: The kind of source.
      location: The glob, the folder, or the name of published or built-in data.
      part: The unit, field or fields after the ``#``; empty if there is no ``#``.
      conditions: The conditions that a record must satisfy to be read.
    """

    kind: str
    location: str
    part: str
    conditions: tuple[Condition, ...]


def parse_name(name: str, forms: Mapping[str, str]) -> ParsedName:
    """Parses the name of one source, but not the name of examples in memory.

    Args:
      name: A name such as ``jsonl:books/*.jsonl.gz#body?score>=3``.
      forms: The kinds that can be read, each with an example for messages.

    Raises:
      DataError: The kind is not in ``forms``, nothing follows the kind or the ``#``, or the kind
        has no fields to filter on.
    """
    kind = check_kind(name, forms)
    rest, conditions = name.partition(":")[2], ()
    location, mark, part = rest, "", ""
    if kind not in _WITHOUT_PART:
        rest, conditions = split_conditions(rest, name)
        # The part begins after the last #; any earlier # belongs to the glob.
        location, mark, part = rest.rpartition("#") if "#" in rest else (rest, "", "")
    complete = location and bool(mark) == bool(part)
    require(complete, f"source {name!r} is incomplete: write {forms[kind]}", DataError)
    require(
        not conditions or kind in _FILTERED,
        f"source {name!r} has the filter ?{written(conditions)}, but {kind} sources have no fields "
        "to filter on: leave it out",
        DataError,
    )
    return ParsedName(kind, location, part, conditions)


def check_kind(name: str, forms: Mapping[str, str]) -> str:
    """Returns the kind of a source, which is the part of its name before the first colon.

    Raises:
      DataError: The kind is not in ``forms``. The message lists all forms.
    """
    require_unmixed(name, "this kind of data")
    kind = name.partition(":")[0]
    problem = (
        f"the kind of source {name!r} must be one of {', '.join(forms.values())}, got {kind!r}"
    )
    require(kind in forms, problem, DataError)
    return kind


class Term(NamedTuple):
    """One of the sources of a mixture, with its weight."""

    weight: float
    source: str


def has_weights(name: str) -> bool:
    """Returns whether a name is a mixture, or a single source with a weight."""
    return not name.startswith(f"{KIND}:") and _WEIGHTED.search(name) is not None


def split_mixture(name: str) -> tuple[Term, ...]:
    """Splits a mixture such as ``0.7*text:a/*.txt + 0.3*jsonl:b.jsonl`` into its sources.

    Args:
      name: The name of a source.

    Returns:
      The weights, which need not sum to 1, and the sources. Empty if the source is not a mixture.

    Raises:
      DataError: Only some sources have a weight, a weight is not a positive number, the mixture has
        one source or the same source twice, or it contains another mixture.
    """
    if not has_weights(name):
        return ()
    form = "write a mixture as 0.7*SOURCE + 0.3*SOURCE, without parentheses"
    # Divide the name into terms, and each term into its weight and its source.
    terms: list[Term] = []
    for part in map(str.strip, _NEXT_TERM.split(name)):
        problem = f"{part!r} has no weight, and other sources have one: {form}"
        match = require_value(_WEIGHT.fullmatch(part), problem, DataError)
        terms.append(Term(_weight(match["weight"], name), match["source"].strip()))
    sources = {term.source for term in terms}
    problem = f"the mixture {name!r} must have two sources or more, each once: {form}"
    require(len(sources) == len(terms) > 1, problem, DataError)
    return tuple(terms)


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    problem = f"the weight in {name!r} must be a number above 0, got {text!r}"
    require(0 < weight < math.inf, f"{problem}: write it as 0.7*SOURCE", DataError)
    return weight


def require_unmixed(name: str, reader: str) -> None:
    """Checks that a source has no weights.

    Args:
      name: The name of the source.
      reader: The use of the source that does not support weights, such as ``a policy``, for the
        message.

    Raises:
      DataError: The source is a mixture, or has a weight.
    """
    problem = f"{reader} does not support weights, got {name!r}: join the sources without weights"
    require(not has_weights(name), problem, DataError)


@dataclass(frozen=True)
class Source:
    """A parsed source name.

    Attributes:
      name: The name as the user wrote it.
      kind: The kind, which determines the reader.
      location: The glob, the name of the built-in text, TFDS's ``name/config``, or a folder.
      part: The part after the ``#``. For text, the unit that forms a document: ``file``, ``line``,
        ``block`` or ``sentences``; for JSON lines, TFDS and examples in memory, the name of the
        field; for ``builtin:patterns``, the kinds of tasks; otherwise empty.
      conditions: The conditions that a record must satisfy to be read.
    """

    name: str
    kind: SourceKind
    location: str
    part: str
    conditions: tuple[Condition, ...] = ()

    @property
    def lines_are_sentences(self) -> bool:
        """Whether each line is one sentence, so that documents need no sentence splitting."""
        if isinstance(self.name, Examples):
            return self.name.lines_are_sentences
        return self.kind == "text" and self.part == "sentences"


def parse_sources(name: str) -> tuple[Source, ...]:
    """Parses a name that may join several sources, without access to files or the network.

    Args:
      name: A name such as ``text:brown.txt.gz#sentences + text:chapters/*.txt``. If it is a
        mixture, its weights are ignored.

    Returns:
      At least one parsed source, in the order of the name.

    Raises:
      DataError: See ``parse_source``.
    """
    if isinstance(name, Examples):
        return (parse_source(name),)
    parts = [term.source for term in split_mixture(name)] or _JOIN.split(name)
    return tuple(parse_source(part.strip()) for part in parts)


def parse_source(name: str) -> Source:
    """Parses the name of one source, without access to files or the network.

    Args:
      name: A name such as ``text:books/**/*.txt.gz#block``.

    Returns:
      The parsed source.

    Raises:
      DataError: The kind, the unit or the built-in text is unknown, or nothing follows the kind.
        The message shows a similar valid name.
    """
    if name.startswith(f"{KIND}:"):
        fields = fields_of(name, "text")
        one_field = len(fields) == 1
        problem = f"{name!r} names {len(fields)} fields: name only the field of the text"
        require(one_field, problem, DataError)
        location = name.partition(":")[2]
        return Source(name, KIND, location, fields[0], split_conditions(location, name)[1])
    kind, location, part, conditions = parse_name(name, _FORMS)
    part = part or _DEFAULT_PART.get(kind, "")
    if kind == "text":
        require_one_of(f"the unit of source {name!r}", part, _UNITS, error=DataError)
    # Among the built-in sources, only the patterns have a part: the kinds of tasks, which
    # `Patterns.parse` checks.
    if kind == "builtin" and Patterns.parse(name) is None:
        require_one_of("the built-in text", name, _BUILTINS, error=DataError)
    return Source(name, cast(SourceKind, kind), location, part, conditions)


def input_files(name: str) -> list[Source]:
    """Splits a source into its files, in order; a built-in text counts as one file.

    Raises:
      DataError: The source does not consist of files (``tfds:``, ``prepared:``), or no file
        matches.
    """
    require_unmixed(name, "a list of files")
    parts: list[Source] = []
    for source in parse_sources(name):
        of_files = source.kind in ("builtin", "text", "jsonl", *FILE_KINDS)
        remedy = "name text:GLOB, jsonl:GLOB#field or parquet:GLOB#field"
        require(of_files, f"{source.name!r} is not made of text files: {remedy}", DataError)
        files = [] if source.kind == "builtin" else matching_files(source.location, source.name)
        # Name each file as a source, so that it can be read separately.
        conditions = f"?{written(source.conditions)}" if source.conditions else ""
        names = [f"{source.kind}:{file}#{source.part}{conditions}" for file in files]
        parts += [
            replace(source, name=part, location=str(absolute(file)))
            for part, file in zip(names, files, strict=True)
        ] or [source]
    return parts
