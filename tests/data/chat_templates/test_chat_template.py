"""Chat templates: what the assistant wrote, folders, refusals, and ways out of the sandbox."""

import enum
import json

import pytest
import tokenizers
from flaxzoo import data

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}bot: {% generation %}{{ m.content }}"
    "<end>{% endgeneration %}\n{% else %}user: {{ m.content }}\n{% endif %}{% endfor %}"
)
REWRITING = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last else m.content[:1] }}\n{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": ""},
]


def answers(template, messages):
    (rendered,) = template.render_rows(messages)
    return [rendered.text[start:end] for start, end in rendered.answers]


def test_without_marks_the_answers_are_what_each_message_adds():
    template = data.ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
    # The end of the turn is learned; the line feed after it belongs to the template.
    assert answers(template, TURNS) == ["Hello!<|im_end|>", "<|im_end|>"]
    assert answers(data.ChatTemplate(CHATML), TURNS) == ["Hello!<|im_end|>\n", "<|im_end|>\n"]
    assert template.render(TURNS[:1], add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_marks_say_what_the_assistant_wrote():
    assert answers(data.ChatTemplate(MARKED), TURNS) == ["Hello!<end>", "<end>"]


def test_a_template_that_rewrites_earlier_turns_gives_a_text_for_each_answer():
    assert len(data.ChatTemplate(REWRITING).render_rows(TURNS)) == 2


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_a_call_that_a_template_leaves_out_is_an_error(source):
    """Otherwise the model would learn an empty answer in place of the call."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [TURNS[0], {**TURNS[3], "tool_calls": [call]}, *TURNS[1:2]]
    with pytest.raises(data.DataError, match=r"leaves out the call of 'add', .*tool_calls"):
        data.ChatTemplate(source).render_rows(messages)
    reads = "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{{ m.content }}"
    template = data.ChatTemplate(source.replace("{{ m.content }}", reads))
    assert "add" in answers(template, messages)[0]


def test_the_name_of_a_tool_is_not_its_call():
    """The name also occurs in the list of tools and in the request."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "add 1"}, {**TURNS[3], "tool_calls": [call]}]
    named = data.ChatTemplate("{{ tools | tojson }}" + CHATML)
    with pytest.raises(data.DataError, match="leaves out the call of 'add'"):
        named.render_rows(messages, tools=[{"type": "function", "function": {"name": "add"}}])


@pytest.mark.parametrize("calls", [5, "add", [None], [{"function": "add"}], [{"name": 1}]])
def test_calls_in_an_unknown_form_are_left_to_the_template(calls):
    messages = [TURNS[0], {**TURNS[1], "tool_calls": calls}]
    assert answers(data.ChatTemplate(MARKED), messages) == ["Hello!<end>"]


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_a_conversation_without_an_answer_is_an_error(source):
    with pytest.raises(data.DataError, match="role 'assistant'"):
        data.ChatTemplate(source).render_rows(TURNS[:1])


def test_templates_of_a_folder(tmp_path):
    with pytest.raises(data.DataError, match="no chat template"):
        data.ChatTemplate.of_folder(tmp_path)
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "old"},
            {"name": "tool_use", "template": "{{ tools[0].name }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = data.ChatTemplate.of_folder(tmp_path)
    assert template.tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert template.render(TURNS) == "old"
    assert template.render(TURNS, tools=[{"name": "add"}]) == "add"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}new")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools | tojson }}")
    template = data.ChatTemplate.of_folder(tmp_path)
    assert template.render(TURNS) == "<s>new"
    assert template.render(TURNS, tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'  # HTML is not escaped


def test_values_are_plain_data_and_reasoning_has_both_names():
    class Role(enum.StrEnum):
        USER = "user"

    source = "{% for m in messages %}{{ m.role }} {{ m.thinking }} {{ m.x }};{% endfor %}"
    messages = [{"role": Role.USER, "reasoning": "because", "x": object()}]
    assert data.ChatTemplate(source).render(messages) == "user because <object>;"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ dict.__globals__.os }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception('no\\nthanks') }}",
        "{{ 1 / 0 }}",
        "{{ messages | nonsense }}",
        "{% if %}",
    ],
)
def test_ways_out_and_faults_are_refused_in_a_line(source):
    with pytest.raises(data.DataError, match=r"chat template ") as caught:
        data.ChatTemplate(source).render(TURNS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        [], "x", 5, {"chat_template": 5}, {"chat_template": {"default": 5}},
        {"chat_template": ["x"]}, {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": "default", "template": 5}]}, {"chat_template": [{}]},
        {"chat_template": [{"name": ["x"], "template": "x"}]},
    ],
)  # fmt: skip
def test_odd_templates_of_a_folder_are_refused(config, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(data.DataError, match=r"tokenizer_config\.json"):
        data.ChatTemplate.of_folder(tmp_path)


def test_files_that_are_no_templates_are_refused(tmp_path):
    for content in (b"\xff\xfe", b"x" * 2_000_000):
        (tmp_path / "chat_template.jinja").write_bytes(content)
        with pytest.raises(data.DataError, match=r"chat_template\.jinja"):
            data.ChatTemplate.of_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(data.DataError, match=r"tokenizer_config\.json"):
        data.ChatTemplate.of_folder(tmp_path)


def test_text_parts_of_a_content_are_read_and_others_are_refused():
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    template = data.ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template.render([{"role": "user", "content": parts}]) == str(parts)  # as transformers
    tokenizer = data.train_tokenizer(["abc"], data.TokenizerConfig(kind="characters"))
    lectures = tokenizer.chat_template
    assert lectures.render([{"role": "user", "content": parts}]) == "user: Hi there\n"
    for kind in ("image", "audio", "image_url", "video"):
        with pytest.raises(data.DataError, match=f"message 1 .*'{kind}'"):
            template.render([{"role": "user", "content": [*parts, {"type": kind, kind: "x"}]}])


def test_a_message_has_a_role():
    for wrong in ({"content": "Hi"}, "Hi"):
        with pytest.raises(data.DataError, match=r"message 2 .*object .*role"):
            data.ChatTemplate(CHATML).render([TURNS[0], wrong])


NAMES = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"eos_token": "<a>"}, {"eos_token": "<b>"}),
        ({"eos_token": "<a>"}, {"eos_token": None}),
        ({"bos_token": "<c>"}, {"eos_token": "<b>", "pad_token": "<b>"}),
        ({"eos_token": "<a>", "image_token": "<c>"}, None),
        ({"eos_token": "<a>", "extra_special_tokens": {"image_token": "<c>"}}, None),
    ],
)
def test_the_special_tokens_of_a_folder_are_those_of_transformers(config, names, tmp_path):
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    backend.add_special_tokens(["<a>", "<b>", "<c>"])
    folder = tmp_path / "given"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    for name, content in (("tokenizer_config", config), ("special_tokens_map", names)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(NAMES)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TURNS[:1], tokenize=False)
    ours = data.load_tokenizer(folder)
    ours.save(tmp_path / "run")
    for tokenizer in (ours, data.load_tokenizer(tmp_path / "run")):
        assert tokenizer.chat_template.render(TURNS[:1]) == expected
