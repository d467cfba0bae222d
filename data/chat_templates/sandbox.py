"""Runs chat templates in jinja2's sandbox, with limits and traced strings.

All strings in a template, its input and its output are ``Traced``. If the language or a filter
makes a string without origins, the string gets the common origin of its source values,
or an unknown origin if their origins differ.
"""

import functools
import itertools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
from jinja2.compiler import Frame
from jinja2.parser import Parser
from jinja2.runtime import Context
from markupsafe import Markup

from ..common.errors import DataError, reported
from ..common.fields import require
from .bounds import MAX_BITS, MAX_SOURCE, spend, too_much
from .traced import (
    TEMPLATE,
    Traced,
    as_json,
    as_text,
    interleaved,
    joined,
    origin,
    origins,
    parts_of,
)

V = TypeVar("V")
# Filters and methods that take a number, such as a width, that affects the size of the result. The
# number is counted as characters once, and once more for each occurrence of the string in this
# table.
_SIZED = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "batch", "slice", "wordwrap"), ""),
    **dict.fromkeys(("truncate", "round", "to_bytes"), ""),
    **{"indent": "\n", "expandtabs": "\t"},
}


@dataclass
class Marks:
    """The text that a running template has written, and the ranges that it has marked."""

    blocks: list[str] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)


MARKS: ContextVar[Marks] = ContextVar("marks")


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` encloses the text that the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        # When the template is rendered, `_mark` is called with the text of the block.
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body)
        return block.set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text, marks = caller(), MARKS.get()
        # The text begins after all blocks that the template has written so far.
        start = sum(map(len, marks.blocks))
        marks.ranges.append((start, start + len(text)))
        return text


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, which could escape the sandbox."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, args = args[0], args[1:]
        for name in (fields := dict(*args, **attributes)):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set the name {name!r}")


class _Safe(Markup):
    """The result of the filter ``safe``: it escapes strings added to it, and keeps origins."""

    _by: str = ""


class _Dict:
    """Makes dicts without exposing the attributes of the type ``dict``."""

    def __call__(self, *args: Any, **fields: object) -> dict[str, object]:
        return dict(*args, **fields)

    def fromkeys(self, keys: Iterable[object], value: object = None) -> dict[object, object]:
        return dict.fromkeys(keys, value)


class _Code(jinja2.compiler.CodeGenerator):
    """Compiles a template so that its strings are traced and its containers are counted."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, str):
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[str]) -> str:
        return self._literal("".join(group))

    def _literal(self, text: str) -> str:
        # Compiled code can contain only plain strings, so it refers to traced strings by index.
        literals = self.environment.literals  # pyright: ignore
        literals.append(Traced(text, TEMPLATE))
        return f"environment.literals[{len(literals) - 1}]"

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat(map(environment.as_text, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> None:
        """Writes a node. The items of a list, tuple or dict are counted when it is made."""
        # The target of an assignment is not a value, so do not count it.
        made = isinstance(node, _CONTAINERS) and getattr(node, "ctx", "load") == "load"
        if made:
            self.write("environment.counted(")
        super().visit(node, *args, **kwargs)
        if made:
            self.write(")")


_CONTAINERS = (jinja2.nodes.List, jinja2.nodes.Dict, jinja2.nodes.Tuple)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The jinja2 environment of one template."""

    code_generator_class = _Code
    concat = staticmethod(joined)
    as_text = staticmethod(as_text)
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            # Constant folding would run without the limits.
            optimized=False,
            finalize=_written,
        )
        self.literals: list[Traced] = []
        # Replace these filters of Jinja, and trace all filters.
        replaced = {
            "tojson": as_json,
            "string": as_text,
            "join": _join,
            "sum": self._sum,
            "indent": _indent,
            "safe": _safe,
        }
        self.filters = {
            name: self._traced(name, replaced.get(name, used))
            for name, used in self.filters.items()
        }
        # Remove `urlize` and `lipsum`: their results may be large, and templates do not need them.
        del self.filters["urlize"], self.globals["lipsum"]
        self.globals.update(
            raise_exception=_refuse, strftime_now=_now, dict=_Dict(), namespace=_Namespace
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parses a template, and makes each loop iteration count as a step."""
        parsed = Parser(self, source, name, filename).parse()
        nodes = jinja2.nodes
        for loop in list(parsed.find_all(nodes.For)):
            step = nodes.EnvironmentAttribute("step", lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
            # Also count the items that the condition of the loop rejects.
            if loop.test is not None:
                loop.test = nodes.And(step, loop.test, lineno=loop.lineno)
        return parsed

    @property
    def step(self) -> bool:
        """Counts a step, and returns True, so that a loop condition can contain the step."""
        spend()
        return True

    def counted(self, value: V) -> V:
        """Counts all items of a container, and returns the container."""
        for _ in parts_of(value):
            spend()
        return value

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> object:
        """Applies an operator; raises an error if the result would be too large."""
        spend()
        # Check the size of the result before computing it.
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length()
            bits = {"*": size + right.bit_length(), "**": abs(size * right)}
            if bits.get(operator, 0) > MAX_BITS:
                raise too_much("it makes a number that is too large")
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, list | tuple) and isinstance(times, int):
                    spend(max(times, 0) * len(one))
        # If one operand is Markup, it escapes the other operand.
        if isinstance(left, Markup) or isinstance(right, Markup):
            left, right = (str.__str__(x) if isinstance(x, Traced) else x for x in (left, right))
        made = super().call_binop(context, operator, left, right)  # pyright: ignore
        return self._adopted(made, left, right)

    def call(self, context: Context, called: Any, /, *args: object, **kwargs: object) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Calls a function, a method or a macro."""
        spend()
        self.counted([args, kwargs])
        # If a method is called, this is the object that has the method.
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(owner, str) and called.__name__ == "translate":
            raise too_much("it calls translate, whose result may be arbitrarily large")
        if isinstance(owner, str | int | bytes | float):
            _check_size(getattr(called, "__name__", ""), owner, args, kwargs)
        result = super().call(context, called, *args, **kwargs)
        # Only a string passes its origin to the results of its methods.
        texts = (owner,) if isinstance(owner, str) else ()
        return self._adopted(result, *texts, *args, *kwargs.values())

    def wrap_str_format(self, value: Any) -> Callable[..., Traced] | None:
        """Returns a safe version of a string's ``format`` method that keeps origins."""
        if super().wrap_str_format(value) is None:
            return None
        # `value` is the method `format` or `format_map` of a string.
        pattern = value.__self__

        @functools.wraps(value)
        def wrapped(*args: Any, **fields: Any) -> Traced:
            if value.__name__ == "format_map":
                (fields,), args = args, ()
            formatter = _Formatter(self)
            text = formatter.vformat(str.__str__(pattern), args, fields)
            literals = [literal for literal, *_ in formatter.parse(str.__str__(pattern))]
            return interleaved(literals, formatter.fields, origin(pattern), text)

        return wrapped

    def _traced(self, name: str, used: Callable[..., object]) -> Callable[..., object]:
        """Wraps a filter so that it counts as a step and its result has origins."""
        # Some filters receive the context or the environment before the filtered value.
        first = int(jinja2.utils._PassArg.from_obj(used) is not None)

        @functools.wraps(used)
        def traced(*args: object, **kwargs: object) -> object:
            value, *given = args[first:]
            spend(characters=len(value) if isinstance(value, str) else 0)
            _check_size(name, value, given, kwargs)
            return self._adopted(used(*args, **kwargs), value, *given, *kwargs.values())

        return traced

    def _adopted(self, value: object, *made_of: object) -> object:
        """Counts the characters or items of a result, and adds origins to its strings."""
        if isinstance(value, str):
            if not isinstance(value, Traced | Markup):
                spend(characters=len(value))
                value = Traced(value, origin(*made_of))
            return value
        if isinstance(value, list | tuple | Mapping):
            self.counted(value)
        if isinstance(value, list | tuple):
            if str in map(type, value):
                items = [self._adopted(item, *made_of) for item in value]
                value = items if isinstance(value, list) else tuple(items)
        elif isinstance(value, bytes | bytearray):
            raise too_much("it makes bytes")
        elif isinstance(value, types.GeneratorType | itertools.chain):
            return self._steps(value, made_of)
        return value

    def _steps(self, values: Iterator[object], made_of: tuple[object, ...]) -> Iterator[object]:
        for value in values:
            spend()
            yield self._adopted(value, *made_of)

    def _sum(
        self, values: Iterable[object], attribute: str | int | None = None, start: object = 0
    ) -> object:
        """Adds up values, as jinja2's filter does."""
        if attribute is not None:
            values = map(jinja2.filters.make_attrgetter(self, attribute), values)
        total = start
        for value in values:
            # The values may be numbers, strings or lists, so use the operator with limits.
            total = self.call_binop(None, "+", total, value)
        return total


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """A formatter for ``str.format`` that stores the formatted fields with their origins."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.fields: list[Traced] = []

    def format_field(self, value: object, format_spec: str) -> str:
        """Formats a value, and counts the width in the format specification as characters."""
        spend(characters=sum(map(int, re.findall(r"\d+", format_spec))))
        text = super().format_field(value, format_spec)
        self.fields.append(as_text(value) if not format_spec else Traced(text, origin(value)))
        return text


def _check_size(
    name: str, value: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Counts the characters that a filter or a method adds because of a number argument."""
    repeated = _SIZED.get(name)
    if repeated is None:
        return
    times = 1 + (value.count(repeated) if isinstance(value, str) and repeated else 0)
    for given in (*args, *kwargs.values()):
        if isinstance(given, int | str):
            spend(characters=times * (abs(given) if isinstance(given, int) else len(given)))


@jinja2.pass_context
def _written(context: Context, value: object) -> Traced:
    """Converts a value to the text that a template writes."""
    # Because this function takes the context, jinja2 does not call it at compile time.
    del context
    spend()
    return as_text(value)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment,
    value: Iterable[object],
    d: object = "",
    attribute: str | int | None = None,
) -> Traced:
    """Joins texts, as jinja2's filter does."""
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return as_text(d).join(map(as_text, value))


def _safe(value: object) -> Markup:
    text = as_text(value)
    safe = _Safe(str.__str__(text))
    safe._by = origins(text)
    return safe


def _indent(s: object, *args: Any, **kwargs: Any) -> str:
    """Indents the lines of a text. Returns a plain string; `_traced` adds an origin."""
    return jinja2.filters.do_indent(str.__str__(as_text(s)), *args, **kwargs)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=64)
def compiled(source: str) -> jinja2.Template:
    """Compiles a template.

    Raises:
      DataError: The template has an error, or is too long.
    """
    require(
        len(source) <= MAX_SOURCE,
        f"the chat template must have at most {MAX_SOURCE:,} characters, got {len(source):,}: give "
        "a shorter one",
        error=DataError,
    )
    # The compilers have limits, for example on nested blocks, and may raise any exception.
    with reported("the chat template is faulty", "correct it", Exception):
        return Sandbox().from_string(source)
