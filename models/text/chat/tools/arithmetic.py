"""Evaluates arithmetic without `eval`, and rejects numbers that take long to compute."""

import ast
import math
import operator
import warnings
from collections.abc import Callable

from .....data.common.errors import UserError
from .tool import Tool

LONGEST = 300
"""Maximum characters of an expression."""
BITS = 2048
"""The largest result, in bits."""
DIGITS = 300
"""Maximum absolute value of the digits argument of `round`."""

Number = int | float
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _round(number: Number, digits: int = 0) -> Number:
    """Rounds a number; the built-in function computes 10**-digits, however large that is."""
    if abs(digits) > DIGITS:
        raise ValueError(f"the number of digits is {digits}: give at most {DIGITS}")
    return round(number, digits)


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": math.sqrt,
}


def evaluate(expression: str) -> str:
    """Computes an expression of numbers, + - * / // % ** and abs, max, min, round, sqrt.

    Args:
        expression: for example `(3 + 4) * 12`; `×`, `÷`, `−` and `^` are supported.

    Raises:
        UserError: the expression is invalid, divides by zero, or has too large a number.
    """
    if len(expression) > LONGEST:
        raise UserError(f"the expression has {len(expression)} characters: give at most {LONGEST}")
    plain = expression.translate(str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"}))
    try:
        with warnings.catch_warnings():  # `1if 1else 2` would print one
            warnings.simplefilter("ignore")
            tree = ast.parse(plain.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{expression!r} is no arithmetic: write it as (3 + 4) * 12") from None
    result = _value(tree.body)
    if isinstance(result, float) and result.is_integer() and abs(result) < 1e15:
        return str(int(result))
    return f"{result:.15g}" if isinstance(result, float) else str(result)


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        try:
            return _checked(_BINARY[type(node.op)](left, right))
        except ZeroDivisionError:
            raise UserError("the expression divides by zero") from None
        except OverflowError:
            raise UserError("a number of the expression is too large") from None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and node.args:
            try:
                return _checked(function(*(_value(argument) for argument in node.args)))
            except (TypeError, ValueError, OverflowError) as error:
                raise UserError(f"{node.func.id}: {error}") from None
    raise UserError(
        f"{ast.unparse(node)[:60]!r} is no number, no operation among + - * / // % ** and none of "
        f"{', '.join(_FUNCTIONS)}"
    )


def _check_power(base: Number, exponent: Number) -> None:
    """Rejects too large a power before it is computed."""
    size = base.bit_length() if isinstance(base, int) else 64
    if abs(exponent) * max(size, 1) > BITS:
        raise UserError(f"{base}**{exponent} is too large")


def _checked(value: object) -> Number:
    if not isinstance(value, int | float) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise UserError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > BITS:
        raise UserError("a number of the expression is too large")
    return value


def arithmetic() -> Tool:
    """Returns the tool `arithmetic`, which computes an expression."""
    return Tool(
        "arithmetic", "Computes an expression.", {"expression": "As (3 + 4) * 12."}, evaluate
    )
