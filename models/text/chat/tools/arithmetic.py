"""Evaluates arithmetic without `eval`, and rejects numbers that take long to compute."""

import ast
import math
import operator
import warnings
from collections.abc import Callable

from .....data.common.errors import UserError
from .....data.common.fields import require
from .tool import Tool

LONGEST = 300
"""Maximum number of characters of an expression."""
BITS = 2048
"""Maximum number of bits of a result."""
DIGITS = 300
"""Maximum absolute value of the digits argument of `round`."""

Number = int | float


def _power(base: Number, exponent: Number) -> object:
    """Returns a power, after checking that it is not too large."""
    size = base.bit_length() if isinstance(base, int) else 64
    require(abs(exponent) * max(size, 1) <= BITS, f"{base}**{exponent} is too large")
    return base**exponent


def _round(number: Number, digits: int = 0) -> Number:
    """Rounds a number. `digits` is limited, because `round` would compute a huge 10**-digits."""
    require(abs(digits) <= DIGITS, f"round accepts at most {DIGITS} digits, got {digits}")
    return round(number, digits)


_OPERATIONS: dict[type[ast.operator | ast.unaryop], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
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
        expression: an expression such as `(3 + 4) * 12`. `×`, `÷`, `−` and `^` are also supported.

    Raises:
        UserError: the expression is invalid, divides by zero, or contains a number that is too
          large.
    """
    plain = expression.translate(str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"}))
    try:
        # Limiting the length of the expression also limits the depth of its syntax tree and the
        # recursion.
        require(
            len(expression) <= LONGEST,
            f"the expression must have at most {LONGEST} characters, got {len(expression)}",
        )
        with warnings.catch_warnings():  # `1if 1else 2` would print a warning
            warnings.simplefilter("ignore")
            tree = ast.parse(plain.strip(), mode="eval")
        result = _value(tree.body)
    except (
        ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError
    ) as error:  # fmt: skip
        shown = expression if len(expression) <= 60 else f"{expression[:60]}…"
        raise UserError(
            f"{shown!r} cannot be computed ({error}): write it as (3 + 4) * 12"
        ) from None
    # Print a whole number without a decimal point if float64 represents it exactly.
    if isinstance(result, float) and result.is_integer() and abs(result) < 1e15:
        return str(int(result))
    return f"{result:.15g}" if isinstance(result, float) else str(result)


def _value(node: ast.expr) -> Number:
    """Computes a subexpression; raises one of several errors if it is not valid."""
    match node:
        # Exclude bool, which is a subclass of int: `True + 1` is not arithmetic.
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.UnaryOp(op=op, operand=operand):
            function, arguments = _OPERATIONS.get(type(op)), [operand]
        case ast.BinOp(left=left, op=op, right=right):
            function, arguments = _OPERATIONS.get(type(op)), [left, right]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            function = _FUNCTIONS.get(name)
        case _:
            function, arguments = None, []
    if function is None:
        raise ValueError(
            f"{ast.unparse(node)[:60]!r} is not supported: use numbers, + - * / // % ** and "
            f"{', '.join(_FUNCTIONS)}"
        )
    # Check each intermediate result, because the next operation may enlarge it.
    return _checked(function(*map(_value, arguments)))


def _checked(value: object) -> Number:
    if isinstance(value, int) and value.bit_length() <= BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError("a result is too large, or not a real number")


def arithmetic() -> Tool:
    """Returns the tool `arithmetic`, which computes an expression."""
    return Tool(
        "arithmetic", "Computes an expression.", {"expression": "As (3 + 4) * 12."}, evaluate
    )
