"""The words of messages about data sets."""

import pytest
from flaxzoo.data.dataset import counted


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1234, "1,234 steps")]
)
def test_one_thing_is_singular(number, expected):
    assert counted(number, "step") == expected
