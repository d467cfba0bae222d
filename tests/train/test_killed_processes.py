"""`kill -9` at random moments, once for each objective; `tests/faults/kill.py` does more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "faults" / "kill.py"


@pytest.mark.slow
def test_nothing_is_lost():
    arguments = [sys.executable, str(SCRIPT), "--kills", "8", "--kills-per-run", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["killed"], counts["resumed"], counts["lost"]) == (8, 8, 0), done.stderr
    assert len(counts["by_objective"]) == 8
    assert counts["during_save"] > 0
