"""Strings that record who wrote each character, and keep this record in all operations.

A template is a program that trims, splits, joins and lowercases its input, and writes control
tokens by name. To know whether the template or a user wrote an ``<|im_end|>`` in the output, every
string must keep its origins through all operations. If a string loses its origins, its origin is
unknown, and it is never treated as text of the template.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from .bounds import spend, too_much

TEMPLATE, USER, ASSISTANT, UNKNOWN = "t", "u", "a", "?"
"""The origins of a character: the template; a user or a tool; the assistant; or unknown."""

_CONVERSION = re.compile(r"(?<!%)%[-#0 +]*\d*(?:\.\d+)?[hlL]?[a-zA-Z]")
_COMPUTED_WIDTH = re.compile(r"%[-#0 +.\d]*\*")


class Traced(str):
    """A string that stores the origin of each character as a letter in a second string.

    In all other respects, a traced string behaves like an ordinary string.
    """

    __slots__ = ("_by",)
    _by: str

    def __new__(cls, text: str = "", by: str = UNKNOWN) -> "Traced":
        """Makes a traced string.

        Args:
          text: The text.
          by: The origin of each character, or one letter that applies to all characters.
        """
        made = super().__new__(cls, text)
        made._by = by * len(text) if len(by) == 1 else by
        return made

    def __str__(self) -> "Traced":
        return self

    def __add__(self, other: str) -> "Traced":
        return joined((self, other))

    def __radd__(self, other: str) -> "Traced":
        return joined((other, self))

    def __mul__(self, times: SupportsIndex) -> "Traced":
        times = max(times.__index__(), 0)
        spend(characters=len(self) * times)
        return _made(str.__mul__(self, times), self._by * times)

    def __rmul__(self, times: SupportsIndex) -> "Traced":
        return self * times

    def __mod__(self, values: Any) -> "Traced":
        return _filled(self, values)

    def __getitem__(self, key: Any) -> "Traced":
        return _made(str.__getitem__(self, key), self._by[key])

    def __iter__(self) -> Iterator["Traced"]:
        return map(_made, str.__iter__(self), self._by)

    def _slice(self, start: int, end: int) -> "Traced":
        return _made(str.__getitem__(self, slice(start, end)), self._by[start:end])

    def lstrip(self, chars: str | None = None, /) -> "Traced":
        """See ``str``; the origins are kept."""
        return self._slice(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> "Traced":
        """See ``str``; the origins are kept."""
        return self._slice(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> "Traced":
        """See ``str``; the origins are kept."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> "Traced":
        """See ``str``; the origins are kept."""
        return self._slice(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> "Traced":
        """See ``str``; the origins are kept."""
        return self._slice(0, len(str.removesuffix(self, suffix)))

    def _divided(self, pieces: Iterable[str], separator: str | None) -> list["Traced"]:
        """Adds origins to the pieces between separators; a separator of None is white space."""
        found, start = [], 0
        for piece in pieces:
            # A piece begins after the separator. Two words may be separated by several spaces.
            start = str.index(self, piece, start)
            found.append(self._slice(start, start + len(piece)))
            start += len(piece) + len(separator or "")
        spend(characters=len(self))
        return found

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        """See ``str``; the origins are kept."""
        return self._divided(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        """See ``str``; the origins are kept."""
        return self._divided(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        """See ``str``; the origins are kept."""
        return self._divided(str.splitlines(self, keepends), None)

    def partition(self, sep: str, /) -> tuple["Traced", "Traced", "Traced"]:
        """See ``str``; the origins are kept."""
        before, found, after = self._divided(list(str.partition(self, sep)), "")
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple["Traced", "Traced", "Traced"]:
        """See ``str``; the origins are kept."""
        before, found, after = self._divided(list(str.rpartition(self, sep)), "")
        return before, found, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "Traced":
        """See ``str``; the origins are kept."""
        # An empty string is found before each character and at the end. Count the characters of the
        # result before it is made.
        if not old:
            spend(characters=(len(self) + 1) * (len(new) + 1))
            return Traced(str.replace(self, old, new, count), origin(self, new))
        parts = self.split(old, count)
        spend(characters=len(self) + (len(parts) - 1) * len(new))
        return _between(new, parts)

    def join(self, parts: Iterable[str], /) -> "Traced":
        """See ``str``; the origins are kept."""
        parts = list(parts)
        spend(characters=len(self) * len(parts))
        return _between(self, parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return Traced, (str.__str__(self), self._by)


def _in_place(change: Callable[[str], str]) -> Callable[[Traced], Traced]:
    """Wraps a string method that replaces each character by one or more characters."""

    def changed(self: Traced) -> Traced:
        """See ``str``; the origins are kept."""
        # If the length changes ('ß'.upper()), positions are lost, so keep only a common origin.
        text = change(self)
        return _made(text, self._by) if len(text) == len(self) else Traced(text, origin(self))

    return functools.update_wrapper(changed, change)


for _name in ("lower", "upper", "casefold", "capitalize", "title", "swapcase"):
    setattr(Traced, _name, _in_place(getattr(str, _name)))


def _made(text: str, by: str) -> Traced:
    """Makes a traced string from a text and an equally long string of origins."""
    made = str.__new__(Traced, text)
    made._by = by
    return made


def origins(text: str) -> str:
    """Returns the origin of each character, which is unknown for an ordinary string."""
    by = getattr(text, "_by", "")
    return by if len(by) == len(text) else UNKNOWN * len(text)


def joined(parts: Iterable[str]) -> Traced:
    """Joins strings."""
    parts = list(parts)
    spend(characters=sum(map(len, parts)))
    return _made("".join(parts), "".join(map(origins, parts)))


def _between(separator: str, parts: list[str]) -> Traced:
    """Joins strings with a separator between them."""
    by = origins(separator).join(map(origins, parts))
    spend(characters=len(by))
    return _made(str.join(separator, parts), by)


def parts_of(value: object) -> Iterator[object]:
    """Yields a value and, if it is a container, all values nested in it."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part


def origin(*values: object) -> str:
    """Returns the common origin of all strings in some values, or unknown if they differ."""
    found: set[str] = set()
    for part in parts_of(values):
        if isinstance(part, str):
            found.update(origins(part))
    return found.pop() if len(found) == 1 else UNKNOWN


def _filled(pattern: str, values: Any) -> Traced:
    """Formats values with a pattern such as ``%s``, as Python does."""
    # Count the widths before Python makes a text of this length.
    if _COMPUTED_WIDTH.search(pattern):
        raise too_much("it formats a text with a computed width, which may be arbitrarily large")
    spend(characters=sum(map(int, re.findall(r"\d+", pattern))))
    text = str.__mod__(str.__str__(pattern), values)
    given = values if isinstance(values, tuple) else (values,)
    fields = [
        as_text(value) if form == "%s" else Traced(form % (value,), origin(value))
        for form, value in zip(_CONVERSION.findall(str.__str__(pattern)), given, strict=False)
    ]
    return interleaved(_CONVERSION.split(str.__str__(pattern)), fields, origin(pattern), text)


def interleaved(literals: Iterable[str], fields: Iterable[str], by: str, text: str) -> Traced:
    """Returns a formatted text with origins, which are unknown if the parts do not form the text.

    Args:
      literals: The text in the pattern before each field, and the text after the last field.
      fields: The fields, with their origins.
      by: The origin of the pattern.
      text: The text that Python's formatting returns.
    """
    pairs = itertools.zip_longest((Traced(x, by) for x in literals), fields, fillvalue="")
    made = joined(itertools.chain.from_iterable(pairs))
    return made if made == text else Traced(text)


def as_text(value: object) -> Traced:
    """Converts a value to a text, as Python's ``str`` does."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, list | tuple | dict):
        return joined(_pieces(value, _REPR))
    return Traced(str(value), origins(value) if isinstance(value, str) else UNKNOWN)


@dataclass(frozen=True)
class _Notation:
    """A notation for values: Python's ``repr`` or JSON.

    Attributes:
      text: A function that writes a string.
      key: A function that writes a key of a dict.
      other: A function that writes any other value, such as a number or an empty list.
      brackets: A function that returns the brackets around the items of a value.
      between: The separator between two items.
      colon: The separator after a key.
      indent: The indentation added at each level, or None to write everything on one line.
      sort_keys: Whether the keys of dicts are sorted.
    """

    text: Callable[[str], Traced]
    key: Callable[[Any], Iterable[str]]
    other: Callable[[object], str]
    brackets: Callable[[Any], Sequence[str]]
    between: str = ", "
    colon: str = ": "
    indent: str | None = None
    sort_keys: bool = False

    def line(self, depth: int) -> str:
        """Returns the line break and the indentation that precede a line at a given depth."""
        return "" if self.indent is None else "\n" + self.indent * depth


def _pieces(value: Any, notation: _Notation, depth: int = 0) -> Iterator[str]:
    """Yields the pieces of text that represent a value; strings keep their origins.

    Brackets, commas and numbers get the user as their origin, so they never form a control token.
    """
    spend()
    if isinstance(value, str):
        yield notation.text(value)
        return
    if not isinstance(value, Mapping | list | tuple) or not value:
        yield Traced(notation.other(value), USER)
        return
    line = notation.line(depth + 1)
    # The indentation grows with the depth, so count its characters before it is made.
    spend(characters=len(line) * len(value))
    before, after = notation.brackets(value)
    in_order = isinstance(value, Mapping) and notation.sort_keys
    for item in sorted(value) if in_order else value:
        yield Traced(before + line, USER)
        if isinstance(value, Mapping):
            yield from notation.key(item)
            yield Traced(notation.colon, USER)
            item = value[item]
        yield from _pieces(item, notation, depth + 1)
        before = notation.between
    yield Traced(notation.line(depth) + after, USER)


def _python_brackets(value: Any) -> Sequence[str]:
    if isinstance(value, tuple):
        return "(", ",)" if len(value) == 1 else ")"
    return "[]" if isinstance(value, list) else "{}"


_REPR = _Notation(
    text=lambda text: Traced(repr(str.__str__(text)), origin(text) if text else USER),
    key=lambda key: _pieces(key, _REPR),
    other=repr,
    brackets=_python_brackets,
)


def as_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    *,
    sort_keys: bool = False,
) -> Traced:
    """Formats a value as JSON, as ``json.dumps`` does, without HTML escapes."""
    if isinstance(indent, int):
        spend(characters=max(indent, 0))
        indent = " " * indent
    between, colon = separators or (", " if indent is None else ",", ": ")

    def quoted(text: str) -> Traced:
        return _quoted(text, ensure_ascii=ensure_ascii)

    def key(name: object) -> Iterable[str]:
        # json.dumps converts other keys to strings. Extract the key from the result, such as {"1":
        # 0}.
        yield quoted(name if isinstance(name, str) else json.dumps({name: 0})[2:-5])

    notation = _Notation(
        text=quoted,
        key=key,
        other=json.dumps,
        brackets=lambda value: "{}" if isinstance(value, Mapping) else "[]",
        between=between,
        colon=colon,
        indent=indent,
        sort_keys=sort_keys,
    )
    return joined(_pieces(x, notation))


def _quoted(text: str, *, ensure_ascii: bool) -> Traced:
    """Returns a string as JSON, in quotation marks."""
    by = set(origins(text))
    if len(by) < 2:
        quoted = json.dumps(str.__str__(text), ensure_ascii=ensure_ascii)
        return Traced(quoted, by.pop() if by else USER)
    # Quote each character separately, so that an escape sequence has the origin of its character.
    parts = [
        Traced(json.dumps(str.__str__(c), ensure_ascii=ensure_ascii)[1:-1], origins(c))
        for c in text
    ]
    mark = Traced('"', USER)
    return joined([mark, *parts, mark])
