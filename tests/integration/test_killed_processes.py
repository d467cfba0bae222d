"""`kill -9` at random moments, of runs of four kinds; `tests/integration/kill.py` does more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill.py")

# One of each way to read rows: the others are without the next sentence, or labelled as spans are.
OBJECTIVES = ("causal", "pretraining", "spans", "translation")


@pytest.mark.slow
def test_killed_processes_lose_no_steps():
    options = ["--kills", "8", "--kills-per-run", "2", "--steps", "12"]
    arguments = [sys.executable, str(SCRIPT), *options, "--objectives", *OBJECTIVES]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["killed"], counts["resumed"], counts["lost"]) == (8, 8, 0), done.stderr
    assert counts["by_objective"].keys() == set(OBJECTIVES)
    assert counts["by_moment"].keys() == {"start", "training", "save"}
    assert counts["during_save"] > 0
