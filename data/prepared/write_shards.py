"""Converts each text file to a shard of packed sequences.

The bytes of a shard depend only on the file and the settings, not on the machine or the number of
workers. A complete shard is not written again. Any process that can access the input files and the
folder may therefore call ``prepare_shard``, and the order of the calls does not matter.
``apache_beam`` calls it in many workers. ``finish`` writes the manifest after all calls.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..common.atomic_io import build_folder, new_folder, write_file
from ..common.errors import DataError
from ..common.fields import require
from ..common.files import named_file
from ..corpora.token_corpus import TokenCorpus, build_corpus
from ..filters.conditions import LeftOut, empty_reason
from ..filters.selection import Selector, count_left_out, decisions
from ..packing.packed_sequences import encode, gather_tokens, require_bos_eos
from ..packing.packing import Packing, Span, first_fit, split_once
from ..sources.hash_split import HashSplit, Split, text_digest
from ..sources.read_documents import documents_in
from ..sources.source_names import Source, input_files
from ..tokenizers.base import Tokenizer
from ..tokenizers.load import load_tokenizer
from .shard_format import (
    COUNTS,
    MANIFEST,
    SETTINGS,
    SHARDS,
    SPLITS,
    SUMMARY,
    TOKENIZER,
    RowsFile,
    Settings,
    Shard,
    end_sha256,
    file_sha256,
    files_of,
    read_settings,
    read_shard,
    rows_path,
    shard_name,
    to_json,
)

# Training reads single records in random order, so each group must contain only one record.
_WRITER_OPTIONS = "group_size:1"


Workers = Callable[[Sequence[Source], Path, Settings], None]
"""A function that calls ``prepare_shard`` for each file. Its arguments are the files, the folder
and the settings of the folder."""


def in_order(parts: Sequence[Source], folder: Path, settings: Settings) -> None:
    """Writes the shards sequentially, and stops at the first error."""
    for part in parts:
        prepare_shard(part, folder, settings)


def prepare(
    source: str,
    folder: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    length: int,
    packing: Packing = "concat",
    validation_fraction: float = 0.05,
    selector: Selector | None = None,
    workers: Workers = in_order,
) -> list[Shard]:
    """Creates a folder of training sequences, or adds the shards that an existing folder lacks.

    Args:
      source: The name of the text files, see ``source_names``.
      folder: The folder. It may already exist if it was created with the same source and settings.
      tokenizer: The tokenizer's folder or file, see ``load_tokenizer``.
      length: The number of target tokens in a sequence, T.
      packing: ``concat`` or ``first-fit``.
      validation_fraction: The fraction of documents held out for validation, in [0, 1). The hash of
        a document decides whether it is held out.
      selector: Decides which documents are kept. If None, all documents are kept.
      workers: The function that writes the shards.

    Returns:
      The summaries of the shards, in the order of the input files.

    Raises:
      DataError: The source has no files, the tokenizer cannot be read, the folder has other
        settings, or ``finish`` raises.
    """
    folder, parts = Path(folder), input_files(source)
    loaded = load_tokenizer(tokenizer)
    require_bos_eos(loaded)
    # A later call can complete the folder only if it has the same settings.
    settings = Settings(
        source=source,
        tokenizer=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        length=length,
        packing=packing,
        validation_fraction=validation_fraction,
        keep=f"{selector.name} {selector.fingerprint}" if selector is not None else "",
        selector=selector,
    )
    create_folder(folder, settings, loaded)
    workers(parts, folder, settings)
    return finish(folder, parts, settings)


def create_folder(folder: Path, settings: Settings, tokenizer: Tokenizer) -> None:
    """Creates the folder, or checks that an existing folder has the same settings.

    Raises:
      DataError: The folder has other settings or other content, or cannot be written.
    """

    def fill(temporary: Path) -> None:
        tokenizer.save(temporary / TOKENIZER)
        (temporary / SHARDS).mkdir()
        (temporary / SETTINGS).write_bytes(to_json(settings.written()))

    existing = read_settings(folder)
    if existing is None:
        new_folder(folder, fill)
        return
    # The folder exists: continue only if the settings are the same. Repair a damaged tokenizer.
    old, new = existing.written(), settings.written()
    changed = ", ".join(f"{key} {old[key]!r} → {new[key]!r}" for key in new if old[key] != new[key])
    problem = f"{folder} was prepared with other settings ({changed})"
    require(not changed, f"{problem}: give the same settings, or another folder", DataError)
    intact = False
    with contextlib.suppress(DataError):
        intact = load_tokenizer(folder / TOKENIZER).fingerprint == settings.tokenizer
    if not intact:
        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
        build_folder(folder / TOKENIZER, tokenizer.save)


def prepare_shard(part: Source, folder: Path, settings: Settings) -> Shard:
    """Writes the shard of one input file, unless the shard exists and is intact.

    Args:
      part: The input file, which is one of the results of ``input_files``.
      folder: The folder of all shards, see ``create_folder``.
      settings: The settings of the folder.

    Returns:
      The summary of the shard.

    Raises:
      DataError: The file is missing, incomplete or not UTF-8, lacks a field, or changes while it is
        being read; or the shard cannot be written.
    """
    path = folder / SHARDS / shard_name(part)
    # Check before reading the input, because another worker may finish the shard in the meantime.
    existed = path.exists()
    try:
        digest = _input_digest(part)
    except DataError:
        # Delete the shard of a file that can no longer be read.
        shutil.rmtree(path, ignore_errors=True)
        raise
    shard = read_shard(path)
    # Keep the shard if it is complete, has the same input, and its hashes show no damage.
    if shard is not None and shard.input_sha256 == digest and _is_undamaged(path, shard):
        return shard
    if existed:
        shutil.rmtree(path)
    tokenizer = _tokenizer(folder / TOKENIZER, settings.tokenizer)

    def fill(temporary: Path) -> None:
        shard = _fill(temporary, part=part, digest=digest, settings=settings, tokenizer=tokenizer)
        # The digest is valid for this shard only if the file did not change while it was read.
        problem = f"{part.location} changed while it was read: start again"
        require(_input_digest(part) == digest, problem, DataError)
        (temporary / SUMMARY).write_bytes(to_json(dataclasses.asdict(shard)))

    try:
        shard = read_shard(build_folder(path, fill))
    except OSError as error:
        # If the disk is full, NumPy raises an error without a message.
        reason = error.strerror or "the disk may be full"
        raise DataError(f"cannot write {path} ({reason}): run the command again") from error
    assert shard is not None
    return shard


def finish(folder: Path, parts: Sequence[Source], settings: Settings) -> list[Shard]:
    """Writes the manifest when every shard is complete.

    Args:
      folder: The folder of all shards.
      parts: The input files.
      settings: The settings of the folder.

    Returns:
      The summaries of the shards, in the order of the input files.

    Raises:
      DataError: A shard is missing, or a split has no sequence. If a shard is missing, the message
        is the error of ``prepare_shard``, or says that the workers did not write the shard.
    """
    shards: list[Shard] = []
    counts = np.zeros((len(SPLITS), settings.vocab_size), np.int64)
    for part in parts:
        path = folder / SHARDS / shard_name(part)
        shards.append(read_shard(path) or _missing(part, folder, parts, settings))
        counts += np.load(path / COUNTS)
    _check_splits(shards, settings)
    # Delete partial output of killed workers, and shards of files that no longer exist.
    names = {shard.name for shard in shards}
    for entry in (folder / SHARDS).iterdir():
        if entry.name not in names:
            shutil.rmtree(entry, ignore_errors=True)
    manifest = {
        **settings.written(),
        "left_out": total_left_out(shards),
        "shards": list(map(dataclasses.asdict, shards)),
    }
    # Write the manifest last, because its existence marks the folder as complete.
    content = io.BytesIO()
    np.save(content, counts)
    write_file(folder / COUNTS, content.getvalue())
    write_file(folder / MANIFEST, to_json(manifest))
    return shards


def _missing(part: Source, folder: Path, parts: Sequence[Source], settings: Settings) -> NoReturn:
    """Raises an error that says why the workers did not write a shard."""
    names = list(map(shard_name, parts))
    missing = sum(read_shard(folder / SHARDS / name) is None for name in names)
    # If the input file has an error, this call raises it.
    prepare_shard(part, folder, settings)
    raise DataError(
        f"{missing} of {len(parts)} shards are not in {folder} after the workers have ended, "
        "but can be made here: every worker must see that folder and the texts under these names"
    )


def _input_digest(part: Source) -> str:
    if part.kind != "builtin":
        return file_sha256(named_file(part.location))
    # A built-in text is not stored in a file, so hash its documents instead.
    hasher = hashlib.sha256()
    for text in documents_in(part):
        hasher.update(text_digest(text))
    return hasher.hexdigest()


def _is_undamaged(folder: Path, shard: Shard) -> bool:
    hashes = {rows_path(folder, split): file.sha256 for split, file in shard.splits.items()}
    hashes[folder / COUNTS] = shard.counts_sha256
    try:
        return all(file_sha256(path) == sha256 for path, sha256 in hashes.items())
    except DataError:
        return False


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path, fingerprint: str) -> Tokenizer:
    """Loads the tokenizer, once per worker."""
    tokenizer = load_tokenizer(folder)
    problem = f"the tokenizer in {folder} has changed: prepare into another folder"
    require(tokenizer.fingerprint == fingerprint, problem, DataError)
    return tokenizer


@dataclass(frozen=True)
class _SplitTexts:
    """The documents of an input file that belong to a split and are not dropped."""

    part: Source
    split: Split
    division: HashSplit
    fingerprint: str
    dropped: frozenset[bytes] = frozenset()

    def __iter__(self) -> Iterator[str]:
        for text in documents_in(self.part):
            digest = text_digest(text)
            if self.division.split(digest) == self.split and digest not in self.dropped:
                yield text


def _fill(
    folder: Path, *, part: Source, digest: str, settings: Settings, tokenizer: Tokenizer
) -> Shard:
    counts = np.zeros((len(SPLITS), settings.vocab_size), np.int64)
    division = HashSplit.of_each(settings.validation_fraction)
    splits: dict[str, RowsFile] = {}
    # Decide once, for both splits, which documents are dropped.
    dropped, left_out = _dropped(part, settings.selector)
    # Tokenize and pack each split. The corpus is deleted after its sequences are written.
    for row, split in enumerate(SPLITS):
        texts = _SplitTexts(part, split, division, digest, dropped)
        if next(iter(texts), None) is None:
            continue
        corpus = build_corpus(texts, tokenizer, folder / "corpus")
        splits[split] = _write_rows(rows_path(folder, split), corpus, split, settings)
        counts[row] = corpus.token_counts
        shutil.rmtree(folder / "corpus")
    np.save(folder / COUNTS, counts)
    sha256 = file_sha256(folder / COUNTS)
    return Shard(shard_name(part), part.name, digest, sha256, splits, dict(left_out))


def _dropped(part: Source, selector: Selector | None) -> tuple[frozenset[bytes], LeftOut]:
    """Returns the digests of documents that a selector drops, and counts of all omitted ones."""
    left_out = LeftOut()
    texts = documents_in(part, left_out)
    if selector is None:
        # Read the texts only to count omissions; without conditions, no document is left out.
        collections.deque(texts if part.conditions else (), maxlen=0)
        return frozenset(), left_out
    dropped = [text_digest(text) for text, keep in decisions(selector, texts) if not keep]
    count_left_out(left_out, selector, len(dropped))
    return frozenset(dropped), left_out


def _write_rows(path: Path, corpus: TokenCorpus, split: Split, settings: Settings) -> RowsFile:
    from array_record.python.array_record_module import ArrayRecordWriter

    rows = 0
    try:
        with contextlib.closing(ArrayRecordWriter(str(path), _WRITER_OPTIONS)) as writer:
            for spans in _packed(corpus, split, settings):
                writer.write(encode(gather_tokens(corpus, spans), settings.vocab_size))
                rows += 1
    except RuntimeError as error:
        # Only the writer raises this error, for example if the disk is full.
        raise OSError(None, str(error)) from error
    return RowsFile(
        rows=rows,
        documents=corpus.num_documents,
        tokens=corpus.num_targets,
        text_bytes=corpus.num_bytes,
        file_bytes=path.stat().st_size,
        sha256=file_sha256(path),
        end_sha256=end_sha256(path),
    )


def _packed(corpus: TokenCorpus, split: Split, settings: Settings) -> Iterator[Sequence[Span]]:
    """Yields the spans of each sequence of a split; every target token is in exactly one span."""
    length = settings.length
    # Validation sequences are always split, so they do not depend on the packing for training.
    if split == "validation" or settings.packing == "concat":
        for row in range(-(-corpus.num_targets // length)):
            yield split_once(row, length, corpus.target_starts, corpus.num_targets)
        return
    spans, sequence_starts = first_fit(corpus.target_counts, length)
    for row in range(len(sequence_starts) - 1):
        yield spans[sequence_starts[row] : sequence_starts[row + 1]].tolist()


def total_left_out(shards: Sequence[Shard]) -> dict[str, int]:
    """Returns the total number of documents that all shards left out, for each reason."""
    return dict(sum((LeftOut(shard.left_out) for shard in shards), LeftOut()))


def _check_splits(shards: list[Shard], settings: Settings) -> None:
    reason = empty_reason(LeftOut(total_left_out(shards)))
    problem = f"no text in {settings.source!r}: {reason}"
    require(any(shard.splits for shard in shards), problem, DataError)
    for split in SPLITS if settings.validation_fraction else SPLITS[:1]:
        require(
            any(files_of(shards, split)),
            f"no document of {settings.source!r} is in {split}: split the text into several "
            "documents (text:GLOB#block or #line), or prepare into another folder with "
            "--validation-fraction 0",
            DataError,
        )
