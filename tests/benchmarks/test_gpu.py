"""The benchmark for GPUs, at tiny sizes on a CPU: what it does on a GPU no test can tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .gpu import CASES, Peer, table

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
    assert "'gpt5': choose from check, attention" in done.stderr


def test_a_peer_takes_turns():
    peer = Peer([sys.executable, "-c", PEER])
    assert [peer.step(), peer.step()] == [0.25, 0.25]
    assert peer.end() == {"peer": "fake", "ms": 250.0}


def test_the_table_has_a_line_a_case():
    rows = [
        {"case": "gpt2", "ms": 100.0, "ms_min": 99.0, "tokens_s": 7, "compile_s": 3.0}
        | {
            "peak_bytes": 2**31,
            "peer_ms": 150.0,
            "peer_time_ratio": 1.5,
            "kernel": "attention by X",
        },
        {"case": "gpt2-xl", "error": "stopped after 3 s"},
    ]
    head, line, *below = table(rows).splitlines()
    assert head.split()[:3] == ["case", "ms", "ms_min"]
    assert line.split() == ["gpt2", "100.0", "99.0", "7", "2.0", "3.0", "150.0", "1.5"]
    assert below == ["gpt2: attention by X", "gpt2-xl: error stopped after 3 s"]


@pytest.mark.slow
def test_cases_are_measured_once_beside_torch_and_a_failure_is_written(tmp_path):
    output = tmp_path / "rows.jsonl"
    done = run("--tiny", "--output", output, "attention", "llama-1b")
    assert done.returncode == 0, done.stdout + done.stderr
    attention, llama = map(json.loads, output.read_text().splitlines())
    assert attention["packed, xla, steps"] == llama["steps"] == 2
    assert attention["window, xla, peer_ms"] > 0
    assert (llama["rows"], llama["tokens"]) == (2, 32)
    assert llama["peer_time_ratio"] == pytest.approx(llama["peer_ms"] / llama["ms"], abs=2e-3)
    assert llama["peer"]["peer"].startswith("torch")
    assert llama["kernel"] == "attention by XLA"
    assert done.stdout.splitlines()[-1] == "llama-1b: attention by XLA"
    # A case with a line is not measured again.
    done = run("--tiny", "--output", output, "attention", "generate 1", "--minutes", "0.01")
    assert done.returncode == 1
    assert len(output.read_text().splitlines()) == 3
    assert json.loads(output.read_text().splitlines()[-1]) == {
        "case": "generate 1",
        "error": "stopped after 1 s",
    }
    assert run("--tiny", "--output", output, "gpt2", "--minutes", "0").returncode == 0
    assert len(output.read_text().splitlines()) == 3
