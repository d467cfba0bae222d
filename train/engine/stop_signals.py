"""Handles signals that stop a run: SIGTERM, Ctrl-C, and SIGHUP when the terminal is closed.

After the first signal, the run completes the step in progress and saves a checkpoint. The run
cannot abandon the step, because the step has already overwritten the previous state. If the run is
waiting for data, the first signal ends the wait. The second signal ends the run immediately.
"""

import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGHUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""The signal that is sent when the terminal is closed; None on Windows."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a run immediately when they arrive a second time. SIGHUP is not included,
because a shell may send it several times."""
DUPLICATE_SECONDS = 1.0
"""Signals that arrive within this number of seconds count as one signal, because a parent process
may forward the signal that the terminal has already sent."""


class StopNow(BaseException):
    """Ends the loop over steps. If `StopRequest.cuts_off` is set, it also interrupts a wait.

    `StopNow` does not derive from Exception, because a library might catch an Exception.
    """


class StopRequest:
    """The first signal that a run receives while it trains."""

    def __init__(self) -> None:
        self.signum = 0
        """The number of the signal; 0 if no signal arrived."""
        self.cuts_off = False
        """Whether the first signal raises StopNow immediately. True during a wait that changes no
        state."""
        self._received = 0.0
        self._before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}

    def install(self) -> None:
        """Handles the signals until `restore` is called. Under nohup, SIGHUP is still ignored."""
        for signum in (*ENDING, *([] if SIGHUP is None else [SIGHUP])):
            if signal.getsignal(signum) is signal.SIG_IGN and signum == SIGHUP:
                continue
            self._before[signum] = signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Restores the handlers that `install` replaced."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def _handle(self, signum: int, frame: object) -> None:
        if signum == SIGHUP:
            _leave_closed_terminal()
        # Only record the first signal, because the loop checks for a signal between steps.
        if not self.signum:
            self.signum, self._received = signum, time.monotonic()
            if self.cuts_off:
                raise StopNow
        # Restore the previous handlers, which then handle the second signal.
        elif signum in ENDING and time.monotonic() - self._received > DUPLICATE_SECONDS:
            self.restore()
            signal.raise_signal(signum)  # raises KeyboardInterrupt, or ends the process


@contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """Yields the stop request that the first signal sets. A second signal acts immediately."""
    request = StopRequest()
    # Python allows handlers only in the main thread. In another thread, the caller must handle
    # signals.
    if threading.current_thread() is threading.main_thread():
        request.install()
    try:
        yield request
    finally:
        request.restore()


def _leave_closed_terminal() -> None:
    """Redirects output to a closed terminal to the null device, because saving prints messages."""
    for file in (1, 2):
        # After a terminal is closed, its descriptor is still a character device but not a terminal.
        if stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)


@contextmanager
def ended_by_second_signal() -> Iterator[None]:
    """Makes the second signal end the process immediately, even during compilation.

    Python calls a signal handler only between two bytecode instructions, which may be minutes apart
    during compilation. Enter this context only in the main thread of a command-line program: in a
    notebook, the second signal would end the kernel.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The interpreter writes the number of each signal to this socket as soon as it arrives, and a
    # thread reads the numbers.
    reader, writer = socket.socketpair()
    # `set_wakeup_fd` requires a non-blocking descriptor.
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _watch(reader: socket.socket) -> None:
    """Ends the process when `reader` receives a second signal of `ENDING`."""
    first: float | None = None
    with reader:
        while byte := reader.recv(1):
            signum, now = byte[0], time.monotonic()
            if signum not in ENDING:
                continue
            if first is None:
                first = now
            elif now - first > DUPLICATE_SECONDS:
                # Show the cursor, which the progress bar hides.
                shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""
                print(
                    f"{shown}flaxzoo: ended at once by a second signal "
                    f"({signal.Signals(signum).name}): the same command resumes from the newest "
                    "checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(128 + signum)
