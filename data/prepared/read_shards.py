"""Reads prepared sequences for training; Grain provides random access to the ArrayRecord files.

Every epoch has the same sequences in a different order. By default a run trains on the first of
``SPLITS`` and validates on the second. A run with a separate validation source trains on both.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from ..common.errors import DataError, reported
from ..common.fields import require, require_value
from ..common.files import path_inside
from ..dataset import DataSplit, PickledByFields
from ..packing.packed_sequences import decode, packed_arrays
from ..sources.source_names import Source, parse_sources, split_mixture
from ..tokenizers.base import Tokenizer
from ..tokenizers.load import load_tokenizer
from .shard_format import (
    COUNTS,
    FORMAT,
    MANIFEST,
    SHARDS,
    SPLITS,
    TOKENIZER,
    RowsFile,
    Settings,
    Shard,
    end_sha256,
    files_of,
    read_manifest,
    read_settings,
    rows_path,
)


class _File(NamedTuple):
    """A file and its number of sequences, so that Grain need not open the file to count them."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


class _Prepared(NamedTuple):
    """The files of the requested splits of a folder."""

    files: list[tuple[Path, RowsFile]]
    token_counts: np.ndarray
    length: int


@dataclass(frozen=True)
class PreparedExamples(PickledByFields):
    """The sequences in prepared files; see ``dataset.ExampleSource``.

    Attributes:
      files: The name of each file and its number of sequences, in order.
      length: The number of tokens in a sequence, T.
      vocab_size: The size of the vocabulary; every token id is smaller.
    """

    files: tuple[tuple[str, int], ...]
    length: int
    vocab_size: int

    @property
    def num_examples(self) -> int:
        """The number of sequences."""
        return self._ends[-1]

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Reads one sequence, which is the same in every epoch; see ``packed_arrays``.

        Raises:
          DataError: The file is missing or damaged.
        """
        try:
            record = self._records[index]
        except (OSError, ValueError, IndexError, RuntimeError) as error:
            name, _ = self.files[bisect_right(self._ends, index)]
            raise DataError(f"{name} is damaged ({error}): {_AGAIN}") from None
        return packed_arrays(decode(record, self.vocab_size), self.length)

    @cached_property
    def _ends(self) -> list[int]:
        """The total number of sequences up to the end of each file."""
        return list(accumulate(rows for _, rows in self.files))

    @cached_property
    def _records(self) -> Sequence[bytes]:
        # Import Grain only here, because opening a prepared folder does not need it.
        import grain

        files = [_File(name, 0, rows, rows) for name, rows in self.files]
        # Grain accepts any object with these four attributes, although it declares a narrower type.
        source = grain.sources.ArrayRecordDataSource(cast(list[str], files))
        return cast(Sequence[bytes], source)


@dataclass(frozen=True)
class PreparedContent:
    """Statistics of the prepared sequences.

    Attributes:
      num_bytes: The number of UTF-8 bytes in all documents, which bits per byte needs.
      token_counts: The number of occurrences of each token, int64 [V].
    """

    num_bytes: int
    token_counts: np.ndarray


_AGAIN = "run the same flaxzoo prepare again, which repairs it"


def is_prepared(source: str) -> bool:
    """Returns whether a source is a folder of prepared sequences.

    Raises:
      DataError: The name is not a source (see ``parse_source``), joins a prepared folder with
        another source, or mixes it with text. Only prepared folders can be mixed with each other.
    """
    kinds = [one.kind for one in parse_sources(source)]
    if "prepared" not in kinds:
        return False
    problem = f"{source!r} joins prepared sequences: prepare the joined texts into one folder"
    require(len(kinds) == 1 or split_mixture(source), problem, DataError)
    problem = f"{source!r} mixes prepared sequences and text: prepare the text as well"
    require({*kinds} == {"prepared"}, problem, DataError)
    return True


def prepared_tokenizer(source: str) -> Tokenizer:
    """Loads the tokenizer of a prepared folder.

    Raises:
      DataError: The folder has no prepared sequences.
    """
    folder = _folder_of(parse_sources(source)[0])
    _open(folder)
    return load_tokenizer(folder / TOKENIZER)


def prepared_split(
    source: str, splits: Sequence[str], tokenizer: Tokenizer, requested: Mapping[str, object]
) -> DataSplit:
    """Opens the sequences of a prepared folder.

    Args:
      source: ``prepared:FOLDER``, or several such sources.
      splits: The splits to read, in order; each is one of ``SPLITS``.
      tokenizer: The tokenizer of the run.
      requested: The settings of the run's data, by name. The folder must have the same settings.

    Returns:
      The split, whose examples are read from the files only when they are accessed.

    Raises:
      DataError: The folder has no prepared sequences, or none in these splits; it was prepared
        with other settings or a different tokenizer; or a file is missing or has changed.
    """
    read = [_read(_folder_of(one), splits, tokenizer, requested) for one in parse_sources(source)]
    entries = [entry for part in read for entry in part.files]
    files = [file for _, file in entries]
    counts = np.sum([part.token_counts for part in read], axis=0)
    paths = tuple((str(path), file.rows) for path, file in entries)
    rows = PreparedExamples(paths, read[0].length, tokenizer.vocab_size)
    content = PreparedContent(sum(file.text_bytes for file in files), counts)
    documents, tokens = (sum(getattr(x, name) for x in files) for name in ("documents", "tokens"))
    summary = (
        f"{documents:,} documents, {content.num_bytes:,} bytes, {tokens:,} tokens to predict, in "
        f"{rows.num_examples:,} prepared sequences"
    )
    # Warn in the log about text that the tokenizer could not represent.
    unknown = tokenizer.special_ids.unk
    if unknown is not None and counts[unknown]:
        summary += f"; {counts[unknown]:,} of {counts.sum():,} tokens are unknown to the tokenizer"
    # The fingerprint depends on the record format, the tokenizer and the content of the files.
    hasher = hashlib.blake2b(f"{FORMAT} {tokenizer.fingerprint}".encode(), digest_size=16)
    for file in files:
        hasher.update(file.sha256.encode())
    ratio = documents / tokens
    return DataSplit(rows, content, hasher.hexdigest(), summary, documents_per_token=ratio)


def _read(
    folder: Path, splits: Sequence[str], tokenizer: Tokenizer, requested: Mapping[str, object]
) -> _Prepared:
    """Checks a folder, and returns the files of the requested splits."""
    settings, shards = _open(folder)
    _check_settings(folder, settings, tokenizer, requested)
    # The files of the splits, first in the order of `splits`, then in the order of the input files.
    files = [
        (rows_path(folder / SHARDS / shard.name, split), file)
        for split in splits
        for shard, file in files_of(shards, split)
    ]
    remedy = "name data.validation, or prepare another folder with a --validation-fraction above 0"
    require(files, f"{folder} has no sequences for {splits[0]}: {remedy}", DataError)
    # Check only the sizes and the ends of the files, which is fast. Records have checksums.
    for path, file in files:
        _check_file(folder, path, file)
    with reported(f"{folder / COUNTS} is missing or damaged", _AGAIN, OSError, ValueError):
        counts_by_split = np.load(folder / COUNTS)
    counts = counts_by_split[list(map(SPLITS.index, splits))].sum(0)
    return _Prepared(files, counts, settings.length)


def _folder_of(source: Source) -> Path:
    return Path(source.location).expanduser()


def _open(folder: Path) -> tuple[Settings, list[Shard]]:
    settings = require_value(
        read_settings(folder),
        f"no prepared sequences in {folder}: make them by flaxzoo prepare SOURCE {folder} "
        "--tokenizer PATH --length T",
        DataError,
    )
    damaged = (folder / MANIFEST).exists()
    state = "has a damaged manifest, or one of another version" if damaged else "is partly prepared"
    problem = f"{folder} {state}: run the same flaxzoo prepare again"
    return settings, require_value(read_manifest(folder), problem, DataError)


def _check_settings(
    folder: Path, settings: Settings, tokenizer: Tokenizer, requested: Mapping[str, object]
) -> None:
    # The message names the option of the training run and the option of `prepare`, because the user
    # can change either of them.
    for name, value in requested.items():
        stored, option = getattr(settings, name), name.replace("_", "-")
        require(
            stored == value,
            f"{folder} was prepared with {name} {stored!r}, and data.{name} is {value!r}: train "
            f"with data.{name} {stored}, or prepare another folder with --{option} {value}",
            DataError,
        )
    require(
        tokenizer.fingerprint == settings.tokenizer,
        f"{folder} was prepared with another tokenizer than the given one "
        f"({tokenizer.kind}, {tokenizer.vocab_size:,} tokens): prepare another folder with "
        f"--tokenizer, or leave data.tokenizer.path out",
        DataError,
    )


def _check_file(folder: Path, path: Path, file: RowsFile) -> None:
    # A damaged or untrusted manifest must not refer to files outside the folder.
    inside = path_inside(folder, str(path.relative_to(folder))) is not None
    problem = f"{folder / MANIFEST} names {path}, which is outside of it: {_AGAIN}"
    require(inside, problem, DataError)
    require(path.is_file(), f"{path} is missing: {_AGAIN}", DataError)
    # The hash of the end of a file detects a changed file without reading the whole file.
    same = path.stat().st_size == file.file_bytes and end_sha256(path) == file.end_sha256
    require(same, f"{path} has changed since it was prepared: {_AGAIN}", DataError)
