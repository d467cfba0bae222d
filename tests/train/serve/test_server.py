"""The end of a server: no request is lost without an answer, and the status is 0."""

import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from ...support.server import running, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_a_signal_ends_the_server_after_its_requests(run_folder, tmp_path):
    """A stream that has begun is finished, and later requests are refused or not accepted."""
    with (
        running(tmp_path, f"a={run_folder}", "--rows", 1, FLAXZOO_API_KEY="secret") as server,
        httpx.Client(timeout=60, headers={"Authorization": "Bearer secret"}) as client,
    ):
        body = {"model": "a", "prompt": "the", "max_tokens": 100, "stream": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
        begun, lines = threading.Event(), []

        def read():
            with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: refused(client, server.url), seconds=10)
        assert server.process.wait(timeout=60) == 0
        assert time.monotonic() - started < 12
        thread.join(timeout=10)
    whole = lines[-2:] == ["data: [DONE]", ""]
    assert whole or '"code": "unavailable"' in lines[-2]


LOADING = """
import time
from pathlib import Path
from flaxzoo.train.serve import server
def load(*arguments, ema):
    Path("loading").touch()
    time.sleep(60)
server.open_models = load
server.serve(("a",), server.Address(port=0), server.Limits(), log=print)
"""
"""A server whose models take long to load."""


def test_a_signal_ends_a_server_that_is_loading(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", LOADING], cwd=tmp_path)
    try:
        wait_for((tmp_path / "loading").exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()


def refused(client, url):
    try:
        return client.get(f"{url}/v1/models").status_code == 503
    except httpx.TransportError:
        return True
