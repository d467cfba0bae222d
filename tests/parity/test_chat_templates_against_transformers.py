"""Chat templates of published models, rendered byte for byte as transformers renders them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from flaxzoo import data
from flaxzoo.data.chat.encoding import encode_rows

trl = pytest.importorskip("trl")
chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")

FOLDER = Path(trl.__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEXTS = sorted(path.stem for path in FOLDER.glob("*.jinja"))
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


def leaves_out_calls(messages, text):
    """Whether a text of transformers lacks the name of the function that is called."""
    return "tool_calls" in messages[1] and "add" not in text


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_same(name, chat):
    source = (FOLDER / f"{name}.jinja").read_text()
    template = data.ChatTemplate(source, TOKENS)
    messages, tools = CHATS[chat]
    for prompt in (False, True):
        expected, _ = theirs(source, messages, tools, prompt, False)
        if isinstance(expected, type):
            with pytest.raises(data.DataError, match="refuses"):
                template.render(messages, tools=tools, add_generation_prompt=prompt)
            continue
        found = template.render(messages, tools=tools, add_generation_prompt=prompt)
        assert found == expected
    if name.endswith("_training") and not isinstance(expected, type):
        _, marked = theirs(source, messages, tools, False, True)
        assert marked is not None
        [ranges] = marked
        if leaves_out_calls(messages, expected):
            with pytest.raises(data.DataError, match="leaves out the call of 'add'"):
                template.render_rows(messages, tools=tools)
            return
        (rendered,) = template.render_rows(messages, tools=tools)
        assert list(rendered.answers) == [(a, b) for a, b in ranges if b > a]


ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + "
    "eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n"
    "{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant') }}"
    "{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_V3 = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
REWRITING = {
    **{name: (FOLDER / f"{name}.jinja").read_text() for name in ("qwen3", "phi3", "gptoss")},
    "mistral-v0.3": MISTRAL_V3,
}


@pytest.mark.parametrize("name", REWRITING)
def test_each_answer_follows_what_the_model_reads(name):
    """These templates rewrite earlier turns, so a conversation has a row for each answer."""
    reasoning = [{"reasoning_content": f"because {n}"} if n % 2 else {} for n in range(4)]
    turns = [{**turn, **more} for turn, more in zip(TURNS, reasoning, strict=True)]
    messages = [{"role": "system", "content": "Be brief."}, *turns]
    template = data.ChatTemplate(REWRITING[name], TOKENS)
    rows = template.render_rows(messages, ends=("<|im_end|>", "<|return|>"))
    assert len(rows) == 2
    for row, number in zip(rows, (2, 4), strict=True):
        [(start, end)] = row.answers
        read, _ = theirs(REWRITING[name], messages[:number], None, True, False)
        assert row.text[:start] == read
        assert messages[number]["content"] in row.text[start:end]
        assert ("because" in row.text[start:end]) == (name in ("qwen3", "gptoss"))
        assert len(row.origins) == len(row.text)
        if name != "mistral-v0.3":  # it leaves the system's text out
            assert (
                row.text == theirs(REWRITING[name], messages[: number + 1], None, False, False)[0]
            )


OTHERS = {"zephyr": ZEPHYR, "mistral": MISTRAL, "chatml": CHATML}
CONTROL = re.compile(r"<\|[^|<>{}']+\|>|</?[a-z_]+>|\[/?[A-Z_]+\]")
NOT_SPECIAL = re.compile(r"</?(think|tool_call|tool_response|tools)>")


def tokenizer_folder(folder, source, *, spaces_first):
    """A small vocabulary with the control tokens of a template, in Hugging Face's form."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=spaces_first))
    if spaces_first:  # as Llama 2 and Mistral
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        special = ["<unk>", *alphabet]
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        special = []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([str(CHATS), source], trainer)
    if spaces_first:
        content = json.loads(backend.to_str())
        content["added_tokens"] = []
        content["model"]["unk_token"] = "<unk>"
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    names = dict.fromkeys([*TOKENS.values(), *CONTROL.findall(source)])
    backend.add_special_tokens([name for name in names if not NOT_SPECIAL.fullmatch(name)])
    backend.add_tokens([name for name in names if NOT_SPECIAL.fullmatch(name)])
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS, "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "name",
    [*OTHERS, "gemma_training", "llama3_training", "phi3_training", "qwen2_5_training",
     "qwen3_training", "cohere_training", "deepseekv3_training", "glm4moe_training",
     "gptoss_training", "lfm2_training", "qwen3_instruct_2507_training", "llama3_1", "gemma3",
     "phi3_5", "cohere2", "deepseek_r1_distill"],
)  # fmt: skip
def test_ids_and_masks_are_the_same(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = OTHERS.get(name) or (FOLDER / f"{name}.jinja").read_text()
    spaces_first = name in ("zephyr", "mistral", "gemma_training")
    tokenizer_folder(tmp_path / "model", source, spaces_first=spaces_first)
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = data.load_tokenizer(tmp_path / "model")
    compared = 0
    for messages, tools in CHATS.values():
        text, _ = theirs(source, messages, tools, True, False)
        if isinstance(text, type):
            continue
        compared += 1
        prompt = data.encode_chat(ours, messages, tools=tools, add_generation_prompt=True)
        assert prompt.ids == hf.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        if name.endswith("_training") and leaves_out_calls(messages, text):
            with pytest.raises(data.DataError, match="leaves out the call of 'add'"):
                data.encode_chat(ours, messages, tools=tools)
        elif name.endswith("_training"):
            expected = hf.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            encoded = data.encode_chat(ours, messages, tools=tools)
            assert encoded.ids == expected["input_ids"]
            assert [int(answer) for answer in encoded.answers] == expected["assistant_masks"]
        typed = f"Say {TOKENS['eos_token']} {CONTROL.findall(source + '[INST]')[0]}!"
        injected = data.encode_chat(
            ours, [{"role": "user", "content": typed}], add_generation_prompt=True
        )
        assert injected.ids == hf.apply_chat_template(
            [{"role": "user", "content": typed}], add_generation_prompt=True, return_dict=False,
            sanitize_control_tokens=True,
        )  # fmt: skip
    assert compared >= 1


def spans(row):
    """The tokens before each answer of a row, with the answer."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *row.answers, False])) if a != b]
    return {
        (tuple(row.ids[:start]), tuple(row.ids[start:end]))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    }


@pytest.mark.parametrize("chat", ["turns", "system", "reasoning", "tools"])
@pytest.mark.parametrize("name", REWRITING)
def test_each_answer_is_learned_once_after_the_tokens_of_its_prompt(name, chat, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer_folder(tmp_path / "model", REWRITING[name], spaces_first=name.startswith("mistral"))
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = data.load_tokenizer(tmp_path / "model")
    messages, tools = CHATS[chat]
    # A second round, whose prompt rewrites the answers of the first round.
    messages = [*messages, *(turn for turn in messages if turn["role"] != "system")]
    messages = [{"thinking": turn.get("reasoning_content", ""), **turn} for turn in messages]
    if chat == "tools" and name not in ("qwen3", "gptoss"):
        with pytest.raises(data.DataError, match="leaves out the call of 'add'"):
            encode_rows(ours, messages, tools=tools)
        return
    rows = encode_rows(ours, messages, tools=tools)
    expected = set()
    for n in [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]:
        prompt, after = (
            hf.apply_chat_template(
                messages[:end], tools=tools, add_generation_prompt=end == n, return_dict=False
            )
            for end in (n, n + 1)
        )
        # Mistral's template moves the system's text into the last turn if that is the user's.
        start = len(prompt) if after[: len(prompt)] == prompt else last_of(after, prompt[-1]) + 1
        while not hf.decode(after[-1]).strip().strip("Ċ"):
            after.pop()
        expected.add((tuple(prompt), tuple(after[start:])))
    assert set.union(*map(spans, rows)) == expected
    assert sum(len(spans(row)) for row in rows) == len(expected)


def last_of(ids, wanted):
    return max(i for i, x in enumerate(ids) if x == wanted)
