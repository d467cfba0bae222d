"""Chat templates of published models, rendered byte for byte as transformers renders them."""

from pathlib import Path

import pytest
from flaxzoo import data

trl = pytest.importorskip("trl")
chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")

FOLDER = Path(trl.__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEXTS = sorted(
    path.stem
    for path in FOLDER.glob("*.jinja")
    if path.stem.startswith(("llama3", "qwen2_5", "qwen3", "gemma", "phi3", "cohere", "deepseek"))
)
TURNS = [
    {"role": "user", "content": "What is 2 + 3? <b>&'\"é日</b>"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And twice that?\n"},
    {"role": "assistant", "content": "10"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "The first."}},
            "required": ["a"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
CHATS = {
    "turns": (TURNS, None),
    "system": ([{"role": "system", "content": " Be brief. "}, *TURNS], None),
    "reasoning": ([TURNS[0], {**TURNS[1], "reasoning_content": "2 + 3 = 5"}], None),
    "tools": (
        [
            TURNS[0],
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "add", "content": "5"},
            TURNS[1],
        ],
        [TOOL],
    ),
}


def theirs(source, messages, tools, prompt, answers):
    """The text of transformers and its ranges, or the message of its error."""
    try:
        [text], ranges = chat_utils.render_jinja_template(
            [messages],
            tools,
            chat_template=source,
            return_assistant_tokens_mask=answers,
            add_generation_prompt=prompt,
            **TOKENS,
        )
    except Exception as error:  # a template refuses some conversations
        return type(error), None
    return text, ranges


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_same(name, chat):
    source = (FOLDER / f"{name}.jinja").read_text()
    template = data.ChatTemplate(source, TOKENS)
    messages, tools = CHATS[chat]
    for prompt in (False, True):
        expected, _ = theirs(source, messages, tools, prompt, False)
        if isinstance(expected, type):
            with pytest.raises(data.DataError, match="the chat template refuses"):
                template.render(messages, tools=tools, add_generation_prompt=prompt)
            continue
        found = template.render(messages, tools=tools, add_generation_prompt=prompt)
        assert found == expected
    if name.endswith("_training") and not isinstance(expected, type):
        _, marked = theirs(source, messages, tools, False, True)
        assert marked is not None
        [ranges] = marked
        rendered = template.render_with_answers(messages, tools=tools)
        assert list(rendered.answers) == [(a, b) for a, b in ranges if b > a]
