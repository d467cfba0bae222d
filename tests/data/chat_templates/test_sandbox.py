"""Templates that never end, or make too much, are refused in a line, in every thread."""

import threading
import time

import pytest
from flaxzoo import data
from flaxzoo.data.chat_templates import bounds

BOMBS = {
    "loops": "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "doubling": "{% set ns = namespace(s='x') %}{% for a in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "adding": "{% set ns = namespace(s='x') %}{% for a in range(60) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "blocks": "{% set ns = namespace(s='x') %}{% for a in range(60) %}"
    "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "lists": "{% set ns = namespace(s=[1]) %}{% for a in range(60) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "trees": "{% set ns = namespace(s=(1,)) %}{% for a in range(60) %}"
    "{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ {ns.s: 1} }}",
    "arguments": "{% macro f(n) %}{% if n %}{{ f(n-1, varargs, varargs) }}{% endif %}"
    "{% endmacro %}{{ f(60, 1) }}",
    "times": "{{ 'x' * 10**9 }}",
    "list times": "{{ ([1] * 10**9) | length }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{w[0]}}'.format(1, w=[1000000000]) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "range": "{% for a in range(10**9) %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "tojson": "{{ [1] | tojson(indent=10**9) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "replace": "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "join": "{{ range(100000) | join('x' * 100000) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set ns = namespace(n=10) %}{% for a in range(99) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "output": "{% for a in range(100000) %}" + "x" * 10000 + "{% endfor %}",
    "lipsum": "{{ lipsum(10**6) }}",
    "nesting": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "statements": "{% for a in [1] %}" * 50 + "{% endfor %}" * 50,
    "signs": "{{ " + "-" * 50000 + "1 }}",
    "length": "x" * (bounds.MAX_SOURCE + 1),
}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_a_line(name, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_STEPS", 1 << 17)
    caught = []

    def render():
        try:
            data.ChatTemplate(BOMBS[name]).render(MESSAGES)
        except data.DataError as error:
            caught.append(str(error))

    if len(name) % 2:
        render()
    else:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join()
    [message] = caught
    assert message.startswith("the chat template ")
    assert "\n" not in message
    assert len(message) < 500


def test_the_time_of_slow_steps_is_bounded(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_SECONDS", 0.2)
    source = (
        "{% set l = range(100000) | list %}{% for a in range(100000) %}{% if -1 in l %}"
        "{% endif %}{% endfor %}"
    )
    start = time.thread_time()
    with pytest.raises(data.DataError, match="seconds"):
        data.ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - start < 5


def test_a_long_conversation_has_more_steps():
    source = "{% set ns = namespace(t='') %}{% for m in messages %}{% for c in m.content %}"
    source += "{% set ns.t = c %}{% endfor %}{% endfor %}{{ ns.t }}"
    messages = [{"role": "user", "content": "x" * 100_000}] * 15  # more characters than MAX_STEPS
    assert data.ChatTemplate(source).render(messages) == "x"


def test_runs_do_not_mix():
    """Each thread has the marks of its own run."""
    template = data.ChatTemplate(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    found = {}

    def render(size):
        messages = [*MESSAGES, {"role": "assistant", "content": "x" * size}] * 50
        found[size] = template.render_rows(messages)[0].answers

    threads = [threading.Thread(target=render, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size, answers in found.items():
        assert answers == tuple(((2 + size) * i + 2, (2 + size) * (i + 1)) for i in range(50))
