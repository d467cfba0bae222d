"""Writes files and folders atomically: each appears complete or not at all.

Everything is first written next to its final path, and then renamed. A crash therefore leaves no
partial result under the final name. If two processes make the same folder, the first copy is kept,
and the second is deleted; both copies are equal, because the name is a hash of the content.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from .errors import DataError, reported
from .fields import require
from .files import input_files


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically, and replaces an existing file.

    Args:
      path: The final path; missing parent folders are made.
      content: The bytes to write.

    Raises:
      DataError: The path cannot be written.
    """
    check_file(path)
    with reported(f"cannot write {path}", "choose another folder, or free space", OSError):
        # Write to the same folder, because a rename is atomic only within one file system.
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # mkstemp sets the mode 0600, which would make the file unreadable for other users.
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            # If the clean-up also fails, report the first error.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def check_file(path: Path) -> None:
    """Checks that a file can be written to a path, and creates the parent folders.

    Raises:
      DataError: The path is a folder or a device, its name is invalid, or its folder cannot be
        written to.
    """
    with reported(f"cannot write {path}", "name another file", OSError):
        # Exclude devices, because the new file would replace the device.
        is_free = path.is_file() or not path.exists()
    require(is_free, f"{path} is a folder or a device: give the name of a file", DataError)
    _make_parent(path)


def check_output_path(path: Path, made_from: str) -> None:
    """Checks that an output file can be written before work begins; creates its parent folders.

    Args:
      path: The final path.
      made_from: The input of the output; see ``files.input_lines``.

    Raises:
      DataError: See ``check_file``. Also raised if the output path is an input file, possibly under
        another name.
    """
    check_file(path)
    # Compare files instead of paths, to recognize links to the same file.
    files = input_files(made_from)
    same = path.exists() and any(isinstance(x, Path) and path.samefile(x) for x in files)
    problem = f"output {path} is the input, which it would replace: name another file"
    require(not same, problem, DataError)


def build_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """Makes a folder atomically, or keeps an existing folder that is not empty.

    An empty folder is replaced. If a disk is mounted at the path, the folder cannot be replaced.
    Then its files and subfolders appear one by one, with `config.json` last.

    Args:
      path: The final path; missing parent folders are made.
      fill: A function that writes the content into an empty folder. It is not called if ``path`` is
        not empty.

    Returns:
      ``path``, which now exists and is complete.

    Raises:
      DataError: The path cannot be written.
    """
    # Resolve the path, so that a symbolic link is not replaced.
    final = path.resolve()
    # Delete the folder if it is empty. This fails for a mounted disk or a folder with content.
    with contextlib.suppress(OSError):
        final.rmdir()
    if _is_nonempty(final):
        return path
    mounted = final.is_dir()
    if not mounted:
        _make_parent(final)
    # Build the folder on the mounted disk if there is one, because a rename cannot cross file
    # systems.
    parent = final if mounted else final.parent
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=parent))
    try:
        temporary.chmod(0o755)
        fill(temporary)
        moves = [(temporary, final)]
        if mounted:
            # Move config.json last, because its presence indicates that a folder is complete.
            parts = sorted(temporary.iterdir(), key=lambda part: part.name == "config.json")
            moves = [(part, final / part.name) for part in parts]
        for made, target in moves:
            try:
                os.replace(made, target)
            except OSError:
                if not target.is_dir():  # no other process was faster, so this is a real failure
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def new_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder atomically at a path that does not exist or is an empty folder.

    Args:
        path: The final path; missing parent folders are made.
        fill: A function that writes the content into an empty folder.

    Raises:
        DataError: The path is not empty, or cannot be written.
    """
    is_free = path.is_dir() or not path.exists()
    is_free = is_free and not _is_nonempty(path.resolve())
    problem = f"{path} exists and is not an empty folder: name another folder"
    require(is_free, problem, DataError)
    build_folder(path, fill)


def _is_nonempty(folder: Path) -> bool:
    """Returns whether a folder contains anything except temporary folders of `build_folder`.

    A mounted disk may contain a temporary folder that another process is using, or that a killed
    process left there.
    """
    return folder.is_dir() and any(
        not made.name.startswith(f".{folder.name}.") for made in folder.iterdir()
    )


def _make_parent(path: Path) -> None:
    problem = f"{str(path)!r} has a NUL character: choose another name"
    require("\0" not in str(path), problem, DataError)
    with reported(f"cannot make the folder {path.parent}", "choose another folder", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    problem = f"the folder {path.parent} is not writable: choose another folder"
    require(os.access(path.parent, os.W_OK), problem, DataError)
