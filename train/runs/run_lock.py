"""The lock of a run folder: one process at a time trains in it.

The lock is the file `lock.json` in the folder, on which the process that trains holds a record lock
of the operating system. Such a lock ends with its process, however that ends, and holds between
machines that share the folder through NFS. Some file systems keep these locks to each machine, and
some have none. Therefore the file also says who holds it, and its holder touches it every
`BEAT_SECONDS`: another machine takes the lock only when it has seen no touch for `SILENCE_SECONDS`.
"""

import contextlib
import dataclasses
import datetime
import io
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from ...data.common.errors import DataError, RunError
from ...data.common.progress import LogFn

LOCK_FILE = "lock.json"
BEAT_SECONDS = 10.0
"""Time between two touches of the file by its holder."""
SILENCE_SECONDS = 60.0
"""A holder on another machine that did not touch the file for so long is considered dead."""
CLOCK_SECONDS = 600.0
"""The clocks of two machines are assumed to differ by less than this."""
SETTLING_SECONDS = 2.0
"""The time for which a process waits for others that start at once, without system locks."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that trains in a folder, as `lock.json` states it."""

    process: int
    host: str
    started: str
    """The time at which the process took the lock, ISO 8601."""
    machine: str
    """The name of the machine and of its boot, to tell apart machines of one name."""
    token: str
    """Random text that tells apart processes of one number."""

    @classmethod
    def this_process(cls) -> "Holder":
        """Returns the entry of this process."""
        host = socket.gethostname()
        boot = BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.is_file() else ""
        return cls(
            process=os.getpid(),
            host=host,
            started=datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            machine=f"{host} {boot}",
            token=secrets.token_hex(8),
        )


class RunLock:
    """The right to train in a run folder, until the end of the block.

    Example::

        with RunLock(folder, log) as lock:
            lock.acquire()
    """

    def __init__(self, folder: Path, log: LogFn) -> None:
        """Takes nothing yet.

        Args:
            folder: The run folder, which need not exist before `acquire`.
            log: Called with a line if `acquire` has to wait.
        """
        self._folder = folder
        self._path = folder.resolve() / LOCK_FILE
        self._log = log
        self._me = Holder.this_process()
        self._file: io.FileIO | None = None
        self._lost_to: Holder | None = None
        self._was_removed = False
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases the lock, if this object has it."""
        if self._file is None:
            return
        self._ended.set()
        self._beating.join()
        with contextlib.suppress(OSError):
            if _is_at(self._path, self._file) and _read(self._file) == self._me:
                self._path.unlink()
        self._file.close()  # not before: a process that waits for the lock looks for its file
        self._file = None
        _HELD.pop(self._path, None)

    def acquire(self) -> None:
        """Takes the lock, unless this object has it already.

        Raises:
            RunError: Another process has it.
            DataError: The folder is not writable, or its disk is full.
        """
        if self._file is not None:
            return
        if self._path in _HELD:  # the operating system would grant it to this process twice
            raise self._refusal(_HELD[self._path])
        file, is_exclusive = self._open()
        try:
            holder = _read(file)
            if holder is not None and not (is_exclusive and holder.machine == self._me.machine):
                self._wait_for_silence(holder)
            self._write(file)
            if not is_exclusive:
                time.sleep(SETTLING_SECONDS)  # who wrote last among those that start at once has it
                holder = _read(file)
                if holder != self._me:
                    raise self._refusal(holder)
        except BaseException:
            file.close()
            raise
        self._file = file
        _HELD[self._path] = self._me
        self._beating.start()

    def check(self) -> None:
        """Checks that no other process has taken the lock from this one.

        Raises:
            RunError: Another one has, because this one had seemed dead, or because someone had
                removed the file.
        """
        if self._lost_to is not None:
            why = (
                f"{LOCK_FILE} had been removed"
                if self._was_removed
                else f"this process had not touched {LOCK_FILE} for {SILENCE_SECONDS:.0f} s"
            )
            raise RunError(
                f"{self._folder} was taken over by {_describe(self._lost_to)}, as {why}: leave it "
                "to that one"
            )

    def _open(self) -> tuple[io.FileIO, bool]:
        """Returns the open file, and whether the operating system has locked it for this process.

        Raises:
            RunError: It is locked for another process.
            DataError: The folder is not writable.
        """
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise DataError(
                    f"the folder {self._folder} is not writable: choose another folder "
                    f"({LOCK_FILE}: {error.strerror})"
                ) from error
            file = io.FileIO(descriptor, "r+")  # unbuffered: another machine may write to it
            is_exclusive = _try_lock(file)
            if is_exclusive is False:
                holder = _read_when_written(file)
                file.close()
                raise self._refusal(holder)
            if _is_at(self._path, file):
                return file, bool(is_exclusive)
            file.close()  # its holder has just ended, and removed it: make another

    def _write(self, file: io.FileIO) -> None:
        """Writes the entry of this process; raises DataError if that is not possible."""
        file.seek(0)
        file.truncate()
        try:
            file.write(json.dumps(dataclasses.asdict(self._me)).encode() + b"\n")
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise DataError(f"cannot write {self._path} ({error.strerror}): fix that") from error

    def _wait_for_silence(self, holder: Holder) -> None:
        """Returns if a holder seems dead, after watching whether it still touches the file.

        Raises:
            RunError: It does.
        """
        touched = os.stat(self._path).st_mtime_ns
        if time.time() - touched / 1e9 > SILENCE_SECONDS + CLOCK_SECONDS:
            return
        self._log(
            f"{self._folder} was in use by {_describe(holder)}: waiting up to "
            f"{SILENCE_SECONDS:.0f} s to see whether it still is"
        )
        deadline = time.monotonic() + SILENCE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(1.0, SILENCE_SECONDS / 10))
            try:
                if os.stat(self._path).st_mtime_ns != touched:
                    raise self._refusal(holder)
            except FileNotFoundError:  # it has just ended
                raise self._refusal(holder) from None

    def _refusal(self, holder: Holder | None) -> RunError:
        whose = "another process" if holder is None else _describe(holder)
        stop = "stop it" if holder is None else f"stop it (kill {holder.process})"
        return RunError(
            f"{self._folder} is in use by {whose}: wait for it, {stop}, or give another --workdir"
        )

    def _beat(self) -> None:
        """Touches the file until the end, or until it is another process's."""
        assert self._file is not None
        while not self._ended.wait(BEAT_SECONDS):
            # An error of a moment, as of a server that restarts, is not worth a run.
            with contextlib.suppress(OSError, DataError):
                if not self._path.exists():
                    self._restore()
                if not _is_at(self._path, self._file):
                    holder = _read_path(self._path)
                else:
                    holder = _read(self._file)
                if holder is not None and holder != self._me:
                    # Who takes over a silent process's lock writes into the file that is there.
                    self._was_removed = not _is_at(self._path, self._file)
                    self._lost_to = holder
                    return
                os.utime(self._path)

    def _restore(self) -> None:
        """Makes the file again that someone has removed; raises OSError if another process did."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        removed, made = self._file, io.FileIO(descriptor, "r+")
        if _try_lock(made) is False:  # another process was faster
            made.close()
            raise OSError(f"{self._path} is locked")
        self._file = made
        self._write(self._file)
        if removed is not None:
            removed.close()


_HELD: dict[Path, Holder] = {}
"""The locks that this process has, by the path of their files."""


def _describe(holder: Holder) -> str:
    return f"process {holder.process} on {holder.host} since {holder.started}"


def _try_lock(file: io.FileIO) -> bool | None:
    """Locks a file for this process; returns None if its file system has no such locks."""
    if fcntl is None:
        return None
    try:
        # Not flock: a lock of that kind is passed on to forked processes, which outlive a killed
        # one. One of this kind ends when this process closes the file, however often it opened it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, file: io.FileIO) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(file.fileno())
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _read(file: io.FileIO) -> Holder | None:
    """Returns whom the file states; None if it is empty or half written."""
    file.seek(0)
    try:
        return Holder(**json.loads(file.read()))
    except (ValueError, TypeError):
        return None


def _read_path(path: Path) -> Holder | None:
    with io.FileIO(path) as file:
        return _read(file)


def _read_when_written(file: io.FileIO) -> Holder | None:
    """Returns whom the file states, which its holder may be about to write.

    Until the holder has written, the file is empty or names the process of this machine that held
    the lock before and was killed.
    """
    machine = Holder.this_process().machine
    holder = None
    for _ in range(100):
        holder = _read(file)
        if holder is not None and (holder.machine != machine or _is_running(holder.process)):
            return holder
        time.sleep(0.05)
    return holder


def _is_running(process: int) -> bool:
    """Returns whether this machine has a process of a number."""
    try:
        with contextlib.suppress(PermissionError):  # it is another user's
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
