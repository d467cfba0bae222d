"""Conversations: the text that the model reads, its window, stop strings, and transcripts."""

import io
import json

import jax
import pytest
from flaxzoo import data, models
from flaxzoo.models.text.generate import TextGenerator
from flaxzoo.train.cli.main import main

ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]


class Scripted:
    """Stands for the cached context of a model, and writes what it is told to."""

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers, self.num_read = tokenizer, list(answers), 0

    def stream(self, context, request, keys):
        text = self.answers.pop(0)
        yield from self.tokenizer.encode(text.removesuffix("<E>"))
        if text.endswith("<E>"):
            yield self.tokenizer.special_ids.eos
        yield from self.tokenizer.encode("!" * 1000)


@pytest.fixture(scope="module")
def generator():
    tokenizer = data.train_tokenizer(["".join(ALPHABET)], data.TokenizerConfig(kind="characters"))
    config = models.GPTConfig(
        vocab_size=tokenizer.vocab_size, max_length=160, num_layers=1, d_model=16, num_heads=2
    )
    model = models.create(config)
    return TextGenerator(model, models.init_params(model, jax.random.key(0)), tokenizer)


@pytest.fixture
def scripted(generator, monkeypatch):
    def make(*answers, **options):
        context = Scripted(generator.tokenizer, answers)
        monkeypatch.setattr(generator, "cached_context", lambda: context)
        return models.Conversation(generator, **options)

    return make


def test_the_model_reads_the_text_of_the_lectures(scripted):
    chat = scripted(" Five.<E>", " Ten.<E>", instructions="Be brief.")
    assert chat.reply("Two and three?").content == "Five."
    assert chat.reply("Twice that?").content == "Ten."
    assert chat.prompt("Why?") == (
        "Be brief.\nuser: Two and three?\nbot: Five.<|endoftext|>\n"
        "user: Twice that?\nbot: Ten.<|endoftext|>\nuser: Why?\nbot:"
    )
    chat.reset()
    assert chat.prompt("Why?") == "Be brief.\nuser: Why?\nbot:"


@pytest.mark.parametrize("answer", [" Five.\nuser: And", " Five. user:"])
def test_a_stop_string_of_several_tokens_is_never_shown(scripted, answer):
    shown: list[str] = []
    chat = scripted(answer)
    turn = chat.reply("Two and three?", on_text=shown.append)
    assert (turn.content, turn.finish_reason) == ("Five.", "stop")
    assert "".join(shown) == "Five."
    assert len(shown) > 2  # piece by piece


def test_what_only_begins_like_a_stop_string_is_shown(scripted):
    shown: list[str] = []
    turn = scripted(" A user\nis us.<E>").reply("Who?", on_text=shown.append)
    assert turn.content == "".join(shown) == "A user\nis us."


def test_the_oldest_exchanges_fall_out_and_the_instructions_stay(scripted):
    chat = scripted(*[" " + "b" * 20 + "<E>"] * 5, instructions="Rule.", max_new_tokens=25)
    for number in range(5):
        chat.reply(f"{number}" * 20)
    assert len(chat.turns) == 10  # nothing is forgotten of the transcript
    prompt = chat.prompt("now")
    assert prompt.startswith("Rule.\nuser: 3333")  # two exchanges and an answer fill the window
    assert prompt.endswith("user: now\nbot:")
    with pytest.raises(data.UserError, match=r"instructions .*tokens"):
        chat.reply("x" * 160)
    assert len(chat.turns) == 10
    with pytest.raises(data.UserError, match="empty"):
        chat.reply("  ")


def test_an_answer_is_the_same_with_and_without_the_cache(generator):
    options = {"max_new_tokens": 12, "seed": 3}
    chat = models.Conversation(generator, **options)
    for text in ("Hello", "And then?", "More"):
        fresh = models.Conversation(generator, **options)
        fresh.turns = list(chat.turns)
        assert chat.reply(text).content == fresh.reply(text).content
    assert chat.num_read < fresh.num_read + 60  # what came before was not read again


def test_transcripts_name_writers_and_continue(scripted, tmp_path):
    chat = scripted(" Five.<E>", instructions="Be brief.", name="runs/x")
    chat.reply("Two and three?")
    chat.save(tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [(row["role"], row["writer"]) for row in rows] == [
        ("system", "user"), ("user", "user"), ("assistant", "runs/x"),
    ]  # fmt: skip
    other = scripted(" Ten.<E>")
    other.load(tmp_path / "t.jsonl")
    assert other.prompt("Twice?") == chat.prompt("Twice?")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(data.UserError, match=r"bad.jsonl line 1 .*text"):
        other.load(tmp_path / "bad.jsonl")


@pytest.mark.parametrize("calls", [{}, "", None, 0, "a", [{"function": "f"}], [["name"]]])
def test_calls_of_a_transcript_are_a_list_of_objects(scripted, tmp_path, calls):
    row = {"role": "assistant", "content": "a", "calls": calls}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    with pytest.raises(data.UserError, match=r"t.jsonl line 1: calls must be a list of objects"):
        scripted("").load(tmp_path / "t.jsonl")


def test_the_end_of_a_turn_is_the_token_that_the_template_writes(generator):
    from flaxzoo.data.chat.encoding import turn_ends

    tokenizer = generator.tokenizer
    ends = turn_ends(tokenizer, tokenizer.chat_template)
    assert ends.ids == (tokenizer.special_ids.eos,)
    assert ends.strings == ("user:",)
    plain = data.ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}")
    ends = turn_ends(tokenizer, plain, tools=True)
    assert (ends.ids, ends.strings) == ((), ())


def test_the_command_reads_turns_and_commands_from_its_input(
    generator, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(TextGenerator, "of_run", classmethod(lambda cls, *_, **__: generator))
    lines = "Hello\n\n/system Be brief.\n/nothing\n/help\n/reset\nWho?\n/exit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    path = tmp_path / "t.jsonl"
    arguments = ["chat", "x", "--max-new-tokens", "5", "--transcript", str(path), "--seed", "1"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "'/nothing'" in printed.err
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["content"] for row in rows if row["role"] != "assistant"] == ["Be brief.", "Who?"]
    assert rows[-1]["content"] in printed.out
    before = (tmp_path / "t-1.jsonl").read_text()  # /reset loses nothing
    assert '"Hello"' in before
    assert "Who?" not in before
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 200 + "\n"))
    assert main(["chat", "x"]) == 2
    assert "shorten them" in capsys.readouterr().err


def test_a_transcript_replaces_nothing_but_a_transcript(scripted, tmp_path):
    chat = scripted(" Five.<E>", name="runs/x")
    chat.reply("Two and three?")
    own = tmp_path / "t.jsonl"
    chat.save(own)
    chat.save(own)
    link = tmp_path / "link"
    link.symlink_to(own)
    chat.save(link)
    foreign = {
        "notes.txt": "mine\n",
        "data.jsonl": '{"role": "user", "content": "a"}\n',
        "list.jsonl": "[1]\n",
        "number.json": "1",
        "bytes": "\x00\x01",
    }
    for name, content in foreign.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(data.DataError, match=name):
            chat.save(tmp_path / name)
        assert (tmp_path / name).read_text() == content
    for bad in (tmp_path, "/dev/null", tmp_path / ("x" * 300), own / "below"):
        with pytest.raises(data.DataError):
            chat.save(bad)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/save", "no file"),
        ("/save /dev/null/x", "/dev/null"),
        ("/save {folder}", "is a folder"),
        ("/save {folder}/notes", "notes"),
        ("/save {folder}/\udce9", "udce9"),
        ("/system \udce9", "udce9"),
        ("/", "command '/'"),
        ("/exit now", ""),
    ],
)
def test_a_bad_command_keeps_the_conversation(
    generator, tmp_path, monkeypatch, capsys, line, message
):
    monkeypatch.setattr(TextGenerator, "of_run", classmethod(lambda cls, *_, **__: generator))
    (tmp_path / "notes").write_text("mine")
    lines = f"Hello\n{line.format(folder=tmp_path)}\n/save {tmp_path}/t.jsonl\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", "x", "--max-new-tokens", "5"]) == 0
    shown = capsys.readouterr().err
    assert message in shown
    assert (tmp_path / "notes").read_text() == "mine"
    assert (tmp_path / "t.jsonl").is_file() == (line != "/exit now")


def test_empty_answers_are_marked_and_piped_answers_are_separate(generator, monkeypatch, capsys):
    script = Scripted(generator.tokenizer, [" a\nb<E>", "<E>", " " * 200, " c<E>"])
    monkeypatch.setattr(generator, "cached_context", lambda: script)
    monkeypatch.setattr(TextGenerator, "of_run", classmethod(lambda cls, *_, **__: generator))
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\n3\n4\n"))
    assert main(["chat", "x", "--max-new-tokens", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "a\nb\n\n\n\n\n\nc\n\n"
    assert "answer is empty" in shown.err
    assert "white space" in shown.err


@pytest.mark.parametrize("seed", [-1, 2**32, 10**20])
def test_a_seed_that_would_be_cut_is_refused(scripted, seed):
    with pytest.raises(data.UserError, match="seed"):
        scripted(seed=seed)
