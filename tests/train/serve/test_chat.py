"""Calls of tools in chats, with a worker that writes given texts."""

import asyncio
import functools
import json
import string

import httpx
import pytest
from flaxzoo import models
from flaxzoo.data import ChatTemplate
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.train.serve.app import Access, Served, Service, make_app
from flaxzoo.train.serve.chat import CHAT
from flaxzoo.train.serve.engine import Engine, Limits
from flaxzoo.train.serve.generation import GENERATION, Piece
from flaxzoo.train.serve.metrics import Metrics

HERMES = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
BRACKETS = "<<weather Ulm>>"


class Writer:
    """Writes given texts in pieces of three characters."""

    def __init__(self, text):
        self.text, self.tasks, self.prompts = text, [], []

    @property
    def wait(self):
        return 0.0 if self.tasks else None

    def add(self, task):
        self.tasks.append(task)
        self.prompts.append(task.work.growing.prompt.text)

    def cancel(self, task):
        pass

    def reset(self):
        pass

    def warm_up(self):
        return ()

    def step(self):
        task = self.tasks.pop()
        size = 3 if task.work.streamed else len(self.text)
        for i in range(0, len(self.text), size):
            last = i + size >= len(self.text)
            piece = Piece(self.text[i : i + size], [], [], [], "end" if last else None, 1)
            task.send(piece, last=last)


@pytest.fixture(scope="module")
def front(tiny):
    tokenizer = CharacterTokenizer(string.printable)
    made = tiny(num_layers=1, max_length=2000, vocab_size=tokenizer.vocab_size)
    return models.TextGenerator(made.model, made.params, tokenizer)


@pytest.fixture
def ask(front):
    return functools.partial(_ask, front)


def _ask(front, text, template, **fields):
    """Returns the choice, the choices of a stream, and the prompt that was read."""

    async def run():
        front.tokenizer.own_chat_template = template
        writer = Writer(text)
        engine = Engine(Limits(), [writer])
        served = {"m": Served("m", front, {GENERATION: writer})}
        app = make_app(Service(served, engine, Access(), Metrics(engine), CHAT))
        engine.start()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}
            whole = await client.post("/v1/chat/completions", json=body)
            parts = await client.post("/v1/chat/completions", json={**body, "stream": True})
        engine.stop()
        lines = [line[6:] for line in parts.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        return whole.json()["choices"][0], choices, writer.prompts[0]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("template", "call"), [(HERMES, CALL), (None, BRACKETS)], ids=["hermes", "brackets"]
)
def test_calls_are_not_shown_as_text(ask, template, call):
    choice, parts, prompt = ask(f" Wait: {call}", template)
    assert "Tells the weather." in prompt
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Wait:")
    (called,) = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}
    deltas = [part["delta"] for part in parts]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait:"
    (streamed,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert streamed[0]["function"] == called["function"]
    assert parts[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", ["2 < 3 and <tool", "<tool_call>{oops</tool_call>", "a << b"])
def test_text_that_is_not_a_call_is_shown(ask, text):
    choice, parts, _ = ask(text, HERMES)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "".join(part["delta"].get("content") or "" for part in parts) == text
    # With `tool_choice` none, the model does not see the tools.
    assert "Tells" not in ask(text, HERMES, tool_choice="none")[2]


@pytest.mark.parametrize(
    ("template", "written"),
    [(HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}'), (None, BRACKETS)],
    ids=["hermes", "brackets"],
)
def test_earlier_calls_are_written_as_the_template_has_them(ask, template, written):
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    prompt = ask("Sunny.", template, messages=messages)[2]
    assert written in prompt.replace(
        '{"arguments": {"city": "Ulm"}, "name": "weather"}',
        '{"name": "weather", "arguments": {"city": "Ulm"}}',
    )
    assert prompt.index("Ulm") < prompt.index("sunny")


def test_parts_of_a_text_are_joined(ask):
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "hi"}]
    assert ask("Yes.", None, messages=messages)[2].startswith("Be brief.\nTools:")
