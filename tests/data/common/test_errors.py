"""The texts of messages."""

import pytest
from flaxzoo.data.common.errors import DataError, RunError, counted, reported


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1234, "1,234 steps")]
)
def test_a_count_of_one_is_singular(number, expected):
    assert counted(number, "step") == expected


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ValueError("two\nlines"), "two lines"),
        (KeyError(), "KeyError"),
        (FileNotFoundError(2, "No such file", "notes.txt"), "No such file"),
        (OSError(2, "No such\nfile"), "No such file"),
        (OSError("u", 404), "404"),
        (ValueError("x" * 1000), "x" * 200),
    ],
)
def test_a_failure_of_a_library_is_one_line(failure, reason):
    with pytest.raises(DataError) as raised, reported("it failed", "try again", Exception):
        raise failure
    assert str(raised.value) == f"it failed ({reason}): try again"
    assert raised.value.__suppress_context__


def test_other_failures_and_errors_of_flaxzoo_are_not_changed():
    with pytest.raises(KeyError), reported("it failed", "try again", ValueError):
        raise KeyError("name")
    # A UserError is a ValueError.
    with pytest.raises(RunError, match=r"^no run$"), reported("it failed", "try again", ValueError):
        raise RunError("no run")
    with pytest.raises(RunError), reported("it failed", "try again", OSError, error=RunError):
        raise OSError("full")
