"""Stores the tokenized documents of a split on disk, as flat arrays that are memory-mapped.

A document is stored as ``s = [bos] + tokens + [eos]``. If the tokenizer has no BOS or EOS token,
this token is omitted. A document has ``len(s) - 1`` **target tokens**: target ``k`` is the label
``s[k + 1]`` of the input ``s[k]``. An input and its label always come from the same document, and
each token of the text and EOS is predicted exactly once. Packing counts target tokens.
"""

import hashlib
import json
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from ..common.atomic_io import build_folder
from ..common.errors import DataError, reported
from ..common.fields import require
from ..common.progress import SECONDS_BETWEEN_LINES, Progress
from ..dataset import PickledByFields
from ..tokenizers.base import Tokenizer

# Number of characters per call of the tokenizer, which keeps its threads busy and uses little
# memory.
_CHUNK_CHARACTERS = 1 << 21
_COUNTED_AT_ONCE = 1 << 22
_FORMAT = 2
_METADATA = "corpus.json"

Item = TypeVar("Item")


class Texts(Protocol):
    """Texts that can be read repeatedly, and that have a stable hash."""

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for equal texts in the same order."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Reads the texts."""
        ...


@dataclass(frozen=True)
class CorpusFolder(PickledByFields):
    """The base class of corpora. A corpus is a folder of arrays that are memory-mapped when used.

    Attributes:
      folder: The folder that contains the arrays.
      vocab_size: The size of the vocabulary; every token id is smaller.
      fingerprint: A stable hash of the texts, the tokenizer and, if they are used, the rules for
        splitting documents into sentences.
      num_unknown: The number of unknown tokens.
    """

    folder: Path
    vocab_size: int
    fingerprint: str
    num_unknown: int = 0

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Self:
        """Opens a corpus of this class.

        Args:
          folder: The folder of the corpus (``CorpusFolder.folder``).

        Raises:
          DataError: The folder has no corpus.
        """
        folder = Path(folder)
        remedy = "delete the folder and build it again"
        with reported(f"no corpus in {folder}", remedy, OSError, ValueError):
            metadata: dict[str, Any] = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
        return cls(folder=folder, **metadata)

    def array(self, name: str) -> np.ndarray:
        """Memory-maps an array, and returns a plain array, because slicing a ``memmap`` is slow."""
        return np.asarray(np.load(self.folder / f"{name}.npy", mmap_mode="r"))

    @cached_property
    def tokens(self) -> np.ndarray:
        """The concatenated tokens of all texts, uint16 or uint32 [num_tokens]."""
        return self.array("tokens")

    @property
    def token_counts(self) -> np.ndarray:
        """The number of occurrences of each token, int64 [V]."""
        counts = np.zeros(self.vocab_size, np.int64)
        # `bincount` converts its input to int64, so count the tokens in parts, which saves memory.
        for start in range(0, len(self.tokens), _COUNTED_AT_ONCE):
            some = self.tokens[start : start + _COUNTED_AT_ONCE]
            counts += np.bincount(some, minlength=self.vocab_size)
        return counts


@dataclass(frozen=True)
class TokenCorpus(CorpusFolder):
    """The tokens of one split.

    Attributes:
      num_bytes: The number of UTF-8 bytes in all documents, for computing bits per byte.
    """

    num_bytes: int = field(kw_only=True)

    @cached_property
    def document_starts(self) -> np.ndarray:
        """The start of each document in ``tokens``, int64 [num_documents]."""
        return self.array("document_starts")

    @cached_property
    def target_starts(self) -> np.ndarray:
        """The index of the first target token of each document, int64 [num_documents]."""
        # A document with n tokens has n - 1 target tokens.
        return self.document_starts - np.arange(self.num_documents)

    @cached_property
    def target_counts(self) -> np.ndarray:
        """The number of target tokens of each document, int64 [num_documents], all positive."""
        return np.diff(self.target_starts, append=self.num_targets)

    @property
    def num_documents(self) -> int:
        """The number of documents with at least one target token."""
        return len(self.document_starts)

    @property
    def num_targets(self) -> int:
        """The number of target tokens: the number of tokens minus the number of documents."""
        return len(self.tokens) - self.num_documents


def build_corpus(
    documents: Texts, tokenizer: Tokenizer, folder: str | PathLike[str]
) -> TokenCorpus:
    """Tokenizes documents, or opens the result of an earlier call.

    Args:
      documents: The texts of one split, which are read once, in chunks.
      tokenizer: The tokenizer. The cache key consists of the fingerprints of the tokenizer and the
          documents.
      folder: The cache folder; the corpus becomes a subfolder.

    Returns:
      The corpus.

    Raises:
      DataError: No document has a target token, or the folder cannot be written.
    """
    key = corpus_key(_FORMAT, documents.fingerprint, tokenizer.fingerprint)
    write = partial(_write, documents, tokenizer, key)
    return open_corpus(build_folder(Path(folder) / key, write))


def open_corpus(folder: str | PathLike[str]) -> TokenCorpus:
    """Opens a corpus that ``build_corpus`` has written.

    Args:
      folder: The folder of the corpus (``TokenCorpus.folder``).

    Returns:
      The corpus.

    Raises:
      DataError: The folder has no corpus.
    """
    return TokenCorpus.open(folder)


def _write(documents: Iterable[str], tokenizer: Tokenizer, key: str, folder: Path) -> None:
    special = tokenizer.special_ids
    num_bytes, seen, starts = 0, 0, array("q")
    with TokenWriter(folder, tokenizer.vocab_size, special.unk) as tokens:
        for chunk in chunks(documents, len):
            for ids in tokenizer.encode_batch(chunk):
                ids = [*special.before, *ids, *special.after]
                # A single token cannot be predicted, because it has no preceding input.
                if len(ids) > 1:
                    starts.append(tokens.append(ids))
            # Count the bytes of all texts, because bits per byte refers to texts, not to tokens.
            num_bytes += sum(len(text.encode()) for text in chunk)
            seen += len(chunk)
    require(starts, f"none of {seen} documents has two tokens: give a source with text", DataError)
    metadata = {
        "num_bytes": num_bytes,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": key,
        "num_unknown": tokens.num_unknown,
    }
    save_arrays(folder, metadata, document_starts=starts)


def corpus_key(*metadata: object) -> str:
    """Returns the folder name of a corpus: a hash of all inputs that determine its content."""
    return hashlib.blake2b(" ".join(map(str, metadata)).encode(), digest_size=16).hexdigest()


def save_arrays(folder: Path, metadata: dict[str, object], **arrays: Sequence[int]) -> None:
    """Writes the arrays of a corpus as int64, and then the metadata."""
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values, np.int64))
    (folder / _METADATA).write_text(json.dumps(metadata) + "\n", encoding="utf-8")


def chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Groups items into chunks for the tokenizer.

    A chunk is large enough to keep the tokenizer's threads busy, but uses little memory. A progress
    line is printed once per minute.

    Args:
      items: Texts, or lists of texts.
      size: A function that returns the number of characters in an item.

    Yields:
      Non-empty lists of items.
    """
    chunk: list[Item] = []
    filled = characters = 0
    next_line = time.monotonic() + SECONDS_BETWEEN_LINES
    for num_read, item in enumerate(items, 1):
        chunk.append(item)
        filled += size(item)
        if filled >= _CHUNK_CHARACTERS:
            # The caller tokenizes this chunk before requesting the next chunk.
            yield chunk
            characters += filled
            chunk, filled = [], 0
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + SECONDS_BETWEEN_LINES
                Progress().log(
                    f"tokenized {num_read:,} texts, {characters / 1e6:,.0f} million characters"
                )
    if chunk:
        yield chunk


class TokenWriter:
    """A context manager that writes ``tokens.npy`` when the final length is not known in advance.

    Attributes:
      position: The number of tokens written so far.
      num_unknown: The number of unknown tokens written so far.
    """

    def __init__(self, folder: Path, vocab_size: int, unknown: int | None = None) -> None:
        """Creates the writer.

        Args:
          folder: The folder of the corpus.
          vocab_size: The size of the vocabulary; every token id is smaller.
          unknown: The id of the unknown token, whose occurrences are counted. If None, nothing is
            counted.
        """
        self._raw = folder / "tokens.raw"
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._unknown = unknown
        self.position = 0
        self.num_unknown = 0

    def __enter__(self) -> "TokenWriter":
        self._file = self._raw.open("wb")
        return self

    def append(self, ids: Sequence[int]) -> int:
        """Appends tokens, and returns the position of the first appended token."""
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self.num_unknown += 0 if self._unknown is None else list(ids).count(self._unknown)
        self.position += len(ids)
        return self.position - len(ids)

    def __exit__(self, *fault: object) -> None:
        self._file.close()
        # After an error or without tokens, the caller deletes the folder.
        if fault[0] is not None or not self.position:
            return
        # In a .npy file, the header precedes the tokens, but their number is known only now.
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._raw.stat().st_size // self._dtype.itemsize,),
        }
        # Copy the tokens instead of memory-mapping the file, because on a full disk, a write to
        # mapped memory kills the process.
        with self._raw.open("rb") as tokens, self._raw.with_suffix(".npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            shutil.copyfileobj(tokens, file)
        self._raw.unlink()
