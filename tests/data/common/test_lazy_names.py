"""Records that are loaded when they are looked up."""

import pytest
from flaxzoo.data.common.lazy_names import LazyRecords


def test_only_the_record_that_is_looked_up_is_loaded():
    loaded = []

    def load(name):
        loaded.append(name)
        return name.upper()

    records = LazyRecords({"a": lambda: load("a"), "b": lambda: load("b")})
    assert (list(records), len(records), "a" in records, "c" in records) == (
        ["a", "b"],
        2,
        True,
        False,
    )
    assert not loaded
    assert records["b"] == "B"
    assert loaded == ["b"]
    with pytest.raises(KeyError):
        records["c"]


def test_a_record_can_be_put_in_place_of_one_and_taken_out():
    records = LazyRecords({"a": lambda: 1})
    records["a"], records["b"] = 2, 3
    assert dict(records) == {"a": 2, "b": 3}
    del records["b"]
    assert dict(records) == {"a": 2}
