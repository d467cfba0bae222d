r"""Finds text files by name or glob, and reads all of their lines in order.

If the name of a file ends in ``.gz``, the file is decompressed while it is read. In a glob, ``**``
matches folders at any depth. Lines end only at ``\n``; other Unicode line separators are ordinary
characters. URLs such as ``gs://bucket/*.txt`` name files in object stores; see ``remote_files``.
"""

import contextlib
import glob
import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from .errors import DataError, reported
from .fields import require
from .remote_files import RemoteFile, is_remote_folder, is_url, matching_urls

File = Path | RemoteFile
"""A local file, or a file in an object store."""
Line = tuple[str, int, str]
"""A line of a file: the name of the file, the line number (from 1), and the text."""

STANDARD_INPUT = "-"


def input_lines(path: str, *, keep_ends: bool = False) -> Iterator[Line]:
    r"""Reads the lines of the files with a given name, or of standard input if the name is ``-``.

    Args:
      path: A file or a glob, or ``-``.
      keep_ends: Whether lines keep their ``\n`` and a ``\r`` before it.

    Raises:
      DataError: See ``matching_files`` and ``file_lines``.
    """
    if path == STANDARD_INPUT:
        return _decoded(sys.stdin.buffer, "standard input", keep_ends)
    return matching_lines(path, path, keep_ends=keep_ends)


def input_files(path: str) -> list[File]:
    """Returns the files that match a path or a glob, or no files for standard input.

    Raises:
      DataError: See ``matching_files``.
    """
    return [] if path == STANDARD_INPUT else matching_files(path, path)


def matching_lines(pattern: str, name: str, *, keep_ends: bool = False) -> Iterator[Line]:
    r"""Reads the lines of all files that match a name or a glob, in the sorted order of the files.

    Args:
      pattern: The name or the glob, which may be a URL.
      name: The name of the source that contains the pattern, for messages.
      keep_ends: Whether lines keep their ``\n`` and a ``\r`` before it.

    Raises:
      DataError: See ``matching_files`` and ``file_lines``.
    """
    for file in matching_files(pattern, name):
        yield from file_lines(file, keep_ends=keep_ends)


def read_lines(path: str) -> list[str]:
    """Reads a file that contains one text per line; an empty line is an empty text.

    Args:
      path: A file, or ``-`` for standard input.

    Raises:
      DataError: See ``input_lines``.
    """
    return [line for _, _, line in text_lines(path)]


def text_lines(path: str, *, keep_ends: bool = False) -> Iterator[Line]:
    """Reads the lines of a file with one text per line; see ``input_lines``.

    Raises:
      DataError: The file name has the ending of JSON lines; see also ``input_lines``.
    """
    has_json = path.removesuffix(".gz").endswith(".jsonl")
    problem = f"{path} has JSON lines, but each line must be a text: write only the texts to a file"
    require(not has_json, problem, DataError)
    return input_lines(path, keep_ends=keep_ends)


def file_lines(path: File, *, keep_ends: bool = False) -> Iterator[Line]:
    r"""Reads the lines of a file, and drops a byte order mark.

    Args:
      path: The file.
      keep_ends: Whether lines keep their ``\n`` and a ``\r`` before it.

    Raises:
      DataError: The file cannot be read, is an incomplete gzip file, is not UTF-8, or contains a
        NUL character. For the last two, the message gives the line.
    """
    with _open(path) as file:
        problem = f"{path} is not a complete gzip file"
        with reported(problem, "download it again", gzip.BadGzipFile, EOFError, zlib.error):
            yield from _decoded(file, str(path), keep_ends)


def _decoded(lines: Iterable[bytes], name: str, keep_ends: bool = False) -> Iterator[Line]:
    for number, raw in enumerate(lines, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} line {number} is not UTF-8: byte 0x{raw[error.start]:02x} at its byte "
                f"{error.start + 1}; convert the file to UTF-8, or correct the line"
            ) from None
        # A zero byte is valid UTF-8. It often indicates UTF-16, where every second byte of Latin
        # text is zero.
        if "\0" in line:
            raise DataError(
                f"{name} line {number} has a NUL character at its byte {raw.index(0) + 1}, "
                f"which indicates UTF-16: convert the file to UTF-8, or remove the character"
            )
        # Only the first line of a file can begin with a byte order mark.
        line = line.removeprefix("\ufeff") if number == 1 else line
        yield name, number, line if keep_ends else line.removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def _open(path: File) -> Iterator[IO[bytes]]:
    with reported(f"cannot read {path}", "check the path", OSError):
        file = path.open("rb")
    with file:
        if path.suffix == ".gz":
            # `GzipFile` does not close the file that it reads, so close it here.
            with gzip.GzipFile(fileobj=file) as lines:
                yield cast(IO[bytes], lines)
        else:
            yield cast(IO[bytes], file)


def absolute(file: File) -> File:
    """Converts the path of a local file to an absolute path; a URL is already absolute."""
    return Path(os.path.abspath(file)) if isinstance(file, Path) else file


def identity(file: File) -> tuple[object, ...]:
    """Returns values that change when the content of a file changes.

    For a local file, they are its path, size and modification time; for a remote file, its URL and
    version.

    Raises:
      DataError: The file cannot be read.
    """
    if isinstance(file, RemoteFile):
        return file.url, file.version
    status = file.stat()
    return os.path.abspath(file), status.st_size, status.st_mtime_ns


def named_file(name: str) -> File:
    """Returns the file with a given path or URL."""
    return RemoteFile(name) if is_url(name) else Path(name)


def path_inside(folder: Path, name: object) -> Path | None:
    """Joins a folder and a name, or returns None if the path may lead outside the folder.

    A file in a downloaded folder may contain any path, such as `../../secret`. A valid path stays
    within the folder after all links are followed. In the cache of the Hugging Face hub, links may
    also lead to `blobs`.

    Args:
      folder: The folder.
      name: The path within the folder, as read from a file.
    """
    if not isinstance(name, str) or "\0" in name:
        return None
    root = folder.resolve()
    roots = [root]
    # In the hub's cache, the files of a snapshot are links to `blobs`.
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    try:
        # Follow links before comparing.
        real = (root / name).resolve()
    except (OSError, RuntimeError):  # a loop of links
        return None
    return folder / name if any(map(real.is_relative_to, roots)) else None


def matching_files(pattern: str, name: str) -> list[File]:
    """Returns the files that match a name or a glob, in sorted order.

    Args:
      pattern: The name or the glob, which may be a URL.
      name: The name of the source that contains the pattern, for messages.

    Raises:
      DataError: No file matches, the name is a folder, or an object store cannot be read.
    """
    # A pattern with `file://` names local files.
    pattern = pattern.removeprefix("file://")
    if is_url(pattern):
        return _matching_urls(pattern, name)
    path = Path(pattern).expanduser()
    remedy = f"name its files, for example by {pattern.rstrip('/')}/**/*"
    require(not path.is_dir(), f"{pattern!r} is a folder: {remedy}", DataError)
    # A file name may contain [ ] * ?, so look for a file with this exact name first.
    if path.is_file():
        return [path]
    # Sort the files, because the order of glob depends on the file system.
    matching = map(Path, glob.glob(str(path), recursive=True))
    paths: list[File] = [*sorted(filter(Path.is_file, matching))]
    source = "" if pattern == name else f"source {name!r}, "
    problem = "no file matches" if glob.has_magic(pattern) else "no such file:"
    # The user may have intended to join sources with a plus sign.
    joins = "; to join sources write the kind of each: text:GLOB + text:GLOB"
    hint = joins if re.search(r"\s\+\s", pattern) else ""
    message = f"{problem} {pattern!r} ({source}in folder {Path.cwd()}): check the path{hint}"
    require(paths, message, DataError)
    return paths


def _matching_urls(pattern: str, name: str) -> list[File]:
    files: list[File] = [*matching_urls(pattern)]
    problem = f"no file matches {pattern!r} (source {name!r}): check the name"
    if not files and is_remote_folder(pattern):
        problem = f"{pattern!r} is a folder: name its files, as {pattern.rstrip('/')}/**"
    require(files, problem, DataError)
    return files


def default_cache_dir() -> Path:
    """Returns the folder for cached data: ``$FLAXZOO_CACHE`` or ``~/.cache/flaxzoo``."""
    return Path(os.environ.get("FLAXZOO_CACHE") or "~/.cache/flaxzoo").expanduser()
