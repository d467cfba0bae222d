"""The benchmark for GPUs, at tiny sizes on a CPU: what it does on a GPU no test can tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .gpu import CASES, Peer

SCRIPT = Path(__file__).with_name("gpu.py")
PEER = """
import json, sys
print("loading", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if line != "go\\n":
        break
    print(json.dumps({"s": 0.25}), flush=True)
print(json.dumps({"peer": "fake", "ms": 250.0}), flush=True)
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True
    )


def test_its_help_names_the_cases():
    shown = run("--help")
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert ", ".join(CASES) in words


def test_an_unknown_case_is_named():
    done = run("--tiny", "gpt5")
    assert done.returncode == 2
    assert "no case named 'gpt5': choose from check, attention" in done.stderr


def test_a_peer_takes_turns():
    peer = Peer([sys.executable, "-c", PEER])
    assert [peer.step(), peer.step()] == [0.25, 0.25]
    assert peer.end() == {"peer": "fake", "ms": 250.0}


@pytest.mark.slow
def test_cases_are_measured_once_and_a_failure_is_written(tmp_path):
    output = tmp_path / "rows.jsonl"
    peers = f"{sys.executable} -c '{PEER}'"
    done = run("--tiny", "--output", output, "attention", "bert-large 128", "--peers", peers)
    assert done.returncode == 0, done.stdout + done.stderr
    attention, bert = map(json.loads, output.read_text().splitlines())
    assert attention["packed, xla, steps"] == bert["steps"] == 2
    assert (bert["rows"], bert["tokens"]) == (2, 32)
    assert bert["peer_ms"] == 250.0
    assert bert["peer_time_ratio"] == pytest.approx(250 / bert["ms"], abs=1e-3)
    assert bert["kernel"] == "attention by XLA"
    assert run("--tiny", "--output", output, "attention").returncode == 0
    assert len(output.read_text().splitlines()) == 2
    done = run("--tiny", "--output", output, "generate 1", "--peers", "false")
    assert done.returncode == 1
    assert json.loads(output.read_text().splitlines()[-1]) == {
        "case": "generate 1",
        "error": "RuntimeError: the peer ended with status 1",
    }
