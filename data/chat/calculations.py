"""``builtin:calculations``: conversations where the assistant calls an arithmetic tool.

The user asks for the product or the sum of two numbers of up to three digits. The assistant writes
a tool call in the syntax of the template from the lectures, the tool answers, and the assistant
repeats the number::

    user: What is 47 * 36?
    bot: <<arithmetic 47 * 36>>
    tool: 1692
    bot: 1692

A small model learns to call a tool much sooner than it could learn to multiply.
"""

import operator
from collections.abc import Iterator, Mapping

import numpy as np

NAME = "builtin:calculations"
NUMBER = 5000
"""The number of conversations."""
INSTRUCTIONS = "Tools:\n<<arithmetic ...>> Computes an expression."
"""Instructions that describe the tool to the model, as `models.Conversation` writes them."""

_OPERATIONS = (("+", operator.add), ("*", operator.mul))


def calculations() -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields each conversation's location, for error messages, and its messages."""
    draw = np.random.default_rng(0)
    for number in range(1, NUMBER + 1):
        # Draw the number of digits first, so that short numbers are as frequent as long numbers.
        a, b = (
            int(draw.integers(10 ** (digits - 1), 10**digits)) for digits in draw.integers(1, 4, 2)
        )
        sign, compute = _OPERATIONS[draw.integers(2)]
        expression, result = f"{a} {sign} {b}", str(compute(a, b))
        # The assistant first calls the tool, and then repeats the tool's result for the user.
        messages = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "content": f"<<arithmetic {expression}>>"},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
        yield f"{NAME} conversation {number}", {"messages": messages}
