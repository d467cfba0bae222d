"""From a file of text to a shard of packed rows: a pure function, whoever calls it.

The same file and settings give the same bytes, on any machine and beside any number of
other workers, and a shard that is whole is left as it is. So ``prepare_shard`` may be called for
the input files in any order by whoever sees them and the folder (``beam_pipeline`` has many
workers do it), and ``finish`` makes what is missing then.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..corpora.token_corpus import TokenCorpus, build_corpus
from ..errors import DataError
from ..io.atomic_io import build_folder, write_file
from ..io.files import matching_files
from ..packing.packed_rows import encode, gather_tokens, require_bos_eos
from ..packing.packing import Packing, Span, first_fit, split_once
from ..sources.documents import HashSplit, Split, text_digest
from ..sources.source_names import Source, documents_in, parse_sources
from ..tokenizers.base import Tokenizer, load_tokenizer
from .shard_format import (
    COUNTS,
    FACTS,
    MANIFEST,
    SETTINGS,
    SHARDS,
    SPLITS,
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
    shard_fields,
    shard_name,
    to_json,
)

# One record is read at a time, in any order.
_WRITER_OPTIONS = "group_size:1"
_PACKAGES = ("flaxzoo", "apache-beam", "array-record", "numpy", "sentencepiece", "tokenizers")


Workers = Callable[[Sequence[Source], Path, Settings], None]
"""Given the input files, the folder and its settings, calls ``prepare_shard`` for each file."""


def in_order(parts: Sequence[Source], folder: Path, settings: Settings) -> None:
    """Makes one shard after the other, up to the first fault."""
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
    workers: Workers = in_order,
) -> list[Shard]:
    """Makes a folder of rows to train on, or what it lacks.

    Args:
        source: Files of text, see ``sources``.
        folder: The folder; may exist if it was made of the same source with the same settings.
        tokenizer: See ``load_tokenizer``.
        length: Pairs of input and label in a row, T.
        packing: ``concat`` or ``first-fit``.
        validation_fraction: The share of documents held out, in [0, 1), by the hash of each.
        workers: Who makes the shards.

    Returns:
        What is in the shard of each input file, in order.

    Raises:
        DataError: The source has no files, the tokenizer cannot be read, the folder has other
            settings; or see ``finish``.
    """
    folder, parts = Path(folder), input_files(source)
    loaded = load_tokenizer(tokenizer)
    require_bos_eos(loaded)
    settings = Settings(
        source=source,
        tokenizer=loaded.fingerprint,
        vocab_size=loaded.vocab_size,
        length=length,
        packing=packing,
        validation_fraction=validation_fraction,
    )
    begin(folder, settings, loaded)
    workers(parts, folder, settings)
    return finish(folder, parts, settings)


def input_files(source: str) -> list[Source]:
    """Parts a source into its files, in order; built-in text is one.

    Raises:
        DataError: The source has no files (``tfds:``, ``prepared:``), or there are none.
    """
    parts: list[Source] = []
    for one in parse_sources(source):
        if one.kind not in ("builtin", "text", "jsonl"):
            raise DataError(
                f"{one.name!r} is not made of files of text: prepare text:GLOB or jsonl:GLOB#field"
            )
        if one.kind == "builtin":
            parts.append(one)
            continue
        for path in matching_files(one.location, one.name):
            name = f"{one.kind}:{path}#{one.part}"
            parts.append(dataclasses.replace(one, name=name, location=os.path.abspath(path)))
    return parts


def begin(folder: Path, settings: Settings, tokenizer: Tokenizer) -> None:
    """Makes the folder, or checks that it is one of the same settings.

    Raises:
        DataError: It has other settings, holds something else, or cannot be written.
    """

    def fill(temporary: Path) -> None:
        tokenizer.save(temporary / TOKENIZER)
        (temporary / SHARDS).mkdir()
        (temporary / SETTINGS).write_bytes(to_json(dataclasses.asdict(settings)))

    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if not folder.exists():
        build_folder(folder, fill)
        return
    found = read_settings(folder)
    if found is None:
        raise DataError(f"{folder} exists and holds no prepared rows: name another folder")
    old, new = dataclasses.asdict(found), dataclasses.asdict(settings)
    changed = [f"{name} {old[name]!r} → {new[name]!r}" for name in new if old[name] != new[name]]
    if changed:
        raise DataError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): give the same, "
            "or name another folder"
        )
    if not _is_tokenizer(folder / TOKENIZER, settings.tokenizer):
        shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
        build_folder(folder / TOKENIZER, tokenizer.save)


def _is_tokenizer(folder: Path, fingerprint: str) -> bool:
    try:
        return load_tokenizer(folder).fingerprint == fingerprint
    except DataError:
        return False


def prepare_shard(part: Source, folder: Path, settings: Settings) -> Shard:
    """Makes the shard of one input file, unless it is there and whole.

    Args:
        part: The file, one of ``input_files``.
        folder: Of all shards; see ``begin``.
        settings: Those of the folder.

    Returns:
        What is in the shard.

    Raises:
        DataError: The file is missing, not whole or not UTF-8, lacks a field, or changes while
            it is read; or the shard cannot be written.
    """
    place = folder / SHARDS / shard_name(part)
    older = place.exists()  # before it is read: another worker may be about to finish it
    try:
        digest = _input_digest(part)
    except DataError:
        shutil.rmtree(place, ignore_errors=True)  # of a file that is gone there is no shard
        raise
    found = read_shard(place)
    if found is not None and found.input_sha256 == digest and _is_undamaged(place, found):
        return found
    if older:
        shutil.rmtree(place)
    tokenizer = _tokenizer(folder / TOKENIZER, settings.tokenizer)

    def fill(temporary: Path) -> None:
        shard = _fill(temporary, part, digest, settings, tokenizer)
        if _input_digest(part) != digest:
            raise DataError(f"{part.location} changed while it was read: start again")
        (temporary / FACTS).write_bytes(to_json(shard_fields(shard)))

    try:
        whole = read_shard(build_folder(place, fill))
    except OSError as error:
        reason = error.strerror or "the disk may be full"  # numpy tells only numbers
        raise DataError(f"cannot write {place} ({reason}): mend that, and run it again") from error
    assert whole is not None
    return whole


def finish(folder: Path, parts: Sequence[Source], settings: Settings) -> list[Shard]:
    """Writes the manifest, when every shard was made.

    Args:
        folder: Of all shards.
        parts: The input files.
        settings: Those of the folder.

    Returns:
        The shards, in the order of the input files.

    Raises:
        DataError: A shard is missing: what keeps it from being made here, see
            ``prepare_shard``, or, if nothing does, that the workers did not; or a split has no
            row at all.
    """
    shards: list[Shard] = []
    counts = np.zeros((len(SPLITS), settings.vocab_size), np.int64)
    for part in parts:
        place = folder / SHARDS / shard_name(part)
        shards.append(read_shard(place) or _missing(part, folder, parts, settings))
        counts += np.load(place / COUNTS)
    _check_splits(shards, settings)
    _forget_others(folder, {shard.name for shard in shards})
    whole = {
        **dataclasses.asdict(settings),
        "finished_by": {name: found for name in _PACKAGES if (found := _version(name))},
        "shards": [shard_fields(shard) for shard in shards],
    }
    content = io.BytesIO()
    np.save(content, counts)
    write_file(folder / COUNTS, content.getvalue())
    write_file(folder / MANIFEST, to_json(whole))
    return shards


def _missing(part: Source, folder: Path, parts: Sequence[Source], settings: Settings) -> NoReturn:
    """Tells why a shard that workers were to make is not there."""
    names = [shard_name(one) for one in parts]
    missing = sum(read_shard(folder / SHARDS / name) is None for name in names)
    prepare_shard(part, folder, settings)  # raises what is wrong with the file
    raise DataError(
        f"{missing} of {len(parts)} shards are not in {folder} now that the workers have ended, "
        "yet can be made here: have every worker see that folder and the texts, under these names"
    )


def _input_digest(part: Source) -> str:
    if part.kind != "builtin":
        return file_sha256(Path(part.location))
    whole = hashlib.sha256()
    for text in documents_in(part):
        whole.update(text_digest(text))
    return whole.hexdigest()


def _is_undamaged(place: Path, shard: Shard) -> bool:
    hashes = {rows_path(place, split): facts.sha256 for split, facts in shard.splits.items()}
    hashes[place / COUNTS] = shard.counts_sha256
    try:
        return all(file_sha256(path) == sha256 for path, sha256 in hashes.items())
    except DataError:
        return False


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path, fingerprint: str) -> Tokenizer:
    """Loads the tokenizer once in each worker."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"{folder} is not the tokenizer it was: prepare into another folder")
    return tokenizer


@dataclass(frozen=True)
class _SplitTexts:
    """The documents of an input file that belong to a split."""

    part: Source
    split: Split
    division: HashSplit
    fingerprint: str

    def __iter__(self) -> Iterator[str]:
        for text in documents_in(self.part):
            if self.division.split(text_digest(text)) == self.split:
                yield text


def _fill(
    place: Path, part: Source, digest: str, settings: Settings, tokenizer: Tokenizer
) -> Shard:
    counts = np.zeros((len(SPLITS), settings.vocab_size), np.int64)
    division = HashSplit.of_each(settings.validation_fraction)
    splits: dict[str, RowsFile] = {}
    for number, split in enumerate(SPLITS):
        texts = _SplitTexts(part, split, division, digest)
        if not any(True for _ in texts):
            continue
        corpus = build_corpus(texts, tokenizer, place / "corpus")
        splits[split] = _write_rows(rows_path(place, split), corpus, split, settings)
        counts[number] = corpus.token_counts
        shutil.rmtree(place / "corpus")
    np.save(place / COUNTS, counts)
    return Shard(shard_name(part), part.name, digest, file_sha256(place / COUNTS), splits)


def _write_rows(path: Path, corpus: TokenCorpus, split: Split, settings: Settings) -> RowsFile:
    from array_record.python.array_record_module import ArrayRecordWriter

    rows = 0
    try:
        with contextlib.closing(ArrayRecordWriter(str(path), _WRITER_OPTIONS)) as writer:
            for spans in _packed(corpus, split, settings):
                writer.write(encode(gather_tokens(corpus, spans), settings.vocab_size))
                rows += 1
    except RuntimeError as error:  # of the writer alone
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
    """The rows of a split: each pair of the file once, whatever the packing."""
    length = settings.length
    if split == "validation" or settings.packing == "concat":
        for row in range(-(-corpus.num_targets // length)):
            yield split_once(row, length, corpus.target_starts, corpus.num_targets)
        return
    spans, row_starts = first_fit(corpus.target_counts, length)
    for row in range(len(row_starts) - 1):
        yield spans[row_starts[row] : row_starts[row + 1]].tolist()


def _check_splits(shards: list[Shard], settings: Settings) -> None:
    if not any(shard.splits for shard in shards):
        raise DataError(
            f"no text in {settings.source!r}: empty or only white space; give files with text"
        )
    for split in SPLITS if settings.validation_fraction else SPLITS[:1]:
        if not any(files_of(shards, split)):
            raise DataError(
                f"no document of {settings.source!r} fell to {split}: make several of it (text:GLOB"
                "#block or #line), or prepare into another folder with --validation-fraction 0"
            )


def _forget_others(folder: Path, names: set[str]) -> None:
    """Removes what a killed worker left, and shards of files that are no longer there."""
    for found in (folder / SHARDS).iterdir():
        if found.name not in names:
            shutil.rmtree(found, ignore_errors=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
