"""Locks a run folder, so that only one process trains in it at a time.

The training process holds a record lock of the operating system on the file `lock.json` in the
folder. The system releases the lock when the process ends, even after `kill -9`. On NFS, the lock
also applies to other machines. The file names the process that holds the lock, for the error
messages of other processes.
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
"""Maps the path of each file that this process has locked to the content of the file. The system
would allow the same process to lock a file twice, and this table prevents it.
"""


class RunLock:
    """The lock of a run folder, which is held from `acquire` to the end of the `with` block."""

    def __init__(self, folder: Path, log: LogFn) -> None:
        """Creates a lock, but does not acquire it.

        Args:
            folder: The run folder.
            log: Called with a line if the file system does not support locks.
        """
        self._folder = folder
        self._path = folder.resolve() / LOCK_FILE
        self._log = log
        self._file: io.FileIO | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock if this object holds it."""
        if self._file is None:
            return
        # Remove the file before releasing the lock. A waiting process checks that its file still
        # exists.
        with contextlib.suppress(OSError):
            if _is_at(self._path, self._file):
                self._path.unlink()
        self._file.close()
        self._file = None
        del _HELD[self._path]

    def acquire(self) -> None:
        """Acquires the lock, unless this object already holds it.

        Raises:
            RunError: Another process, or another object of this process, holds the lock.
            DataError: The folder is not writable, or its disk is full.
        """
        if self._file is not None:
            return
        if self._path in _HELD:
            # Do not open the file to read it, because closing it would release the lock of this
            # process.
            raise self._refusal(_HELD[self._path])
        started = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "started": started}
        entry = json.dumps(holder)
        try:
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(self._open())
                file.truncate()
                file.write(entry.encode())
                # Do not close the file, because closing it would release the lock.
                opened.pop_all()
        except OSError as error:
            raise DataError(
                f"the folder {self._folder} is not writable: choose another folder "
                f"({LOCK_FILE}: {error.strerror})"
            ) from error
        self._file = file
        _HELD[self._path] = entry

    def _open(self) -> io.FileIO:
        """Opens and locks the file. Raises RunError if another process holds the lock."""
        while True:
            # Open the file unbuffered, so that other processes can read the entry as soon as it is
            # written.
            file = io.FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            try:
                # Do not use flock, because forked processes inherit a flock and may outlive a
                # killed parent.
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                # The holder writes its entry shortly after it acquires the lock.
                time.sleep(0.2)
                with file:
                    raise self._refusal(file.read().decode()) from None
            except OSError as error:
                self._log(f"{self._path} cannot be locked ({error.strerror}): train in one process")
            if _is_at(self._path, file):
                return file
            # The previous holder has just removed this file, so create a new one.
            file.close()

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
    """Returns whether an open file is still the file at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
