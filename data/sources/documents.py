"""Provides random access to documents: texts in memory, records on disk, and joined sources."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from .in_memory import Examples

_READ_AT_ONCE = 256


class Records(Protocol):
    """Provides random access to records, which are dicts of features, as TFDS's data sources do."""

    def __len__(self) -> int: ...

    def __getitems__(self, record_keys: Sequence[int], /) -> Sequence[Mapping[str, bytes]]:
        """Reads several records at once."""
        ...


@dataclass(frozen=True)
class Documents(Sequence[str]):
    """The documents of one split, which are read from disk on access.

    Attributes:
      records: The records, which can be read by index, such as a TFDS data source.
      field: The name of the feature that contains the text.
      fingerprint: A stable hash of all documents.
      indices: The indices of the split's records, int64 [num_documents]. If None, the split has all
        records.
      lines_are_sentences: Whether each line of a document is one sentence. For joined sources,
        each of ``parts`` has this attribute.
      note: A line for the log if a filter left out documents, or if many more documents were held
        out than requested; otherwise empty.
    """

    records: Records
    field: str
    fingerprint: str
    indices: np.ndarray | None = None
    lines_are_sentences: bool = False
    note: str = ""

    @classmethod
    def of(cls, texts: Iterable[str], *, lines_are_sentences: bool = False) -> "Documents":
        """Creates documents from texts in memory. The result can be used like a source name.

        Args:
          texts: The documents, at least one.
          lines_are_sentences: Whether each line is one sentence.

        Raises:
          DataError: The list is empty, or an item is not a text.

        Example::

            documents = data.Documents.of(["First text.", "Second text."])
            dataclasses.replace(config.data, source=documents)
        """
        # `Examples` checks and hashes the texts. Its name is used as the fingerprint.
        examples = Examples.of(texts, lines_are_sentences=lines_are_sentences)
        problem = "documents are texts, not dicts of fields: give a list of str"
        # All examples have the same kind, so it is enough to check the first.
        require(isinstance(examples.rows[0], str), problem, DataError)
        records = _Texts(cast(tuple[str, ...], examples.rows))
        return cls(records, "text", str(examples), lines_are_sentences=lines_are_sentences)

    @property
    def parts(self) -> tuple["Documents", ...]:
        """The documents of each joined source, in order; ``(self,)`` for a single source."""
        joined = isinstance(self.records, JoinedRecords) and self.records.parts
        return joined or (self,)

    def __len__(self) -> int:
        return len(self.records) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        """Returns a document, or a list of documents for a slice."""
        if isinstance(index, slice):
            return self.read(range(len(self))[index])
        return self.read([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[str]:
        # Read many records at once: single reads of ArrayRecord files are slow.
        for start in range(0, len(self), _READ_AT_ONCE):
            yield from self.read(range(len(self))[start : start + _READ_AT_ONCE])

    def read(self, indices: Sequence[int]) -> list[str]:
        """Reads several documents at once.

        Args:
          indices: The indices of the documents, each in ``[0, len(self))``.
        """
        if not len(indices):
            return []
        if self.indices is not None:
            indices = self.indices[list(indices)].tolist()
        return [row[self.field].decode() for row in self.records.__getitems__(list(indices))]


SourceLike = (
    str | Documents | Iterable[str] | Iterable[Mapping[str, object]] | Iterable[tuple[str, str]]
)
"""The name of a source, or the examples themselves. The examples can be documents, texts, dicts
with the fields of labeled examples (``{"label": …, "text": …}``), or pairs of a sentence and its
translation."""


def as_source(source: SourceLike) -> str:
    """Returns the name of a source, or the given examples as ``Examples``.

    Raises:
      DataError: See ``Examples.of``; or only some of the joined documents have one sentence per
        line.
    """
    if isinstance(source, str):
        return source
    if not isinstance(source, Documents):
        return Examples.of(source)
    kinds = {part.lines_are_sentences for part in source.parts}
    require(
        len(kinds) <= 1,
        "only some of the joined documents have one sentence per line: give the names of the "
        "sources, or Documents.of(list(documents)) to split all of them into sentences",
        DataError,
    )
    return Examples.of(source, lines_are_sentences=kinds.pop())


@dataclass(frozen=True)
class _Texts:
    """Texts in memory, with the interface of ``Records``."""

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, record_keys: Sequence[int], /) -> list[dict[str, bytes]]:
        return [{"text": self.texts[key].encode()} for key in record_keys]


@dataclass(frozen=True)
class JoinedRecords:
    """The documents of several sources, combined as the records of one source.

    Attributes:
      parts: The documents of each source; some may be empty.
    """

    parts: tuple[Documents, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitems__(self, indices: Sequence[int], /) -> list[dict[str, bytes]]:
        """Reads several records at once, as TFDS's data sources do."""
        sizes = list(map(len, self.parts))
        # For each index, find the source it belongs to and its index within this source.
        owners = np.searchsorted(np.cumsum(sizes), indices, "right")
        inside = np.asarray(indices) - (np.cumsum(sizes) - sizes)[owners]
        found: dict[int, str] = {}
        # Read all records of a source in one call, and restore the order at the end.
        for owner in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == owner)
            texts = self.parts[owner].read(inside[mine].tolist())
            found.update(zip(mine.tolist(), texts, strict=True))
        return [{"text": found[i].encode()} for i in range(len(owners))]

    @classmethod
    def join(cls, parts: Sequence[Documents]) -> Documents:
        """Joins the documents of several sources; if there is only one, returns it unchanged."""
        if len(parts) == 1:
            return parts[0]
        hasher = hashlib.blake2b(digest_size=16)
        for part in parts:
            hasher.update(f"{part.fingerprint} {len(part)}\n".encode())
        note = "; ".join(filter(None, (part.note for part in parts)))
        return Documents(cls(tuple(parts)), "text", hasher.hexdigest(), note=note)
