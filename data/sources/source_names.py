r"""Sources of text, and the syntax of their names.

=========================  ==========================================================
``builtin:python-docs``    the English prose every CPython ships in ``pydoc_data``
``builtin:patterns``       examples of small random tasks, see ``patterns``; ``#map,count``
                           chooses kinds of them
``builtin:sums``           sums such as ``17+5=22``, see ``builtin.toys``
``builtin:words``          six random words, likewise
``text:GLOB``              plain text; ``#file`` (default), ``#line`` or ``#block`` says
                           what a document is (blocks are separated by blank lines)
``text:GLOB#sentences``    blocks with one sentence on each line, the input format of
                           google-research/bert
``jsonl:GLOB#field``       JSON lines; the string in ``field`` (default ``text``)
``tfds:name/config#field`` a published TensorFlow Dataset (field default ``text``)
``prepared:FOLDER``        the output of ``flaxzoo prepare``, instead of documents
``…#field?score>=3``       for JSON lines, TFDS and examples in memory: only the records that
                           satisfy a condition on a field, see ``conditions``
``SOURCE + SOURCE``        several sources, concatenated. Only a ``+`` between spaces and
                           before a kind joins sources: ``text:a + b.txt`` is a file
=========================  ==========================================================

``common.files`` finds the files and splits them into lines. This file reads the local kinds;
``load_documents`` adds the published ones.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ..common.errors import DataError, UserError, listed_choices
from ..common.files import file_lines, matching_files
from ..common.json_lines import parse_line, pick
from ..common.json_text import JsonObject
from ..filters.conditions import Condition, LeftOut, keeps, left_out_note, split_conditions, written
from .builtin.patterns import Patterns
from .builtin.toys import Toy
from .in_memory import KIND, Examples, fields_of, read_memory

SourceKind = Literal["builtin", "text", "jsonl", "tfds", "prepared", "memory"]

_EXAMPLES: dict[SourceKind, str] = {
    "builtin": "builtin:python-docs",
    "text": "text:GLOB",
    "jsonl": "jsonl:GLOB#field",
    "tfds": "tfds:name/config#field",
    "prepared": "prepared:FOLDER",
}
_DEFAULT_PART: dict[SourceKind, str] = {
    "builtin": "",
    "text": "file",
    "jsonl": "text",
    "tfds": "text",
    "prepared": "",
}
# Kinds of source that only other kinds of data read. They are valid, not misspelled.
_OF_OTHER_DATA = ("tsv", "csv", "conll", "squad", "pairs", "corpora")
_UNITS = ("file", "line", "block", "sentences")
_BUILTINS = ("python-docs", "patterns", "sums", "words")
_JOIN = re.compile(rf"\s\+\s+(?=(?:{'|'.join(_EXAMPLES)}):)")


@dataclass(frozen=True)
class Source:
    """A parsed source name.

    Attributes:
      name: The name as the user wrote it.
      kind: The kind, which determines the reader.
      location: The glob, the name of the built-in text, TFDS's ``name/config``, or a folder.
      part: The unit of a document: ``file``, ``line``, ``block`` or ``sentences`` for text,
        the field's name for JSON lines, TFDS and examples in memory, the kinds of tasks for
        ``builtin:patterns``, else empty.
      conditions: The conditions that a record must satisfy to be read.
    """

    name: str
    kind: SourceKind
    location: str
    part: str
    conditions: tuple[Condition, ...] = ()

    @property
    def lines_are_sentences(self) -> bool:
        """Whether each line of a document is one sentence, so that splitting is unnecessary."""
        if isinstance(self.name, Examples):
            return self.name.lines_are_sentences
        return self.kind == "text" and self.part == "sentences"


def parse_sources(name: str) -> tuple[Source, ...]:
    """Parses a name that may join several sources, without access to files or the network.

    Args:
      name: For example ``text:brown.txt.gz#sentences + text:chapters/*.txt``.

    Returns:
      The parsed sources in order, at least one.

    Raises:
      DataError: See ``parse_source``.
    """
    if isinstance(name, Examples):
        return (parse_source(name),)
    return tuple(parse_source(part.strip()) for part in _JOIN.split(name))


def parse_source(name: str) -> Source:
    """Parses the name of one source, without access to files or the network.

    Args:
      name: For example ``text:books/**/*.txt.gz#block``.

    Returns:
      The parsed source.

    Raises:
      DataError: The kind, the unit or the built-in text is unknown, or nothing
        follows the kind. The message gives the nearest valid form.
    """
    kind, colon, rest = name.partition(":")
    if colon and kind == KIND:
        field, *more = fields_of(name, "text")
        if more:
            raise DataError(f"{name!r} names {1 + len(more)} fields: name the one of the text")
        return Source(name, KIND, rest, field, split_conditions(rest, name)[1])
    if not colon or kind not in _EXAMPLES:
        raise DataError(_unknown_kind(name, kind, bool(colon)))
    kind = cast(SourceKind, kind)
    rest, conditions = split_conditions(rest, name) if kind != "prepared" else (rest, ())
    if conditions and kind not in ("jsonl", "tfds"):
        raise DataError(
            f"{name!r} has a filter, but only jsonl: and tfds: have fields to filter on: leave "
            f"?{written(conditions)} out, or name JSON lines as jsonl:GLOB#field?{conditions[0]}"
        )
    # The name of a folder may contain a #.
    has_part = "#" in rest and kind != "prepared"
    # The last # starts the part; earlier ones belong to the glob.
    location, mark, part = rest.rpartition("#") if has_part else (rest, "", "")
    if not location or (mark and not part):
        raise DataError(f"source {name!r} is incomplete: write {_EXAMPLES[kind]}")
    part = part or _DEFAULT_PART[kind]
    if kind == "text" and part not in _UNITS:
        raise DataError(
            f"unknown unit #{part} in source {name!r}: choose {listed_choices(part, _UNITS)}"
            " (if the # belongs to the path, add #file)"
        )
    if kind == "builtin" and (location not in _BUILTINS or (part and location != "patterns")):
        shown = tuple(f"builtin:{builtin}" for builtin in _BUILTINS)
        choice = listed_choices(location, _BUILTINS, shown)
        raise DataError(f"unknown built-in text in {name!r}: choose {choice}")
    if kind == "builtin" and location == "patterns":
        # Raise now if a kind of task does not exist.
        Patterns.parse(name)
    return Source(name, kind, location, part, conditions)


def read_documents(source: Source, left_out: LeftOut | None = None) -> Iterator[str]:
    """Reads the documents of a local source in order.

    Documents of only white space are left out.

    Args:
      source: A source of the kind ``builtin``, ``text`` or ``jsonl``.
      left_out: Counts the records that do not satisfy the conditions of the source.

    Yields:
      The text of each document, with files in sorted order and lines in file order.

    Raises:
      DataError: A file is missing, empty, incomplete or not UTF-8; a JSON line is not
        valid or lacks the field (with file and line).
      UserError: The source is a published TFDS data set; use ``load_documents``.
    """
    found = False
    left_out = LeftOut() if left_out is None else left_out
    for document in documents_in(source, left_out):
        found = True
        yield document
    # Name the filter if it is the reason for an empty source.
    if not found and left_out:
        raise DataError(f"no document of {source.name!r} is left: {left_out_note(left_out)}")
    if not found:
        raise _no_text(source)


def documents_in(source: Source, left_out: LeftOut | None = None) -> Iterator[str]:
    """Reads documents like ``read_documents``, but accepts an empty source."""
    if source.kind == "tfds":
        raise UserError(f"{source.name!r} is not local text: use load_documents")
    if source.kind == "prepared":
        raise DataError(
            f"{source.name!r} contains sequences for causal language modeling, not text: name "
            "the text that it was made from"
        )
    if source.kind == KIND:
        texts = _texts_in_memory(source, left_out)
    else:
        texts = _builtin(source) if source.kind == "builtin" else _texts_of_files(source, left_out)
    # Blank documents have no tokens to predict.
    yield from (text for text in texts if text and not text.isspace())


def _no_text(source: Source) -> DataError:
    """Makes the error for a local source without documents."""
    if source.kind == KIND:
        return DataError(f"no text in {source.name!r}: only white space; give some text")
    paths = matching_files(source.location, source.name)
    files = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files of {source.name!r}"
    return DataError(f"no text in {files}: empty or only white space; give a file with text")


def _texts_in_memory(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    fields = (source.part,)
    for location, (text,) in read_memory(source.name, fields, source.conditions, left_out):
        if not isinstance(text, str):
            raise DataError(
                f"{location} field {source.part!r} is a {type(text).__name__}, not a string: name "
                "the field of the text, as data.Examples.of(examples, fields='body')"
            )
        yield text


def _texts_of_files(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    for path in matching_files(source.location, source.name):
        if source.kind == "text":
            yield from _read_text(path, source.part)
        else:
            yield from _read_json_lines(path, source, left_out)


def _builtin(source: Source) -> Iterator[str]:
    if (patterns := Patterns.parse(source.name)) is not None:
        yield from patterns.documents()
        return
    if (toy := Toy.parse(source.name)) is not None:
        yield from toy.documents()
        return
    # Import on use: the module has 0.5 MB of literals.
    from pydoc_data.topics import topics

    for key in sorted(topics):
        yield topics[key]


def _unknown_kind(name: str, kind: str, has_colon: bool) -> str:
    if not has_colon or "/" in kind or Path(name).expanduser().exists():
        return f"source {name!r} has no kind: for a file write text:{name}" + (
            f"; known forms: {', '.join(_EXAMPLES.values())}"
        )
    if kind in _OF_OTHER_DATA:
        return (
            f"this kind of data reads documents, not a {kind!r} source ({name!r}): write one of "
            f"{', '.join(_EXAMPLES.values())}"
        )
    return f"unknown source kind {kind!r} in {name!r}: choose " + listed_choices(
        kind, tuple(_EXAMPLES), tuple(_EXAMPLES.values())
    )


def _read_text(path: Path, unit: str) -> Iterator[str]:
    # Keep the line ends of a document that has several lines.
    lines = (line for _, _, line in file_lines(path, keep_ends=unit != "line"))
    if unit == "file":
        yield "".join(lines)
    elif unit == "line":
        yield from lines
    else:
        yield from _blocks(lines)


def _blocks(lines: Iterator[str]) -> Iterator[str]:
    block: list[str] = []
    for line in lines:
        if line and not line.isspace():
            block.append(line)
        elif block:
            # The last line break separates blocks and is not part of the document.
            yield "".join(block).removesuffix("\n").removesuffix("\r")
            block = []
    if block:
        yield "".join(block).removesuffix("\n").removesuffix("\r")


def _read_json_lines(path: Path, source: Source, left_out: LeftOut | None) -> Iterator[str]:
    for file, number, line in file_lines(path):
        if line and not line.isspace():
            location = f"{file} line {number}"
            row = parse_line(line, location)
            if keeps(source.conditions, row, location, left_out):
                yield _text_field(row, source.part, location)


def _text_field(row: JsonObject, field: str, location: str) -> str:
    value = pick(row, field, location)
    if not isinstance(value, str):
        seen = ", ".join(sorted(key for key in row if isinstance(row[key], str))) or "none"
        raise DataError(
            f"{location} field {field!r} is a {type(value).__name__}, not a string: "
            f"its string fields are {seen}"
        )
    return value
