"""The lock of a run folder: one process at a time trains in it.

The process that trains holds a record lock of the operating system on the file `lock.json` in the
folder. The system releases such a lock when its process ends, `kill -9` included, and NFS shares
it between machines. The file names the holder, for the message to others.
"""

import contextlib
import datetime
import io
import json
import os
import socket
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from ...data.common.errors import DataError, RunError
from ...data.common.progress import LogFn

LOCK_FILE = "lock.json"

_HELD: dict[Path, str] = {}
"""The entries of the files that this process has locked, which the system lets it lock twice."""


class RunLock:
    """The right to train in a run folder, from `acquire` to the end of the `with` block."""

    def __init__(self, folder: Path, log: LogFn) -> None:
        """Takes nothing yet; `log` is called with a line if the file system has no locks."""
        self._folder = folder
        self._path = folder.resolve() / LOCK_FILE
        self._log = log
        self._file: io.FileIO | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock, if this object has it."""
        if self._file is None:
            return
        # Unlink before unlocking: a waiting process checks that its file is still there.
        with contextlib.suppress(OSError):
            if _is_at(self._path, self._file):
                self._path.unlink()
        self._file.close()
        self._file = None
        del _HELD[self._path]

    def acquire(self) -> None:
        """Takes the lock, unless this object has it already.

        Raises:
            RunError: Another process or another object of this process has it.
            DataError: The folder is not writable, or its disk is full.
        """
        if self._file is not None:
            return
        if self._path in _HELD:
            raise self._refusal(_HELD[self._path])  # reading the file would end the lock
        started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "started": started}
        entry = json.dumps(holder)
        try:
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(self._open())
                file.truncate()
                file.write(entry.encode())
                opened.pop_all()  # keeps the file open, and with it the lock
        except OSError as error:
            raise DataError(
                f"the folder {self._folder} is not writable: choose another folder "
                f"({LOCK_FILE}: {error.strerror})"
            ) from error
        self._file = file
        _HELD[self._path] = entry

    def _open(self) -> io.FileIO:
        """Returns the open and locked file; raises RunError if another process has locked it."""
        while True:
            # Unbuffered, so that others read the entry as soon as it is written.
            file = io.FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            try:
                # Not flock: forked processes inherit such a lock and outlive a killed parent.
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                time.sleep(0.2)  # the holder writes its entry just after it takes the lock
                with file:
                    raise self._refusal(file.read().decode()) from None
            except OSError as error:
                self._log(f"{self._path} cannot be locked ({error.strerror}): train in one process")
            if _is_at(self._path, file):
                return file
            file.close()  # its holder has just removed it: make another

    def _refusal(self, entry: str) -> RunError:
        try:
            holder = json.loads(entry)
            whose = f"process {holder['process']} on {holder['host']} since {holder['started']}"
            stop = f"stop it (kill {holder['process']})"
        except (ValueError, KeyError, TypeError):
            whose, stop = "another process", "stop it"
        return RunError(
            f"{self._folder} is in use by {whose}: wait for it, {stop}, or give another --workdir"
        )


def _is_at(path: Path, file: io.FileIO) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
