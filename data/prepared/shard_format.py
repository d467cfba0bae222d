"""A folder of prepared rows: what lies where, and the facts that describe it.

=============================  ======================================================
``settings.json``              all that decides the rows, but for the input files
``tokenizer/``                 the tokenizer
``shards/NAME/``               what was made of one input file, which NAME comes from:
``  …/train.array_record``     the rows to train on, a record each (see ``packed_rows``)
``  …/validation.array_record``  the rows held out
``  …/token_counts.npy``       how often each token is in either, int64 [2, V]
``  …/facts.json``             of what input, and how much
``token_counts.npy``           of all shards
``manifest.json``              all facts, the last to be written
=============================  ======================================================

A split that got no row has no file.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import DataError
from ..sources.documents import Split, check_validation_fraction
from ..sources.source_names import Source

FORMAT = 1
SPLITS: tuple[Split, ...] = ("train", "validation")
SETTINGS, TOKENIZER, SHARDS = "settings.json", "tokenizer", "shards"
FACTS, COUNTS, MANIFEST = "facts.json", "token_counts.npy", "manifest.json"

_READ_AT_ONCE = 1 << 20
_END = 1 << 16
_LONGEST_STEM = 40


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the rows of a file, and the source that the files are of.

    Attributes:
        source: As the user named it.
        tokenizer: Its fingerprint.
        vocab_size: Every token is smaller.
        length: Pairs of input and label in a row, T.
        packing: How documents share rows: ``concat`` or ``first-fit``.
        validation_fraction: The share of documents held out, by the hash of each.
        format: Of the records.
    """

    source: str
    tokenizer: str
    vocab_size: int
    length: int
    packing: Literal["concat", "first-fit"]
    validation_fraction: float
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError(f"length {self.length} must be at least 1")
        check_validation_fraction(self.validation_fraction)
        if self.format != FORMAT:
            raise DataError(f"rows of format {self.format} are not those of this version, {FORMAT}")


@dataclass(frozen=True)
class RowsFile:
    """The rows of one split of one input file.

    Attributes:
        rows: The number of records.
        documents: How many documents are in them.
        tokens: Pairs of input and label.
        text_bytes: UTF-8 bytes of the documents.
        file_bytes: The size of the file.
        sha256: Of the file, hexadecimal.
        end_sha256: Of its last 64 KiB, where ArrayRecord notes the place of every record, so that
            another file of the same size is known without reading all of it. (A record has a
            checksum of its own, which is looked at when it is read.)
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
    """What was made of one input file.

    Attributes:
        name: Of its folder.
        input: The name of the source that is this file alone.
        input_sha256: Of what was read, hexadecimal.
        counts_sha256: Of the file of token counts.
        splits: The rows of each split that has any.
    """

    name: str
    input: str
    input_sha256: str
    counts_sha256: str
    splits: dict[str, RowsFile]


def shard_name(part: Source) -> str:
    """Names the shard of an input file: the file's own name, and a hash of all of its path."""
    stem = re.sub(r"[^\w.-]+", "-", Path(part.location).name)[:_LONGEST_STEM].strip(".-")
    whole = hashlib.blake2b(part.name.encode("utf-8", "surrogateescape"), digest_size=6)
    return f"{stem}-{whole.hexdigest()}"


def rows_path(shard_folder: Path, split: str) -> Path:
    """Where the rows of a split lie."""
    return shard_folder / f"{split}.array_record"


def file_sha256(path: Path) -> str:
    """Hashes a file, hexadecimal.

    Raises:
        DataError: It cannot be read.
    """
    whole = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_AT_ONCE):
                whole.update(block)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    return whole.hexdigest()


def end_sha256(path: Path) -> str:
    """Hashes the last 64 KiB of a file, hexadecimal."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END))
        return hashlib.sha256(file.read()).hexdigest()


def to_json(facts: Any) -> bytes:
    """Writes facts, always the same bytes."""
    return (json.dumps(facts, indent=1) + "\n").encode()


def read_settings(folder: Path) -> Settings | None:
    """Reads the settings of a folder; None if it has none that this version understands."""
    return _read(folder / SETTINGS, lambda fields: Settings(**fields))


def read_shard(shard_folder: Path) -> Shard | None:
    """Reads the facts of a shard; None if it is not whole."""
    return _read(shard_folder / FACTS, _shard)


def read_manifest(folder: Path) -> list[Shard] | None:
    """Reads the facts of all shards; None if preparing did not come to its end."""
    return _read(folder / MANIFEST, lambda fields: [_shard(one) for one in fields["shards"]])


def shard_fields(shard: Shard) -> dict[str, Any]:
    """The facts of a shard as JSON values."""
    return dataclasses.asdict(shard)


def files_of(shards: list[Shard], split: str) -> Iterator[tuple[Shard, RowsFile]]:
    """The files of a split, in order."""
    yield from ((shard, shard.splits[split]) for shard in shards if split in shard.splits)


def _shard(fields: dict[str, Any]) -> Shard:
    splits = {name: RowsFile(**facts) for name, facts in fields["splits"].items()}
    return Shard(**{**fields, "splits": splits})


def _read(path: Path, make: Any) -> Any:
    try:
        return make(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None
