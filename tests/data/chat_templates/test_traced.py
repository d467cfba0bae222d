"""Traced strings equal those of Python, and no character changes its writer."""

import json
from typing import Any

import pytest
from flaxzoo.data.chat_templates.traced import Traced, as_json, as_text, joined, origins
from hypothesis import given, settings
from hypothesis import strategies as st

# The template writes the letters of the first, a user those of the second.
BY_TEMPLATE, BY_USER = "tTß \n{", "uUé<\u2028|"


def traced(text):
    return Traced(text, "".join("t" if c in BY_TEMPLATE else "u" for c in text))


texts = st.text(alphabet=BY_TEMPLATE + BY_USER, max_size=12).map(traced)
METHODS = [
    *("lower", "upper", "title", "capitalize", "casefold", "swapcase", "strip", "lstrip"),
    *("rstrip", "split", "rsplit", "splitlines"),
]


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def check(found, expected):
    assert plain(found) == expected
    for text in [found] if isinstance(found, str) else found:
        assert isinstance(text, Traced)
        assert len(origins(text)) == len(text)
        for character, writer in zip(plain(text), origins(text), strict=True):
            assert writer != "t" or character.lower() not in BY_USER.lower()
            assert writer == "?" or writer == "u" or character.lower() not in "uéé|<"


@settings(deadline=None, max_examples=150)
@given(texts, texts, texts, st.integers(-3, 12), st.integers(-3, 12))
def test_methods(text, other, third, start, count):
    bare, sep, new = plain(text), plain(other), plain(third)
    for name in METHODS:
        check(getattr(text, name)(), getattr(bare, name)())
    check(text + other, bare + sep)
    check(text + sep, bare + sep)
    check(bare + other, bare + sep)
    check(text * max(start, 0), bare * max(start, 0))
    check(text[start:count], bare[start:count])
    check(text[::-1], bare[::-1])
    check(list(text), list(bare))
    check(text.replace(other, third, start), bare.replace(sep, new, start))
    check(text.join([other, third, text]), bare.join([sep, new, bare]))
    check(joined([text, other]), bare + sep)
    check(text.removeprefix(other), bare.removeprefix(sep))
    check(text.removesuffix(other), bare.removesuffix(sep))
    check(text.strip(other), bare.strip(sep))
    check(text.split(None, start), bare.split(None, start))
    check(text.rsplit(None, start), bare.rsplit(None, start))
    check(text.splitlines(True), bare.splitlines(True))
    if other:
        for name in ("split", "rsplit"):
            check(getattr(text, name)(other), getattr(bare, name)(sep))
            check(getattr(text, name)(other, start), getattr(bare, name)(sep, start))
        check(text.partition(other), bare.partition(sep))
        check(text.rpartition(other), bare.rpartition(sep))


@settings(deadline=None, max_examples=50)
@given(texts, texts, st.integers(-9, 9))
def test_patterns(text, other, number):
    for pattern in ("t%st%s", "%5s%-4s", "%s%%%r", "%.2s%s"):
        found = traced(pattern.replace("%", "\x00")).replace("\x00", "%") % (text, other)
        assert plain(found) == pattern % (plain(text), plain(other))
    assert plain(Traced("%d %(a)s", "t")) == "%d %(a)s"
    assert Traced("%(a)s%(b)5.1f", "t") % {"a": text, "b": number} == f"{plain(text)}{number:5.1f}"


@settings(deadline=None, max_examples=100)
@given(
    st.recursive(
        st.one_of(texts, st.integers(), st.booleans(), st.none(), st.floats()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(st.one_of(texts, st.integers(), st.none()), inner, max_size=3),
        ),
        max_leaves=8,
    )
)
def test_json_and_repr(value):
    def bare(value):
        if isinstance(value, dict):
            return {bare(key): bare(item) for key, item in value.items()}
        return type(value)(map(bare, value)) if isinstance(value, list | tuple) else plain(value)

    assert as_text(value) == str(bare(value))
    for options in ({}, {"indent": 2}, {"ensure_ascii": True}, {"separators": (",", ":")}):
        given = {"ensure_ascii": False, **options}
        assert as_json(value, **given) == json.dumps(bare(value), **given)


def test_a_character_that_lost_its_origin_is_unknown():
    assert origins("abc") == "???"
    assert origins(Traced("ab", "t") + "c") == "tt?"
    assert origins(as_text(5)) == "?"
    with pytest.raises(TypeError):
        Traced(",", "t").join([Traced("a", "u"), 1])  # pyright: ignore
