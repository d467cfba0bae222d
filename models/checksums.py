"""Checksums of a checkpoint, which detect a changed byte on disk and name its file.

`checksums.json` beside a checkpoint's parts contains the SHA-256 of every file in them. It is
written before the checkpoint gets its final name, so that every checkpoint has one, except those of
imported and averaged models that older versions made.
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..data.io.atomic_io import write_file

CHECKSUMS_FILE = "checksums.json"


def write_checksums(checkpoint: Path) -> None:
    """Writes `checksums.json` for the files in all parts (folders) of a checkpoint."""
    names = sorted(
        str(file.relative_to(checkpoint)) for file in checkpoint.glob("*/**/*") if file.is_file()
    )
    with ThreadPoolExecutor() as threads:
        digests = threads.map(lambda name: _digest(checkpoint / name), names)
        checksums = dict(zip(names, digests, strict=True))
    (checkpoint / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=1), encoding="utf-8")


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces one file of a checkpoint, which is intact whenever the process ends.

    Args:
      checkpoint: The folder of the checkpoint.
      name: The path of the file within it.
      content: The new bytes of the file.
    """
    file = checkpoint / CHECKSUMS_FILE
    checksums = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if checksums is None:
        write_file(checkpoint / name, content)
        return
    checksums.pop(name, None)  # not checked until both files are written
    write_file(file, json.dumps(checksums, indent=1).encode())
    write_file(checkpoint / name, content)
    checksums[name] = _digest(checkpoint / name)
    write_file(file, json.dumps(checksums, indent=1).encode())


def find_damage(checkpoint: Path, part: str = "") -> str | None:
    """Compares the files of a checkpoint with their checksums.

    Args:
      checkpoint: The folder of the checkpoint.
      part: The part to check, such as `params`; by default all parts.

    Returns:
      A description of the first damaged file; None if there is none, or no checksums.
    """
    file = checkpoint / CHECKSUMS_FILE
    if not file.is_file():
        return None
    try:
        checksums = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return f"{CHECKSUMS_FILE} is not JSON"
    names = [name for name in checksums if name.startswith(f"{part}/" if part else "")]
    with ThreadPoolExecutor() as threads:
        problems = threads.map(lambda name: _problem(checkpoint / name, checksums[name]), names)
        found = (f"{name} {what}" for name, what in zip(names, problems, strict=True) if what)
        return next(found, None)


def checksum_of_files(files: Sequence[Path]) -> str:
    """Returns a hash of the names and the content of files, wherever their folder is."""
    with ThreadPoolExecutor() as threads:
        digests = threads.map(_digest, files)
        parts = [f"{f.name} {digest}" for f, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _problem(file: Path, checksum: str) -> str | None:
    try:
        return None if _digest(file) == checksum else "differs from its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
