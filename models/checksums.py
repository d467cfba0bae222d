"""Checksums of a checkpoint: a byte that changed on disk is found, and its file named.

`checksums.json` beside a checkpoint's parts holds the SHA-256 of every file in them.
It is written before the checkpoint gets its name, so that none is without, but
those of models that were not trained here (imported ones, and averages).
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def find_damage(checkpoint: Path, part: str = "") -> str | None:
    """What is wrong with a checkpoint's files, in words that follow its name; None: nothing.

    One without checksums is taken for whole.

    Args:
      checkpoint: its folder.
      part: the one part that is of interest, such as `params`; by default all are.
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
