"""Filters, methods and operators of templates write what they write with transformers."""

from pathlib import Path

import pytest
from flaxzoo import data

EXPRESSIONS = Path(__file__).with_name("expressions.txt").read_text().splitlines()
MESSAGES = [
    {
        "role": "user",
        "content": "Héllo <b>World</b> & 'x' \"y\"\n second line  ",
        **{"n": 3, "f": 2.5, "t": True, "l": ["b", "a", "C", 1], "d": {"z": 1, "a": ["q"]}},
    },
    {
        "role": "assistant",
        "content": "ok</think>yes",
        "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": 1, "b": [1, 2.5, None, True, "é"]}}}
        ],
    },
]


def test_expressions_are_written_as_by_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for expression in EXPRESSIONS:
        source = "{% set m = messages[0] %}{{ " + expression + " }}"
        [expected], _ = utils.render_jinja_template([MESSAGES], None, chat_template=source)
        assert data.ChatTemplate(source).render(MESSAGES) == expected, expression
