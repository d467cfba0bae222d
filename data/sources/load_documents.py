"""Loads documents from local text, object stores and published data sets.

Local text is copied once to a cache of ArrayRecord files, by a TFDS builder that does not need
tensorflow. The key of this cache is a hash of the content. Other sources are not copied: Parquet
files, Arrow files and Hugging Face data sets allow access to rows by index, and the files of an
object store are read again in order.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..common.atomic_io import build_folder
from ..common.errors import DataError
from ..common.fields import Rate, check_value, require
from ..common.files import default_cache_dir
from ..filters.conditions import LeftOut, left_out_note
from .columnar.huggingface import HubData, open_hub
from .documents import Documents, JoinedRecords, SourceLike, as_source
from .hash_split import HashSplit, Split, text_digest
from .numbered import NumberedTexts, is_read_in_place, numbered
from .read_documents import read_documents
from .source_names import Source, parse_sources

_FORMAT = 1
# The log warns if the held-out part exceeds the requested fraction by this factor.
_LARGE_PART = 4
_UNDIVIDED = HashSplit(b"")


def load_documents(
    source: SourceLike,
    split: Split,
    *,
    validation_fraction: float,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Documents:
    """Loads one split of a source, from the cache if possible.

    Args:
      source: The name of one source or of several joined sources, see ``source_names``; or the
        documents themselves.
      split: ``train`` or ``validation``. Local text, and published data without a validation split,
        are divided by the hash of each document's text.
      validation_fraction: The fraction of documents for validation, in [0, 1). If 0, all documents
        are in ``train``. If a split would be empty by chance, it gets the document with the
        smallest (validation) or largest (train) hash. All local sources of a joined name are
        divided together.
      cache_dir: The folder of cached data. Defaults to ``default_cache_dir()``.

    Returns:
      The documents. The order of local documents depends only on their texts; all other documents
      have the order of the source.

    Raises:
      DataError: The source has an error (see ``read_documents``), has only one document although
        two splits are required, or is published but neither on this machine nor available for
        download.
    """
    check_value("validation_fraction", validation_fraction, Rate)
    name = as_source(source)
    sources = parse_sources(name)
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    fraction = validation_fraction
    local = _load_local(sources, split=split, fraction=fraction, cache=cache, name=name)
    # One iterator yields the documents of all local sources, because they are divided together.
    parts: list[Documents] = []
    for one in sources:
        if one.kind == "tfds":
            # Import TFDS only if it is needed, because it is slow to import.
            from .tfds.documents import load_published

            parts.append(load_published(one, split, fraction, cache))
        elif (hub := _with_validation(one)) is not None:
            name_of_split = hub.training if split == "train" else hub.validation
            texts = numbered(one, cache, name_of_split)
            note = left_out_note(texts.left_out) if split == "train" else ""
            parts.append(replace(texts.documents(_UNDIVIDED, "train"), note=note))
        else:
            parts.append(next(local))
    return JoinedRecords.join(parts)


def load_whole(source: SourceLike, *, cache_dir: str | os.PathLike[str] | None = None) -> Documents:
    """Loads all documents of a local source, or the validation split of a published source.

    Args:
      source: The name of one source or of several joined sources, see ``source_names``; or the
        documents themselves.
      cache_dir: The folder of cached data. Defaults to ``default_cache_dir()``.

    Returns:
      The documents.

    Raises:
      DataError: See ``load_documents``; or a published data set has no validation split.
    """
    parts = [
        load_documents(
            one.name,
            "validation" if _has_splits(one) else "train",
            validation_fraction=0.0,
            cache_dir=cache_dir,
        )
        for one in parse_sources(as_source(source))
    ]
    return JoinedRecords.join(parts)


def _with_validation(source: Source) -> HubData | None:
    """Returns the Hugging Face data set of a source, or None if it has no validation split."""
    if source.kind != "hf":
        return None
    hub = open_hub(source.location, source.name)
    return hub if hub.validation is not None else None


def _has_splits(source: Source) -> bool:
    """Returns whether the source has splits, so that evaluation reads only its validation split."""
    if source.kind != "hf":
        return source.kind == "tfds"
    hub = open_hub(source.location, source.name)
    return hub.split is None and len(hub.splits) > 1


def _load_local(
    sources: Sequence[Source], *, split: Split, fraction: float, cache: Path, name: str
) -> Iterator[Documents]:
    """Yields the documents of each local source, which are divided into splits together."""
    local = [one for one in sources if one.kind != "tfds" and _with_validation(one) is None]
    if not local:
        return
    has_split = split == "train" or fraction > 0
    problem = f"{name!r} has no validation split: set validation_fraction above 0"
    require(has_split, problem, DataError)
    # The first pass hashes all texts, because the division and the cache keys need the hashes.
    texts = [_read_once(source, cache) for source in local]
    counts = [one.counts for one in texts]
    division = HashSplit.of(itertools.chain.from_iterable(counts), fraction, name)
    notes = [left_out_note(one.left_out) for one in texts]
    if split == "validation":
        # The sources are divided together, so only the first one has this note.
        notes = [_large_part(counts, division, fraction), *[""] * (len(texts) - 1)]
    # With several sources, the digest limit depends on all of them, so it must be part of the key.
    rule = repr(fraction) if len(local) == 1 else division.limit.hex()
    for one, note in zip(texts, notes, strict=True):
        if isinstance(one, NumberedTexts):
            loaded = one.documents(division, split)
        else:
            key = _key(one.counts, rule)
            loaded = _load_one(one, division=division, key=key, split=split, cache=cache)
        yield replace(loaded, note=note)


def _read_once(source: Source, cache: Path) -> "_Reread | NumberedTexts":
    """Hashes the texts of a source, and counts the records that are left out."""
    if is_read_in_place(source):
        return numbered(source, cache)
    left_out = LeftOut()
    return _Reread(source, Counter(map(text_digest, read_documents(source, left_out))), left_out)


def _large_part(counts: Sequence[Counter[bytes]], division: HashSplit, fraction: float) -> str:
    """Returns a log line if far more documents are held out than requested, else an empty text."""
    all_counts = sum(counts, Counter())
    total = all_counts.total()
    held_out = sum(n for digest, n in all_counts.items() if division.split(digest) == "validation")
    if held_out <= _LARGE_PART * fraction * total:
        return ""
    return (
        f"{held_out:,} of {total:,} documents are held out, although validation_fraction is "
        f"{fraction}: divide text into smaller documents by #block or #line, or name another "
        "source in data.validation"
    )


def _load_one(
    texts: "_Reread", *, division: HashSplit, key: str, split: Split, cache: Path
) -> Documents:
    """Opens one split of a local source; if it is not in the cache, first writes all splits."""
    # Import TFDS only if it is needed, because it is slow to import.
    from .tfds.local_dataset import open_texts, write_texts

    source = texts.source
    splits = division.splits(texts.counts)

    def fill(folder: Path) -> None:
        write_texts(texts, division, splits, folder)
        problem = f"source {source.name} changed while it was read: start again"
        require(not texts.changed, problem, DataError)

    mark = "-sentences" if source.lines_are_sentences else ""
    metadata = ("text", f"{key}-{split}{mark}", None, source.lines_are_sentences)
    # An empty split has no files.
    if split not in splits:
        return Documents(JoinedRecords(()), *metadata)
    folder = build_folder(cache / "documents" / key, fill)
    return Documents(open_texts(folder, split), *metadata)


def _key(counts: Counter[bytes], rule: str) -> str:
    """Hashes the content of a data set; the hash does not depend on the reading order."""
    hasher = hashlib.blake2b(f"{_FORMAT} {rule}".encode(), digest_size=16)
    for digest in sorted(counts):
        hasher.update(digest + counts[digest].to_bytes(8, "big"))
    return hasher.hexdigest()


class _Reread:
    """Documents that are read again for each split instead of being kept in memory.

    Attributes:
      source: The source.
      counts: For each digest, the number of documents that have it.
      left_out: The number of records that the conditions of the source leave out.
      changed: Whether the documents had different digests in a later pass.
    """

    def __init__(self, source: Source, counts: Counter[bytes], left_out: LeftOut) -> None:
        self.source, self.counts, self.left_out = source, counts, left_out
        self.changed = False

    def __iter__(self) -> Iterator[str]:
        seen: Counter[bytes] = Counter()
        for text in read_documents(self.source):
            seen[text_digest(text)] += 1
            yield text
        self.changed |= seen != self.counts
