"""The texts of messages."""

import pytest
from flaxzoo.data.common.errors import counted


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1234, "1,234 steps")]
)
def test_a_count_of_one_is_singular(number, expected):
    assert counted(number, "step") == expected
