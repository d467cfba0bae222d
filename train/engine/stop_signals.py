"""Signals that ask a run to stop: SIGTERM, Ctrl-C, and the SIGHUP of a closed terminal.

The first one lets the step in progress end, for the state before it no longer exists, and is then
answered with a checkpoint; a wait for data is cut off. The second one ends the run at once.
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
"""The signal of a closed terminal; Windows has none."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a run at once when they come again; of SIGHUP a shell may send several."""
SECONDS_OF_ONE = 1.0
"""Signals within so short a time are one: some programs pass on what a terminal sends anyway."""


class StopNow(BaseException):
    """Ends the loop over steps, and cuts off a wait while `StopRequest.cuts_off`.

    Not an Exception, which a library might take for an error and handle.
    """


class StopRequest:
    """The first signal that a run receives while it trains."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the signal; 0 if none came."""
        self.cuts_off = False
        """Whether the first signal raises StopNow, as during a wait that changes no state."""
        self._received = 0.0
        self._before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}

    def install(self) -> None:
        """Handles the signals until `restore`; a SIGHUP that nohup ignores stays ignored."""
        for number in (*ENDING, *([] if SIGHUP is None else [SIGHUP])):
            if signal.getsignal(number) is signal.SIG_IGN and number == SIGHUP:
                continue
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Puts back the handlers from before `install`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: object) -> None:
        if number == SIGHUP:
            _leave_closed_terminal()
        if not self.number:
            self.number, self._received = number, time.monotonic()
            if self.cuts_off:
                raise StopNow
        elif number in ENDING and time.monotonic() - self._received > SECONDS_OF_ONE:
            self.restore()
            signal.raise_signal(number)  # KeyboardInterrupt, or the end of the process


@contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """Yields the request to stop, which a signal makes. A second signal is not held back."""
    request = StopRequest()
    # Python allows handlers in the main thread only; elsewhere signals are left to the caller.
    if threading.current_thread() is threading.main_thread():
        request.install()
    try:
        yield request
    finally:
        request.restore()


def _leave_closed_terminal() -> None:
    """Redirects output to a closed terminal to nowhere, for saving prints a message."""
    for file in (1, 2):
        if stat.S_ISCHR(os.fstat(file).st_mode) and not os.isatty(file):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)


@contextmanager
def ended_by_second_signal() -> Iterator[None]:
    """Makes the second signal end the process at once, whatever it is doing.

    Python calls a handler only between two of its own instructions, which may be minutes apart
    while a program is compiled. To be entered in the main thread of a program of its own: a
    notebook is not to be ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _watch(reader: socket.socket) -> None:
    """Ends the process at the second of `ENDING` that the reader tells of."""
    first: float | None = None
    with reader:
        while byte := reader.recv(1):
            number, now = byte[0], time.monotonic()
            if number not in ENDING:
                continue
            if first is None:
                first = now
            elif now - first > SECONDS_OF_ONE:
                shown = (
                    "\x1b[?25h\n" if sys.stderr.isatty() else ""
                )  # the cursor, which a bar hides
                print(
                    f"{shown}flaxzoo: a second signal ({signal.Signals(number).name}): ended at "
                    "once; the same command resumes from the newest checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(128 + number)
