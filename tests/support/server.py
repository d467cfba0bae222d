"""A server of flaxzoo in a subprocess."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import requests

START = 300
"""Seconds until the server must be warm, on a busy machine."""


class Server:
    """A process of `flaxzoo serve`, its address and what it printed."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    def stop(self, number=signal.SIGTERM):
        """Sends a signal; returns the status of the process."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def running(folder, *arguments, **environment):
    """Starts a server whose output goes to a file in `folder`, and waits until it is warm."""
    log = folder / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "flaxzoo", "serve", *map(str, arguments), "--port", "0"]
    # One device, as users have.
    flags = {"XLA_FLAGS": "", **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **flags})
    try:
        url = wait_for(lambda: address(log), process, log)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, process, log)
        yield Server(process, url, log)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def closing_sessions(monkeypatch):
    """Closes the connections that lm-eval leaves open, of which Python warns at any later time."""
    opened = []

    class Session(requests.Session):
        def __init__(self):
            super().__init__()
            opened.append(self)

    monkeypatch.setattr(requests, "Session", Session)
    yield
    for session in opened:
        session.close()


def address(log):
    found = re.search(r"listening on (http://\S+)", log.read_text())
    return found and found[1]


def wait_for(condition: Any, process: Any = None, log: Any = None, seconds: float = START) -> Any:
    """Returns the first value of a condition that is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert process is None or process.poll() is None, log and log.read_text()
        assert time.monotonic() < end, log and log.read_text()
        time.sleep(0.05)
    return value
