"""The ledger of what train steps cost."""

import subprocess
import sys
from pathlib import Path

import pytest

from .ledger import OTHER_VERSIONS, grown

SCRIPT = Path(__file__).with_name("ledger.py")


@pytest.mark.parametrize(
    ("today", "expected"),
    [
        ({"flops": 1000, "bytes accessed": 1010}, []),
        ({"flops": 1011, "bytes accessed": 1000}, ["flops"]),
        ({"flops": 10, "bytes accessed": 10}, []),  # less is no error
        ({"flops": 1000, "all-gather, count": 1}, ["all-gather, count"]),
    ],
)
def test_changed_costs_are_listed(today, expected):
    assert grown({"flops": 1000, "bytes accessed": 1000}, today) == expected


@pytest.mark.slow
def test_no_train_step_costs_more_than_the_ledger_says():
    """Compiles every case anew, which takes a minute or two."""
    # The script replaces the flags of these tests, which change what is compiled.
    command = [sys.executable, str(SCRIPT), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == OTHER_VERSIONS:
        pytest.skip(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
