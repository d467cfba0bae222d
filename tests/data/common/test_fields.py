import dataclasses
import json
import math
import pickle
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from flaxzoo.data.common.errors import DataError, UserError
from flaxzoo.data.common.fields import (
    Checked,
    FieldError,
    Positive,
    PositiveInt,
    Range,
    Rate,
    describe,
    make_record,
    named_below,
    range_of,
    require_default,
    require_one_of,
    require_type,
    require_value,
)
from flaxzoo.models.registry import families
from flaxzoo.train.objectives.table import OBJECTIVES, objective_class


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Checked):
    rate: Rate = 0.1
    """A rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Checked):
    size: PositiveInt
    """A size,
    in tokens."""
    scale: Positive | None = None
    kind: Literal["a", "b"] = "a"
    flag: bool = False
    names: tuple[str, ...] = ()
    sizes: tuple[PositiveInt, ...] = ()
    inner: Inner = Inner()
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("size", 0, "at least 1"),
        ("size", True, "a whole number"),
        ("size", 1.0, "a whole number"),
        ("size", 2**63, "below 2⁶³"),
        ("scale", 0.0, "above 0 or None"),
        ("scale", math.nan, "finite or None"),
        ("scale", math.inf, "finite or None"),
        ("scale", "1", "a number or None"),
        ("kind", "c", "one of a, b"),
        ("flag", 1, "True or False"),
        ("names", "ab", "a tuple"),
        ("sizes", (1, 0), "a tuple of values that are at least 1"),
        ("inner", 3, "Inner"),
        ("more", 3, "an object"),
    ],
)
def test_a_value_that_a_declaration_does_not_allow(field, value, expected):
    with pytest.raises(FieldError) as caught:
        Outer(**{"size": 1, field: value})
    assert str(caught.value) == f"{field} must be {expected}, got {value!r}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_values_that_are_allowed():
    made = Outer(size=1, scale=3, names=["x"], sizes=[2], more={"x": [None]})
    assert (made.scale, made.names, made.sizes) == (3, ("x",), (2,))
    with pytest.raises(FieldError, match=r"size must .*-1"):
        dataclasses.replace(made, size=-1)


def test_numbers_of_numpy_become_those_of_python():
    made = Outer(size=np.int64(3), scale=np.float32(0.5), sizes=(np.int32(2),))
    assert json.dumps([made.size, made.scale, made.sizes]) == "[3, 0.5, [2]]"


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (Range(above=0), "above 0"),
        (Range(least=2), "at least 2"),
        (Range(most=3), "at most 3"),
        (Range(below=3), "below 3"),
        (Range(least=0, most=1), "at least 0 and at most 1"),
        (Range(least=0, below=1), "at least 0 and below 1"),
        (Range(), ""),
    ],
)
def test_the_text_of_a_range(declared, text):
    ranged: Any = Annotated[float, declared]
    assert range_of(ranged | None) == text


def test_a_record_from_a_file():
    made = make_record(Outer, {"size": 2, "names": ["x"], "inner": {"rate": 0.5}})
    assert made == Outer(size=2, names=("x",), inner=Inner(rate=0.5))
    for fields, message in (
        ({}, "run.size .*missing"),
        ({"size": 1, "sise": 2}, "unknown field run.sise"),
        ({"size": 0}, r"run\.size must .*0"),
        ({"size": 1, "inner": {"rate": 1}}, r"run\.inner\.rate must .*1"),
        ({"size": 1, "inner": []}, r"run\.inner must .*"),
    ):
        with pytest.raises(UserError, match=message):
            make_record(Outer, fields, "run.")


@pytest.mark.parametrize(
    ("value", "choices", "expected"),
    [
        ("usr", ["user", "system"], "one of user, system, got 'usr': did you mean user?"),
        ("c", {"a": 1, "b": 2}, "one of a, b, got 'c'"),
        (["a"], {"a": 1}, "one of a, got ['a']"),
        (9, range(2), "one of 0, 1, got 9"),
        ("gpt2x", [f"gpt{i}" for i in range(20)], "one of 20 names, got 'gpt2x': did you mean"),
    ],
)
def test_a_value_must_be_one_of_the_choices(value, choices, expected):
    with pytest.raises(DataError) as caught:
        require_one_of("name", value, choices, error=DataError)
    assert str(caught.value).startswith(f"name must be {expected}")
    require_one_of("name", next(iter(choices)), choices)


def test_relations_name_their_field():
    require_default(Inner(), ["rate"], "is for x")
    with (
        pytest.raises(FieldError, match=r"^a\.rate 0\.5 .* x: "),
        named_below("a."),
    ):
        require_default(Inner(rate=0.5), ["rate"], "is for x")


def test_a_description_has_type_range_and_default():
    described = {field.name: field for field in describe(Outer(size=3))}
    size, rate = described["size"], described["inner.rate"]
    assert (size.default, size.range, size.text) == (3, "at least 1", "A size, in tokens.")
    assert (rate.default, rate.range, rate.text) == (0.1, "at least 0 and below 1", "A rate.")


def test_a_field_that_a_family_declares_again_keeps_a_range():
    """A subclass that changes a default must not lose the range with the type."""
    objectives = [objective_class(kind) for kind in OBJECTIVES]
    data = [cls for objective in objectives for cls in objective.data_kinds]
    for cls in [*(family.config for family in families().values()), *objectives, *data]:
        hints = {field.name: range_of(field.type) for field in dataclasses.fields(cls)}
        for base in filter(dataclasses.is_dataclass, cls.__mro__):
            for field in dataclasses.fields(base):
                kept = hints.get(field.name, "a constant of the class")
                assert kept or not range_of(field.type), (cls, field.name)


def test_a_value_that_is_required():
    assert require_value(0, "no value") == 0
    with pytest.raises(DataError, match=r"^no value$"):
        require_value(None, "no value", DataError)
    assert require_type(True, int, "no number") is True
    with pytest.raises(DataError, match=r"^no number$"):
        require_type("1", int, "no number", DataError)
