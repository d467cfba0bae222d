"""Fields of the objects of JSON lines."""

import pytest
from flaxzoo.data import DataError
from flaxzoo.data.common.json_lines import picked, single_fields

ROW = {"a": 1, "b": 2, "a+c": 3, "d?": 4}


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (["b", "a"], (2, 1)),
        (["a+b"], ([1, 2],)),
        (["a+c", "d?"], (3, 4)),
        (["a?", "c?"], (1, None)),
        (["a?+b", "a+c?"], ([1, 2], 3)),
        ([], ()),
    ],
)
def test_the_values_of_fields(fields, values):
    assert picked(ROW, fields, "line 1") == values
    # Only the names of single fields can have had an effect.
    read = {name: ROW[name] for name in ROW.keys() & single_fields(fields)}
    assert picked(read, fields, "line 1") == values


def test_a_missing_field_is_named():
    with pytest.raises(DataError, match="line 1 has no field 'c'"):
        picked(ROW, ["b+c"], "line 1")
