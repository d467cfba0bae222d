"""``builtin:calculations``: conversations where the assistant calls a tool for arithmetic.

The user asks for a product or a sum of numbers of up to three digits, the assistant writes a call
in the form of the lectures' template, the tool answers, and the assistant repeats the number::

    user: What is 47 * 36?
    bot: <<arithmetic 47 * 36>>
    tool: 1692
    bot: 1692

A small model learns to call a tool long before it could learn to multiply.
"""

import operator
from collections.abc import Iterator, Mapping

import numpy as np

NAME = "builtin:calculations"
NUMBER = 5000
"""The number of conversations."""
INSTRUCTIONS = "Tools:\n<<arithmetic ...>> Computes an expression."
"""The instructions to the model about its tool, as `models.Conversation` writes them."""

_OPERATIONS = (("+", operator.add), ("*", operator.mul))


def calculations() -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the location of each conversation, and its messages."""
    draw = np.random.default_rng(0)
    for number in range(1, NUMBER + 1):
        # Draw the number of digits first, so that short numbers are as frequent as long ones.
        a, b = (
            int(draw.integers(10 ** (digits - 1), 10**digits)) for digits in draw.integers(1, 4, 2)
        )
        sign, compute = _OPERATIONS[draw.integers(2)]
        expression, result = f"{a} {sign} {b}", str(compute(a, b))
        # The assistant calls the tool first, and then gives its result to the user.
        messages = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "content": f"<<arithmetic {expression}>>"},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
        yield f"{NAME} conversation {number}", {"messages": messages}
