"""Reads the documents of a source in order; see ``source_names`` for the names of sources.

``common.files`` finds the files and splits them into lines.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from ..common.errors import DataError
from ..common.fields import require
from ..common.files import Line, file_lines, matching_files, matching_lines
from ..common.json_lines import parse_lines, pick
from ..common.json_text import JsonObject
from ..filters.conditions import Condition, LeftOut, empty_reason, keeps
from .builtin.patterns import Patterns
from .builtin.toys import Toy
from .columnar.huggingface import open_hub
from .columnar.tables import Rows
from .in_memory import read_memory
from .source_names import FILE_KINDS, Source


def read_documents(source: Source, left_out: LeftOut | None = None) -> Iterator[str]:
    """Reads the documents of a local source in order.

    Documents that contain only white space are left out.

    Args:
      source: A source of any kind except ``tfds`` and ``prepared``. For ``hf``, the training split
        is read.
      left_out: Counts the records that do not satisfy the conditions of the source.

    Yields:
      The text of each document. Files are read in sorted order, and lines in file order.

    Raises:
      DataError: A file is missing, empty, incomplete or not UTF-8; a JSON line is not valid or
        lacks the field (the message names file and line); or the source is a published data set,
        which only ``load_documents`` can read.
    """
    left_out = LeftOut() if left_out is None else left_out
    documents = documents_in(source, left_out)
    # No document is blank, so an empty text means that the source has no documents.
    first = next(documents, "")
    require(first, f"no text in {source.name!r}: {empty_reason(left_out)}", DataError)
    yield first
    yield from documents


def documents_in(source: Source, left_out: LeftOut | None = None) -> Iterator[str]:
    """Reads documents as ``read_documents`` does, but accepts a source without documents."""
    remedies = {"tfds": "use load_documents", "prepared": "name the text that it was made from"}
    remedy = remedies.get(source.kind)
    require(not remedy, f"{source.name!r} is not local text: {remedy}", DataError)
    # Skip blank documents, because they have no tokens to predict.
    yield from filter(str.strip, _READERS[source.kind](source, left_out))


def _read_memory(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    fields = (source.part,)
    for location, (text,) in read_memory(source.name, fields, source.conditions, left_out):
        yield _checked_text(text, source.part, location)


def _read_builtin(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    generated = Patterns.parse(source.name) or Toy.parse(source.name)
    if generated is not None:
        return generated.documents()
    # Import the module only if it is used, because it has 0.5 MB of literals.
    from pydoc_data.topics import topics

    return (topics[key] for key in sorted(topics))


def _read_texts(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    for path in matching_files(source.location, source.name):
        # If a document can have several lines, keep the line ends.
        lines = (line for _, _, line in file_lines(path, keep_ends=source.part != "line"))
        if source.part == "file":
            yield "".join(lines)
        elif source.part == "line":
            yield from lines
        else:
            # Blank lines separate blocks.
            for has_text, block in itertools.groupby(lines, lambda line: bool(line.strip())):
                if has_text:
                    yield "".join(block).removesuffix("\n").removesuffix("\r")


def _read_json_lines(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    lines = matching_lines(source.location, source.name)
    for location, row in json_rows(lines, source.conditions, left_out):
        yield _checked_text(pick(row, source.part, location), source.part, location)


def _read_columns(source: Source, left_out: LeftOut | None) -> Iterator[str]:
    return (text for _, text in numbered_texts(source, rows_of(source), left_out))


_READERS: dict[str, Callable[[Source, LeftOut | None], Iterator[str]]] = {
    "memory": _read_memory,
    "builtin": _read_builtin,
    "text": _read_texts,
    "jsonl": _read_json_lines,
    **dict.fromkeys((*FILE_KINDS, "hf"), _read_columns),
}


def rows_of(source: Source) -> Rows:
    """Returns the rows of a columnar source, or of a Hugging Face data set's training split.

    Raises:
      DataError: No file matches, or the data set cannot be opened.
    """
    if source.kind == "hf":
        hub = open_hub(source.location, source.name)
        return hub.rows(hub.training)
    return Rows.of_files(source.kind, source.location, source.name)


def numbered_texts(
    source: Source, rows: Rows, left_out: LeftOut | None
) -> Iterator[tuple[int, str]]:
    """Yields the index and the text of each row that satisfies the source's conditions.

    Raises:
      DataError: A file is damaged, or a text is not a string.
    """
    for location, number, row in rows.read((source.part,), source.conditions, left_out):
        yield number, _checked_text(pick(row, source.part, location), source.part, location)


def json_rows(
    lines: Iterable[Line], conditions: tuple[Condition, ...], left_out: LeftOut | None
) -> Iterator[tuple[str, JsonObject]]:
    """Yields each object of JSON lines together with its file and line; ignores empty lines.

    Args:
      lines: The lines.
      conditions: Conditions on fields; objects that do not satisfy them are left out.
      left_out: Counts the objects that are left out.

    Raises:
      DataError: A line is not a JSON object.
    """
    for location, row in parse_lines(lines):
        if keeps(conditions, row, location, left_out):
            yield location, row


def _checked_text(value: object, field: str, location: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{location} field {field!r} must be a string, got a {type(value).__name__}: name the "
            "field of the text after a #"
        )
    return value
