"""Checksums that detect changed bytes in a checkpoint on disk and name the damaged file.

`checksums.json` is in the checkpoint's folder. It lists the size and the SHA-256 of every file in
the parts (subfolders) of the checkpoint. `checksums.json` is written before the checkpoint gets its
final name, so every complete checkpoint has this file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from ..data.common.atomic_io import write_file
from ..data.common.errors import UserError
from ..data.common.fields import check_value
from ..data.common.files import path_inside
from ..data.common.json_text import read_object

CHECKSUMS_FILE = "checksums.json"
LARGEST = 2**26
"""The maximum size of `checksums.json`, in bytes. A larger file is not read."""

Checksums: TypeAlias = dict[str, list[str]]
"""For each file, its valid contents as `SIZE SHA256`. While a file is being replaced, it has two
valid contents.
"""


def write_checksums(checkpoint: Path) -> None:
    """Writes `checksums.json` for the files in all parts (subfolders) of a checkpoint."""
    names = sorted(_files(checkpoint))
    with ThreadPoolExecutor() as threads:
        records = threads.map(lambda name: [_record(checkpoint / name)], names)
        checksums: Checksums = dict(zip(names, records, strict=True))
    (checkpoint / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=1), encoding="utf-8")


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces one file of a checkpoint. A crash at any point leaves the checkpoint valid.

    Args:
      checkpoint: The folder of the checkpoint.
      name: The path of the file within it.
      content: The new bytes of the file.
    """
    checksums = _read(checkpoint)
    # If the checksums are unreadable, the checkpoint is already damaged, so only write the file.
    if isinstance(checksums, str):
        write_file(checkpoint / name, content)
        return
    new = [f"{len(content)} {hashlib.sha256(content).hexdigest()}"]
    # Both contents are valid while the file is replaced. Afterwards only the new content is valid.
    both = {**checksums, name: checksums.get(name, []) + new}
    write_file(checkpoint / CHECKSUMS_FILE, json.dumps(both, indent=1).encode())
    write_file(checkpoint / name, content)
    only_new = {**checksums, name: new}
    write_file(checkpoint / CHECKSUMS_FILE, json.dumps(only_new, indent=1).encode())


def find_damage(checkpoint: Path, part: str = "") -> str | None:
    """Compares the files of a checkpoint with their checksums.

    Args:
      checkpoint: The folder of the checkpoint.
      part: The part to check, such as `params`. Defaults to all parts.

    Returns:
      A description of the first damaged file or of the problem with the checksums, or None if
      every file matches its checksum.
    """
    checksums = _read(checkpoint)
    if isinstance(checksums, str):
        return checksums
    names = [name for name in checksums if name.startswith(f"{part}/" if part else "")]
    # A file without a checksum cannot be checked, so report this file as damaged.
    unlisted = sorted({*_files(checkpoint, part)} - {*names})
    if unlisted:
        return f"{CHECKSUMS_FILE} lacks {unlisted[0]}"
    with ThreadPoolExecutor() as threads:
        problems = threads.map(lambda name: _problem(checkpoint, name, checksums[name]), names)
        damage = (f"{name} {what}" for name, what in zip(names, problems, strict=True) if what)
        return next(damage, None)


def _read(checkpoint: Path) -> Checksums | str:
    """Returns the checksums of a checkpoint, or a description of the problem."""
    file = path_inside(checkpoint, CHECKSUMS_FILE)
    if file is None or not file.is_file():
        return f"{CHECKSUMS_FILE} is missing"
    # A damaged file may have any size, so do not read a file that could fill the memory.
    if file.stat().st_size > LARGEST:
        return f"{CHECKSUMS_FILE} has more than {LARGEST:,} bytes"
    # A checkpoint may be untrusted, so check the types of its fields before they are used.
    try:
        content: Any = read_object(file)
        check_value(CHECKSUMS_FILE, content, Mapping[str, Sequence[str]])
    except UserError as error:
        return str(error)
    return content


def _files(checkpoint: Path, part: str = "") -> Iterator[str]:
    """Yields the paths of the files in the parts of a checkpoint."""
    for file in checkpoint.glob(f"{part or '*'}/**/*"):
        if file.is_file():
            yield str(file.relative_to(checkpoint))


def checksum_of_files(files: Sequence[Path]) -> str:
    """Returns a hash of the names and contents of files, independent of their folder."""
    with ThreadPoolExecutor() as threads:
        digests = threads.map(_digest, files)
        parts = [f"{f.name} {digest}" for f, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _problem(checkpoint: Path, name: str, records: Sequence[str]) -> str | None:
    file = path_inside(checkpoint, name)
    if file is None:
        return "lies outside the checkpoint"
    try:
        if not file.exists():
            return "is missing"
        if not file.is_file():
            return "is not a regular file"
        size = file.stat().st_size
        sizes = {record.partition(" ")[0] for record in records}
        # Compare sizes first, because this finds most damage without reading the file.
        same = str(size) in sizes and _record(file) in records
        return None if same else "differs from its checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _record(file: Path) -> str:
    return f"{file.stat().st_size} {_digest(file)}"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
