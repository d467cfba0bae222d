"""Provides the texts of sources that are read in place, without a copy in the cache.

Rows of tables are read by index. The files of an object store can only be read forward, so reading
the texts in order reads each file once. The cache contains only the index and the digest of each
text, which the division into splits needs.
"""

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.fields import require
from ..common.files import File, identity, is_url, matching_files
from ..filters.conditions import LeftOut, empty_reason, written
from .columnar.huggingface import open_hub
from .columnar.tables import ColumnRecords, Rows
from .documents import Documents, Records
from .hash_split import HashSplit, Split, text_digest
from .read_documents import numbered_texts, read_documents, rows_of
from .source_names import FILE_KINDS, Source

_FORMAT = 1


class StreamedRecords:
    """The documents of a source that can only be read forward; see ``documents.Records``."""

    def __init__(self, source: Source, number: int) -> None:
        """Creates the records. Reading starts at the first document.

        Args:
          source: The source.
          number: The number of documents in the source.
        """
        self._source, self._number = source, number
        self._next, self._texts = 0, read_documents(source)

    def __len__(self) -> int:
        return self._number

    def __getitems__(self, record_keys: Sequence[int], /) -> list[dict[str, bytes]]:
        """Reads several documents at once; an earlier document requires reading from the start."""
        texts: dict[int, str] = {}
        for key in sorted({*record_keys}):
            if key < self._next:
                self._next, self._texts = 0, read_documents(self._source)
            skipped = itertools.islice(self._texts, key - self._next, None)
            # If this text is missing, the source has become shorter.
            text = next(skipped, "")
            require(text, f"{self._source.name} changed while it was read: start again", DataError)
            texts[key], self._next = text, key + 1
        return [{self._source.part: texts[key].encode()} for key in record_keys]


@dataclass(frozen=True)
class NumberedTexts:
    """The indices and digests of the texts of a source.

    Attributes:
      source: The source.
      numbers: The index of the record that contains each text, int64 [n].
      digests: The hash of each text, uint8 [n, 16].
      left_out: The number of records that the conditions of the source leave out.
      open_records: A function that opens the records, given the number of texts.
    """

    source: Source
    numbers: np.ndarray
    digests: np.ndarray
    left_out: LeftOut
    open_records: Callable[[int], Records]

    @classmethod
    def of(
        cls,
        source: Source,
        metadata: tuple[object, ...],
        texts: Callable[[LeftOut], Iterator[tuple[int, str]]],
        open_records: Callable[[int], Records],
        cache: Path,
    ) -> "NumberedTexts":
        """Reads all texts once, or uses the cache if the source has not changed.

        Args:
          source: The source.
          metadata: Values that change whenever the content of the source changes.
          texts: A function that yields the index and the text of each record that satisfies the
            conditions of the source, and counts all other records.
          open_records: A function that opens the records, given the number of texts.
          cache: The folder of cached data.

        Raises:
          DataError: The source cannot be read, or has no text.
        """
        return cls(source, *_cached(source, metadata, texts, cache), open_records)

    @property
    def counts(self) -> Counter[bytes]:
        """For each digest, the number of texts that have it."""
        return Counter(map(bytes, self.digests))

    def documents(self, division: HashSplit, split: Split) -> Documents:
        """Returns the documents of a split, in the order of the source."""
        held_out = _below(self.digests, division.limit)
        chosen = held_out == (split == "validation")
        # The documents are ordered, so the hash must depend on their order.
        hasher = hashlib.blake2b(f"numbered {_FORMAT}".encode(), digest_size=16)
        hasher.update(self.digests[chosen].tobytes())
        mark = "-sentences" if self.source.lines_are_sentences else ""
        return Documents(
            self.open_records(len(self.numbers)),
            self.source.part,
            f"{hasher.hexdigest()}{mark}",
            self.numbers[chosen],
            self.source.lines_are_sentences,
        )


def is_read_in_place(source: Source) -> bool:
    """Returns whether a source is read in place: a columnar source, or files of an object store."""
    return source.kind in (*FILE_KINDS, "hf") or (
        source.kind in ("text", "jsonl") and is_url(source.location.removeprefix("file://"))
    )


def numbered(source: Source, cache: Path, split: str | None = None) -> NumberedTexts:
    """Returns the indexed texts of a source, from the cache if the source has not changed.

    Args:
      source: A source that is read in place.
      cache: The folder of cached data.
      split: The split of a Hugging Face data set. Defaults to its training split.

    Raises:
      DataError: The source cannot be read, or has no text.
    """
    if source.kind == "hf":
        hub = open_hub(source.location, source.name)
        split = split or hub.training
        return _of_rows(source, hub.rows(split), hub.identity(split), cache)
    if source.kind in FILE_KINDS:
        rows = rows_of(source)
        files = [table for table in rows.tables if isinstance(table, File)]
        return _of_rows(source, rows, tuple(map(identity, files)), cache)

    def texts(left_out: LeftOut) -> Iterator[tuple[int, str]]:
        return enumerate(read_documents(source, left_out))

    def records(number: int) -> Records:
        return StreamedRecords(source, number)

    metadata = tuple(map(identity, matching_files(source.location, source.name)))
    return NumberedTexts.of(source, metadata, texts, records, cache)


def _of_rows(
    source: Source, rows: Rows, metadata: tuple[object, ...], cache: Path
) -> NumberedTexts:
    def texts(left_out: LeftOut) -> Iterator[tuple[int, str]]:
        return numbered_texts(source, rows, left_out)

    def records(number: int) -> Records:
        del number
        return ColumnRecords(rows, source.part)

    return NumberedTexts.of(source, metadata, texts, records, cache)


def _cached(
    source: Source,
    metadata: tuple[object, ...],
    texts: Callable[[LeftOut], Iterator[tuple[int, str]]],
    cache: Path,
) -> tuple[np.ndarray, np.ndarray, LeftOut]:
    """Reads the texts once; returns their indices and digests, and the counts of omissions."""
    known = (_FORMAT, source.kind, source.part, written(source.conditions), *metadata)
    key = hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()
    path = cache / "divisions" / f"{key}.npz"
    if not path.is_file():
        left_out = LeftOut()
        # Skip blank documents, because they have no tokens to predict.
        digested = [(i, text_digest(text)) for i, text in texts(left_out) if text.strip()]
        require(digested, f"no text in {source.name!r}: {empty_reason(left_out)}", DataError)
        numbers, digests = zip(*digested, strict=True)
        # The file can contain only arrays, so store the counts of omitted records as JSON bytes.
        content = io.BytesIO()
        np.savez(
            content,
            numbers=np.asarray(numbers, np.int64),
            digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
            left_out=np.frombuffer(json.dumps(left_out).encode(), np.uint8),
        )
        write_file(path, content.getvalue())
    with np.load(path) as arrays:
        omissions = LeftOut(json.loads(arrays["left_out"].tobytes()))
        return arrays["numbers"], arrays["digests"], omissions


def _below(digests: np.ndarray, limit: bytes) -> np.ndarray:
    """Returns whether each digest is below a limit, bool [n]; all False if the limit is empty."""
    if not limit:
        return np.zeros(len(digests), bool)
    # Compare digests as 16-byte integers, with the most significant byte first.
    high, low = np.ascontiguousarray(digests).view(">u8").T
    limit_high, limit_low = np.frombuffer(limit, ">u8")
    return (high < limit_high) | ((high == limit_high) & (low < limit_low))
