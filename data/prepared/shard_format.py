"""Defines the layout of a folder of prepared sequences, and summaries that describe its files.

=============================  ======================================================
``settings.json``              everything that determines the sequences, except the input
``tokenizer/``                 the tokenizer
``shards/NAME/``               the output for one input file; NAME is derived from its path:
``  …/train.array_record``     the training sequences, one per record (see ``packed_sequences``)
``  …/validation.array_record``  the sequences held out for validation
``  …/token_counts.npy``       the occurrences of each token in each split, int64 [2, V]
``  …/facts.json``             a summary: the input file, the sizes and the hashes
``token_counts.npy``           the sum of the counts of all shards
``manifest.json``              settings, versions and all summaries; written last
=============================  ======================================================

If a split has no sequences, it has no file.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ..common.errors import reported
from ..common.fields import PositiveInt, Rate, check_value, require_one_of
from ..common.files import File
from ..filters.selection import Selector
from ..sources.hash_split import Split
from ..sources.source_names import Source

FORMAT = 1
SPLITS: tuple[Split, ...] = ("train", "validation")
SETTINGS, TOKENIZER, SHARDS = "settings.json", "tokenizer", "shards"
SUMMARY, COUNTS, MANIFEST = "facts.json", "token_counts.npy", "manifest.json"

# ArrayRecord stores its index at the end of a file.
_END_BYTES = 1 << 16
_MAX_STEM_LENGTH = 40

_Content = TypeVar("_Content")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The name of the source, and the settings that determine the sequences made from its files.

    Attributes:
      source: The name of the source, as the user wrote it.
      tokenizer: The fingerprint of the tokenizer.
      vocab_size: The size of the vocabulary; every token id is smaller.
      length: The number of target tokens in a sequence, T.
      packing: How documents fill sequences: ``concat`` or ``first-fit``.
      validation_fraction: The fraction of documents held out for validation. The hash of a document
        decides whether it is held out.
      keep: The name and fingerprint of the selector of documents; empty without a selector.
      format: The version of the record format.
      selector: The selector itself, which is not written to files.
    """

    source: str
    tokenizer: str
    vocab_size: int
    length: int
    packing: Literal["concat", "first-fit"]
    validation_fraction: float
    keep: str = ""
    format: int = FORMAT
    selector: Selector | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_value("length", self.length, PositiveInt)
        check_value("validation_fraction", self.validation_fraction, Rate)
        # Reject a folder in the format of another version before reading its records.
        require_one_of("format", self.format, [FORMAT])

    def written(self) -> dict[str, object]:
        """Returns the settings in the form that is written to files."""
        # `keep` identifies the selector, which itself cannot be written as JSON.
        return {name: value for name, value in vars(self).items() if name != "selector"}


@dataclass(frozen=True)
class RowsFile:
    """A summary of the sequences of one split of one input file.

    Attributes:
      rows: The number of sequences, which equals the number of records.
      documents: The number of documents in the sequences.
      tokens: The number of target tokens.
      text_bytes: The number of UTF-8 bytes in the documents.
      file_bytes: The size of the file in bytes.
      sha256: The hash of the file, hexadecimal.
      end_sha256: The hash of the last 64 KiB of the file, hexadecimal. ArrayRecord stores the
        position of every record at the end of a file, so this hash detects a different file of the
        same size without reading the whole file. (Each record also has a checksum, which is
        verified on reading.)
    """

    rows: int
    documents: int
    tokens: int
    text_bytes: int
    file_bytes: int
    sha256: str
    end_sha256: str


@dataclass(frozen=True)
class Shard:
    """A summary of the output for one input file.

    Attributes:
      name: The name of the shard's folder.
      input: The name of a source that consists of the input file only.
      input_sha256: The hash of the input, hexadecimal.
      counts_sha256: The hash of the file that contains the token counts, hexadecimal.
      splits: The summary of each split that has at least one sequence.
      left_out: The number of documents left out, by reason, such as ``the filter score>=3``.
    """

    name: str
    input: str
    input_sha256: str
    counts_sha256: str
    splits: dict[str, RowsFile]
    left_out: dict[str, int] = field(default_factory=dict)


def shard_name(part: Source) -> str:
    """Returns the name of a file's shard: the name of the file and a hash of its whole path."""
    # Keep the beginning of the file name for readability. The hash makes the name unique.
    stem = re.sub(r"[^\w.-]+", "-", Path(part.location).name)[:_MAX_STEM_LENGTH].strip(".-")
    # File names need not be UTF-8; `surrogateescape` keeps their bytes.
    hasher = hashlib.blake2b(part.name.encode("utf-8", "surrogateescape"), digest_size=6)
    return f"{stem}-{hasher.hexdigest()}"


def rows_path(shard_folder: Path, split: str) -> Path:
    """Returns the path of the file that contains the sequences of a split."""
    return shard_folder / f"{split}.array_record"


def file_sha256(path: File) -> str:
    """Hashes a file; returns hexadecimal digits.

    Raises:
      DataError: The file cannot be read.
    """
    with reported(f"cannot read {path}", "check the path", OSError), path.open("rb") as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def end_sha256(path: Path) -> str:
    """Hashes the last 64 KiB of a file; returns hexadecimal digits."""
    with path.open("rb") as file:
        # A hash of the last bytes detects a changed file without reading the whole file.
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        return hashlib.sha256(file.read()).hexdigest()


def to_json(summary: object) -> bytes:
    """Encodes a summary as JSON; equal summaries are encoded as equal bytes."""
    return (json.dumps(summary, indent=1) + "\n").encode()


def read_settings(folder: Path) -> Settings | None:
    """Reads the settings of a folder, or returns None if this version cannot read them."""
    return _read(folder / SETTINGS, lambda fields: Settings(**fields))


def read_shard(shard_folder: Path) -> Shard | None:
    """Reads the summary of a shard, or returns None if the shard is incomplete."""
    return _read(shard_folder / SUMMARY, _shard)


def read_manifest(folder: Path) -> list[Shard] | None:
    """Reads the summaries of all shards, or returns None if the folder is incomplete."""
    return _read(folder / MANIFEST, lambda fields: list(map(_shard, fields["shards"])))


def files_of(shards: list[Shard], split: str) -> Iterator[tuple[Shard, RowsFile]]:
    """Yields each shard that has a file for a split, together with the summary of this file."""
    yield from ((shard, shard.splits[split]) for shard in shards if split in shard.splits)


def _shard(fields: dict[str, Any]) -> Shard:
    splits = {name: RowsFile(**summary) for name, summary in fields["splits"].items()}
    return Shard(**{**fields, "splits": splits})


def _read(path: Path, make: Callable[[dict[str, Any]], _Content]) -> _Content | None:
    # Treat missing files, malformed files and files with other content alike.
    try:
        return make(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None
