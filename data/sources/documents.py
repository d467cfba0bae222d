"""Documents with random access, from local text or a published TensorFlow Dataset.

The hash of a document's text determines its split, so the split does not change when files are
renamed, reordered or extended. A TFDS builder of this package (without tensorflow) writes local
sources once as ArrayRecord files, into a cache whose key is a hash of the content.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ..common.atomic_io import build_folder
from ..common.errors import DataError
from ..filters.conditions import LeftOut, left_out_note
from .in_memory import Examples
from .source_names import Source, parse_sources, read_documents

Split = Literal["train", "validation"]

_SPLITS: tuple[Split, ...] = ("train", "validation")
_FORMAT = 1
_READ_AT_ONCE = 256
# Held-out documents, as a multiple of their intended fraction, that the log mentions.
_LARGE_PART = 4


class Records(Protocol):
    """Random access to records of features, as TFDS's data sources have it."""

    def __len__(self) -> int: ...

    def __getitems__(self, record_keys: Sequence[int], /) -> Sequence[Mapping[str, bytes]]:
        """Reads several records at once."""
        ...


@dataclass(frozen=True)
class Documents(Sequence[str]):
    """The documents of one split, read from disk on access.

    Attributes:
      records: Random access to dicts of features, such as a TFDS data source.
      field: The feature that contains the text.
      fingerprint: A stable hash of all documents.
      indices: The records that belong to the split, int64 [num_documents]; None for all.
      lines_are_sentences: Whether each line of a document is one sentence; for joined
        sources see the attribute of each of ``parts``.
      note: A line for the log if a filter left documents out, or if far more documents are held out
        than was asked for; else empty.
    """

    records: Records
    field: str
    fingerprint: str
    indices: np.ndarray | None = None
    lines_are_sentences: bool = False
    note: str = ""

    @classmethod
    def of(cls, texts: Iterable[str], *, lines_are_sentences: bool = False) -> "Documents":
        """Makes documents of texts in memory, which may stand wherever a source name may.

        Args:
          texts: The documents, at least one.
          lines_are_sentences: Whether each line is one sentence.

        Raises:
          DataError: There is no text, or an item is not a text.

        Example::

            documents = data.Documents.of(["First text.", "Second text."])
            dataclasses.replace(config.data, source=documents)
        """
        examples = Examples.of(texts, lines_are_sentences=lines_are_sentences)
        kept = tuple(row for row in examples.rows if isinstance(row, str))
        if len(kept) < len(examples.rows):
            raise DataError("documents are texts, not dicts of fields: give a list of str")
        return cls(_Texts(kept), "text", str(examples), lines_are_sentences=lines_are_sentences)

    @property
    def parts(self) -> tuple["Documents", ...]:
        """The documents of each source, in order; ``(self,)`` for a single source."""
        joined = isinstance(self.records, JoinedRecords) and self.records.parts
        return joined or (self,)

    def __len__(self) -> int:
        return len(self.records) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        """Returns a document, or a list of them for a slice."""
        if isinstance(index, slice):
            return self.read(range(len(self))[index])
        return self.read([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[str]:
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
    str | Documents | Iterable[str] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, str]]
)
"""The name of a source; or the examples themselves: documents or texts, dicts of the fields of
labeled examples (``{"label": …, "text": …}``), or pairs of a sentence and its translation."""


def as_source(source: SourceLike) -> str:
    """Returns the name of a source, or the examples that were given in its place.

    Raises:
      DataError: See ``Examples.of``; or only some of joined documents have a sentence per line.
    """
    if isinstance(source, str):
        return source
    if not isinstance(source, Documents):
        return Examples.of(source)
    kinds = {source.lines_are_sentences or part.lines_are_sentences for part in source.parts}
    if len(kinds) > 1:
        raise DataError(
            "only some of the joined documents have one sentence per line: give the names of the "
            "sources, or Documents.of(list(documents)) to have all of them split into sentences"
        )
    return Examples.of(source, lines_are_sentences=kinds.pop())


@dataclass(frozen=True)
class _Texts:
    """Texts in memory as records, see ``Records``."""

    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, record_keys: Sequence[int], /) -> list[dict[str, bytes]]:
        return [{"text": self.texts[key].encode()} for key in record_keys]


@dataclass(frozen=True)
class JoinedRecords:
    """The documents of several sources as the records of one.

    Attributes:
      parts: The documents of each source; some may be empty.
    """

    parts: tuple[Documents, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitems__(self, indices: Sequence[int], /) -> list[dict[str, bytes]]:
        """Reads several records at once, as TFDS's data sources do."""
        sizes = [len(part) for part in self.parts]
        owners = np.searchsorted(np.cumsum(sizes), indices, "right")  # the part of each index
        inside = np.asarray(indices) - (np.cumsum(sizes) - sizes)[owners]  # the index in its part
        found: dict[int, str] = {}
        for owner in np.unique(owners).tolist():  # each part is read at once
            mine = np.flatnonzero(owners == owner)
            texts = self.parts[owner].read(inside[mine].tolist())
            found.update(zip(mine.tolist(), texts, strict=True))
        return [{"text": found[i].encode()} for i in range(len(owners))]

    @classmethod
    def join(cls, parts: Sequence[Documents]) -> Documents:
        """Joins the documents of several sources; returns a single source's unchanged."""
        if len(parts) == 1:
            return parts[0]
        whole = hashlib.blake2b(digest_size=16)
        for part in parts:
            whole.update(f"{part.fingerprint} {len(part)}\n".encode())
        note = next((part.note for part in parts if part.note), "")
        return Documents(cls(tuple(parts)), "text", whole.hexdigest(), note=note)


def default_cache_dir() -> Path:
    """Returns the folder of cached data: ``$FLAXZOO_CACHE`` or ``~/.cache/flaxzoo``."""
    return Path(os.environ.get("FLAXZOO_CACHE") or "~/.cache/flaxzoo").expanduser()


def load_documents(
    source: SourceLike,
    split: Split,
    *,
    validation_fraction: float,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Documents:
    """Loads one split of a source, and caches it if it is not cached yet.

    Args:
      source: A source name, or several joined, see ``source_names``; or the documents.
      split: ``train`` or ``validation``. Local text and published data without a
        validation split are divided by the hash of each document's text.
      validation_fraction: The share of documents for validation, in [0, 1); 0 leaves
        all in ``train``. A split that would be empty by chance gets the document with the
        smallest (validation) or largest (train) hash. All local sources of a joined name
        are divided together.
      cache_dir: The folder of cached data; None for ``default_cache_dir()``.

    Returns:
      The documents, in an order that depends only on their texts.

    Raises:
      DataError: The source has an error (see ``read_documents``), has no second document
        to validate on, or is published and can be neither found here nor downloaded.
    """
    check_validation_fraction(validation_fraction)
    name = as_source(source)
    sources = parse_sources(name)
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    local = _load_local(
        sources,
        split=split,
        fraction=validation_fraction,
        cache=cache,
        name=name,
    )
    parts: list[Documents] = []
    for one in sources:
        if one.kind == "tfds":
            from .tfds_documents import load_published

            parts.append(load_published(one, split, validation_fraction, cache))
        else:
            parts.append(next(local))
    return JoinedRecords.join(parts)


def check_validation_fraction(fraction: float, name: str = "validation_fraction") -> None:
    """Checks that a share of documents can be held out.

    Args:
      fraction: The share.
      name: The name of the setting, for the message.

    Raises:
      DataError: The share is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise DataError(f"{name} {fraction} must be at least 0 and below 1")


def load_whole(source: SourceLike, *, cache_dir: str | os.PathLike[str] | None = None) -> Documents:
    """Loads all of a local source, or the validation split of a published one.

    Args:
      source: A source name, or several joined, see ``source_names``; or the documents.
      cache_dir: The folder of cached data; None for ``default_cache_dir()``.

    Returns:
      The documents.

    Raises:
      DataError: See ``load_documents``; a published data set has no validation split.
    """
    parts = [
        load_documents(
            one.name,
            "validation" if one.kind == "tfds" else "train",
            validation_fraction=0.0,
            cache_dir=cache_dir,
        )
        for one in parse_sources(as_source(source))
    ]
    return JoinedRecords.join(parts)


def _load_local(
    sources: Sequence[Source],
    *,
    split: Split,
    fraction: float,
    cache: Path,
    name: str,
) -> Iterator[Documents]:
    """Yields the documents of each local source; all are divided into splits together."""
    local = [source for source in sources if source.kind != "tfds"]
    if not local:
        return
    if split == "validation" and fraction == 0:
        raise DataError(f"{name!r} has no validation split: set validation_fraction above 0")
    left_out = LeftOut()
    digests = [Counter(map(text_digest, read_documents(source, left_out))) for source in local]
    number = sum(own.total() for own in digests)
    division = HashSplit.of(itertools.chain.from_iterable(digests), fraction, name, number=number)
    note = left_out_note(left_out)
    if split == "validation":
        note = _large_part(digests, division, fraction, local)
    # The limit also depends on the other sources, if there are any.
    rule = repr(fraction) if len(local) == 1 else division.limit.hex()
    for source, own in zip(local, digests, strict=True):
        key = _key(own, rule)
        texts = _Reread(source, own)
        loaded = _load_one(texts, division=division, key=key, split=split, cache=cache)
        yield replace(loaded, note=note)


def _large_part(
    digests: Sequence[Counter[bytes]],
    division: "HashSplit",
    fraction: float,
    sources: Sequence[Source],
) -> str:
    """Returns a line for the log if far more is held out than was asked for; else nothing."""
    total = sum(own.total() for own in digests)
    held = sum(
        n for own in digests for key, n in own.items() if division.split(key) == "validation"
    )
    if held <= _LARGE_PART * fraction * total:
        return ""
    are_files = all(source.kind == "text" and source.part == "file" for source in sources)
    remedy = f"{sources[0].name.removesuffix('#file')}#block or #line makes smaller documents, and "
    return (
        f"{held:,} of {total:,} {'files' if are_files else 'documents'} held out whole, where "
        f"validation_fraction is {fraction}: {remedy if are_files else ''}data.validation names "
        "another source"
    )


def _load_one(
    texts: "_Reread",
    *,
    division: "HashSplit",
    key: str,
    split: Split,
    cache: Path,
) -> Documents:
    from .local_dataset import open_texts, write_texts

    source, digests = texts.source, texts.digests

    def fill(folder: Path) -> None:
        write_texts(texts, division, division.splits(digests), folder)
        if texts.changed:
            raise DataError(f"source {source.name} changed while it was read: start again")

    mark = "-sentences" if source.lines_are_sentences else ""
    metadata = ("text", f"{key}-{split}{mark}", None, source.lines_are_sentences)
    if split not in division.splits(digests):
        return Documents(JoinedRecords(()), *metadata)
    folder = build_folder(cache / "documents" / key, fill)
    return Documents(open_texts(folder, split), *metadata)


def text_digest(text: str) -> bytes:
    """Hashes the text of a document to 16 bytes, which compare like the hash values."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class HashSplit:
    """A division into splits: documents whose digest is below a limit are for validation.

    Attributes:
      limit: The exclusive upper bound of validation digests, 16 bytes; empty for none.
    """

    limit: bytes

    @classmethod
    def of(
        cls, digests: Iterable[bytes], fraction: float, name: str, *, number: int | None = None
    ) -> "HashSplit":
        """Chooses the limit so that no split is empty.

        Args:
          digests: The digests of the documents, at least one.
          fraction: The share for validation, in [0, 1).
          name: The source's name, for the message.
          number: The number of documents, if ``digests`` has equal ones only once.

        Raises:
          DataError: All documents are equal, and ``fraction`` is not 0.
        """
        if fraction == 0:
            return cls(b"")
        ordered = sorted(set(digests))
        if len(ordered) < 2:
            what = (
                "a single document"
                if number is None or number < 2
                else f"the same document {number:,} times"
            )
            raise DataError(
                f"source {name!r} is {what}, so nothing is left for validation: add others (a text "
                "may be split, text:GLOB#block or #line), or set validation_fraction 0 and name a "
                "separate source for validation"
            )
        return cls(min(max(cls.of_each(fraction).limit, ordered[1]), ordered[-1]))

    @classmethod
    def of_each(cls, fraction: float) -> "HashSplit":
        """Computes the limit from ``fraction`` alone; a split may be empty."""
        return cls(int(fraction * 2**128).to_bytes(16, "big"))

    def split(self, digest: bytes) -> Split:
        """Returns the split of a document."""
        return "validation" if digest < self.limit else "train"

    def splits(self, digests: Iterable[bytes]) -> tuple[Split, ...]:
        """Returns the splits that contain at least one of the given documents."""
        found = {self.split(digest) for digest in digests}
        return tuple(split for split in _SPLITS if split in found)


def _key(digests: Counter[bytes], rule: str) -> str:
    """Hashes the content of a data set, independent of the order in which it was read."""
    whole = hashlib.blake2b(f"{_FORMAT} {rule}".encode(), digest_size=16)
    for digest in sorted(digests):
        whole.update(digest + digests[digest].to_bytes(8, "big"))
    return whole.hexdigest()


class _Reread:
    """Documents that are read again for each split, instead of being kept in memory.

    Attributes:
      source: The source.
      digests: The digests of the documents, with their numbers.
      changed: Whether other documents were read than those whose digests are known.
    """

    def __init__(self, source: Source, digests: Counter[bytes]) -> None:
        self.source, self.digests = source, digests
        self.changed = False

    def __iter__(self) -> Iterator[str]:
        seen: Counter[bytes] = Counter()
        for text in read_documents(self.source):
            seen[text_digest(text)] += 1
            yield text
        self.changed |= seen != self.digests
