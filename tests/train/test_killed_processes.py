"""`kill -9` at random moments, a few times; `tests/faults/kill.py` does it more often."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "faults" / "kill.py"


@pytest.mark.slow
def test_nothing_is_lost():
    arguments = [sys.executable, str(SCRIPT), "--kills", "4", "--kills-per-run", "2"]
    arguments += ["--objectives", "causal", "translation"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["killed"], counts["resumed"], counts["lost"]) == (4, 4, 0), done.stderr
    assert counts["by_objective"].keys() == {"causal", "translation"}
    assert counts["during_save"] > 0
