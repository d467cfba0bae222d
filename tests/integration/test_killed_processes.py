"""`kill -9` at random moments, of two runs; `tests/integration/kill.py` does more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kill.py")

# Others stop and resume in one process (`test_loop.py`, `test_denoising.py`); a kill adds files
# that are half written, which are the same for all.
OBJECTIVES = ("pretraining", "translation")


@pytest.mark.slow
def test_killed_processes_lose_no_steps():
    options = ["--kills", "6", "--kills-per-run", "3", "--steps", "12"]
    arguments = [sys.executable, str(SCRIPT), *options, "--objectives", *OBJECTIVES]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["killed"], counts["resumed"], counts["lost"]) == (6, 6, 0), done.stderr
    assert counts["by_objective"].keys() == set(OBJECTIVES)
    assert counts["by_moment"].keys() == {"start", "training", "save"}
    assert counts["during_save"] > 0
