"""Atomic writes: a file or folder appears complete or not at all.

Everything is written next to its final path and then renamed. A crash leaves no partial
result under the final name. If two processes do the same work, one wins and the other's copy is
deleted; both are equal, because the name is a hash of the content.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from .errors import DataError
from .files import input_files


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically; replaces an older one.

    Args:
      path: The final path; missing parent folders are made.
      content: The bytes to write.

    Raises:
      DataError: The path cannot be written.
    """
    temporary = None
    try:
        check_file(path)
        # In the same folder, because a rename is atomic only within a file system.
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from the group
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise DataError(f"cannot write {path} ({error.strerror}): fix that") from error
        raise


def check_file(path: Path) -> None:
    """Checks that a file can be written to a path; makes its parent folders.

    Raises:
      DataError: The path is a folder or a device, its name is invalid, or its folder cannot be
        written to.
    """
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder: give the name of a file")
        if path.exists() and not path.is_file():  # the new file would take the place of a device
            raise DataError(f"{path} is not a regular file: give the name of another")
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror}): name another file") from None
    _make_parent(path)


def check_output_path(path: Path, made_from: str) -> None:
    """Checks that an output file can be written, before any work; makes its parent folders.

    Args:
      path: The final path.
      made_from: The input that the output is made from; see ``files.input_lines``.

    Raises:
      DataError: See ``check_file``; or the path is the input itself, under the same or another
        name.
    """
    check_file(path)
    # Compare the files, not the paths, to recognize links.
    for file in input_files(made_from):
        if path.exists() and path.samefile(file):
            raise DataError(f"output {path} is the input, which it would replace: name another")


def build_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """Makes a folder atomically; keeps an existing one that is not empty.

    An empty folder is replaced. If it cannot be, because a disk is mounted there, its parts appear
    one by one, `config.json` last.

    Args:
      path: The final path; missing parent folders are made.
      fill: Called with an empty folder to write into, unless ``path`` holds something.

    Returns:
      ``path``, which now exists and is complete.

    Raises:
      DataError: The path cannot be written.
    """
    final = path.resolve()  # keep a symbolic link
    if _holds_something(final):
        return path
    mounted = False
    if final.is_dir():
        try:
            final.rmdir()
        except FileNotFoundError:  # another process has removed it, to replace it
            pass
        except OSError:
            if _holds_something(final):  # another process was faster
                return path
            mounted = True
    else:
        _make_parent(final)
    # Within a mounted disk if there is one, because a rename cannot cross file systems.
    parent = final if mounted else final.parent
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=parent))
    try:
        temporary.chmod(0o755)
        fill(temporary)
        if mounted:
            # config.json comes last, because it shows that a folder is complete.
            for made in sorted(temporary.iterdir(), key=lambda made: made.name == "config.json"):
                try:
                    os.replace(made, final / made.name)
                except OSError:
                    if not (final / made.name).is_dir():  # no other process was faster
                        raise
            return path
        try:
            os.replace(temporary, final)
        except OSError:
            if not final.is_dir():  # no other process was faster, so this is a real failure
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def new_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder atomically at a path that is free or an empty folder.

    Args:
        path: The final path; missing parent folders are made.
        fill: Called with an empty folder to write into.

    Raises:
        DataError: The path holds something, or cannot be written.
    """
    if path.exists() and (not path.is_dir() or _holds_something(path.resolve())):
        raise DataError(f"{path} exists and holds something: give a folder that does not")
    build_folder(path, fill)


def _holds_something(folder: Path) -> bool:
    """Returns whether a folder holds more than temporary folders of `build_folder`.

    On a mounted disk it may hold the temporary folder of another or a killed process.
    """
    return folder.is_dir() and any(
        not made.name.startswith(f".{folder.name}.") for made in folder.iterdir()
    )


def _make_parent(path: Path) -> None:
    if "\0" in str(path):
        raise DataError(f"{str(path)!r} has a NUL character: choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder {path.parent} ({error.strerror}): choose another folder"
        ) from None
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"the folder {path.parent} is not writable: choose another folder")
