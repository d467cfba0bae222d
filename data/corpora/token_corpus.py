"""A tokenized split on disk: flat arrays, opened without being read.

A document is stored as ``s = [bos] + tokens + [eos]``, as far as the tokenizer has the two.
It stands for ``len(s) - 1`` **pairs**: pair ``k`` is the input ``s[k]`` with the label
``s[k + 1]``. So no label ever comes from another document, and every token, the first and
the closing one included, is predicted exactly once. Everything after this file counts in
pairs.
"""

import hashlib
import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ..dataset import PickledByFields
from ..errors import DataError
from ..io.atomic_io import build_folder
from ..tokenizers.base import SpecialIds, Tokenizer

# Characters handed to the tokenizer at once: enough for its threads, small in memory.
_CHUNK_CHARACTERS = 1 << 21
_COUNTED_AT_ONCE = 1 << 22
_FORMAT = 2
_METADATA = "corpus.json"

Item = TypeVar("Item")


class Texts(Protocol):
    """Texts that can be read again and again, and a stable hash of all of them."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal texts in equal order."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Reads the texts."""
        ...


@dataclass(frozen=True)
class TokenCorpus(PickledByFields):
    """The tokens of one split.

    Attributes:
      folder: The folder of the arrays.
      num_bytes: UTF-8 bytes of all documents; for bits per byte.
      vocab_size: The size of the vocabulary; every token is smaller.
      fingerprint: A stable hash of documents and tokenizer.
      num_unknown: The number of tokens for text unknown to the tokenizer.
    """

    folder: Path
    num_bytes: int
    vocab_size: int
    fingerprint: str
    num_unknown: int = 0

    @cached_property
    def tokens(self) -> np.ndarray:
        """All documents one after the other, uint16 or uint32 [num_tokens], memory-mapped."""
        return np.load(self.folder / "tokens.npy", mmap_mode="r")

    @property
    def token_counts(self) -> np.ndarray:
        """The number of occurrences of each token, int64 [V]."""
        return count_tokens(self.tokens, self.vocab_size)

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Where each document starts in ``tokens``, int64 [num_documents]."""
        return np.load(self.folder / "document_starts.npy")

    @cached_property
    def target_starts(self) -> np.ndarray:
        """The first pair of each document, int64 [num_documents]."""
        return self.document_starts - np.arange(self.num_documents)

    @cached_property
    def target_counts(self) -> np.ndarray:
        """The number of pairs of each document, int64 [num_documents], all positive."""
        return np.diff(self.target_starts, append=self.num_targets)

    @property
    def num_documents(self) -> int:
        """The number of documents with at least one pair."""
        return len(self.document_starts)

    @property
    def num_targets(self) -> int:
        """The number of (input, label) pairs: one less than tokens, for each document."""
        return len(self.tokens) - self.num_documents


def build_corpus(
    documents: Texts, tokenizer: Tokenizer, folder: str | PathLike[str]
) -> TokenCorpus:
    """Tokenizes documents, or opens the result of an earlier call.

    Args:
      documents: The texts of one split; read once, in chunks.
      tokenizer: Its fingerprint and that of the documents are the cache's key.
      folder: The cache; the corpus gets a folder of its own inside.

    Returns:
      The corpus.

    Raises:
      DataError: No document has a single pair, or the folder cannot be written.
    """
    key = corpus_key(_FORMAT, documents.fingerprint, tokenizer.fingerprint)

    def fill(temporary: Path) -> None:
        _write(documents, tokenizer, temporary, key)

    return open_corpus(build_folder(Path(folder) / key, fill))


def open_corpus(folder: str | PathLike[str]) -> TokenCorpus:
    """Opens a corpus that ``build_corpus`` wrote.

    Args:
      folder: The corpus's own folder (``TokenCorpus.folder``).

    Returns:
      The corpus.

    Raises:
      DataError: There is no corpus.
    """
    folder = Path(folder)
    metadata = read_metadata(folder)
    return TokenCorpus(folder, **metadata)


def _write(documents: Iterable[str], tokenizer: Tokenizer, folder: Path, key: str) -> None:
    tokens = TokenWriter(folder, tokenizer.vocab_size, tokenizer.special_ids.unk)
    num_bytes, seen, starts = 0, 0, array("q")
    with tokens:
        for chunk in chunks(documents, len):
            for ids in tokenizer.encode_batch(chunk):
                ids = _framed(ids, tokenizer.special_ids)
                if len(ids) > 1:
                    starts.append(tokens.append(ids))
            num_bytes += sum(len(text.encode()) for text in chunk)
            seen += len(chunk)
    if not starts:
        raise DataError(f"none of {seen} documents has two tokens: give a source with text")
    np.save(folder / "document_starts.npy", np.asarray(starts, np.int64))
    write_metadata(
        folder,
        {
            "num_bytes": num_bytes,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": key,
            "num_unknown": tokens.num_unknown,
        },
    )


def _framed(ids: list[int], special: SpecialIds) -> list[int]:
    before = [] if special.bos is None else [special.bos]
    after = [] if special.eos is None else [special.eos]
    return before + ids + after


def corpus_key(*metadata: object) -> str:
    """Names a corpus by everything that decides what is in it."""
    return hashlib.blake2b(" ".join(map(str, metadata)).encode(), digest_size=16).hexdigest()


def read_metadata(folder: Path) -> dict[str, Any]:
    """Reads what ``write_metadata`` wrote.

    Raises:
      DataError: There is no corpus.
    """
    try:
        return json.loads((folder / _METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"no corpus in {folder}: delete the folder and build it again") from None


def write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Writes the small metadata of a corpus; the last of its files."""
    (folder / _METADATA).write_text(json.dumps(metadata) + "\n", encoding="utf-8")


def chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups items for the tokenizer: enough for its threads, small in memory.

    Args:
      items: Texts, or lists of them.
      size: The number of characters of an item.

    Yields:
      Lists of items, none empty.
    """
    chunk: list[Item] = []
    filled = 0
    for item in items:
        chunk.append(item)
        filled += size(item)
        if filled >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, filled = [], 0
    if chunk:
        yield chunk


class TokenWriter:
    """Writes ``tokens.npy``, whose length is not known at the start; a context manager."""

    def __init__(self, folder: Path, vocab_size: int, unknown: int | None = None) -> None:
        """Makes the file.

        Args:
          folder: Of the corpus.
          vocab_size: Every token is smaller.
          unknown: The token to count, which stands for what the tokenizer does not know.
        """
        self._place = folder / "tokens.npy"
        self._raw = folder / "tokens.raw"
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._unknown = unknown
        self.position = 0
        self.num_unknown = 0

    def __enter__(self) -> "TokenWriter":
        self._file = self._raw.open("wb")
        return self

    def append(self, ids: Sequence[int]) -> int:
        """Appends tokens and returns the place of the first."""
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self.num_unknown += 0 if self._unknown is None else list(ids).count(self._unknown)
        self.position += len(ids)
        return self.position - len(ids)

    def __exit__(self, *fault: object) -> None:
        self._file.close()
        if fault[0] is None and self.position:
            _raw_to_npy(self._raw, self._place, self._dtype)


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts each token, int64 [V]; reads a mapped file part by part."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _COUNTED_AT_ONCE):
        some = tokens[start : start + _COUNTED_AT_ONCE]
        counts += np.bincount(some, minlength=vocab_size)
    return counts


def _raw_to_npy(raw: Path, place: Path, dtype: np.dtype) -> None:
    """Puts numpy's header before the tokens, whose number was not known at the start."""
    shape = (raw.stat().st_size // dtype.itemsize,)
    metadata = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    # Written and not mapped: on a full disk a map ends the process by a signal.
    with raw.open("rb") as source, place.open("wb") as target:
        np.lib.format.write_array_header_1_0(target, metadata)
        shutil.copyfileobj(source, target)
    raw.unlink()
