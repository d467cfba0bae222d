"""`flaxzoo prompt` and `flaxzoo generate --prompt-file`, as a person types them."""

import json
import re
import shlex
import string

import pytest
from flaxzoo import data, train
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.train.cli.main import main

EXAMPLES = [
    {"input": "I eated.", "output": "I ate."},
    {"input": "He go home.", "output": "He goes home."},
    {"input": "We is.", "output": "We are."},
]
PRINTED = """\
Poor English input: She have a dog.
Good English output:"""


@pytest.fixture(scope="module")
def work_folder(tiny, tmp_path_factory):
    """A folder with a run that reads 100 characters, and files of examples and prompts."""
    work_folder = tmp_path_factory.mktemp("prompt")
    tokenizer = CharacterTokenizer(string.printable)
    model = tiny(num_layers=1, max_length=100, vocab_size=tokenizer.vocab_size)
    train.save_run(work_folder / "run", model.model, model.params, tokenizer)
    (work_folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in EXAMPLES))
    tasks = [
        {"task": name, "question": f"{name} {i}", "answer": "b"} for name in "xy" for i in "12"
    ]
    (work_folder / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in tasks))
    (work_folder / "bare.jsonl").write_text('{"input": "no label"}\n')
    (work_folder / "q.txt").write_text("one\ntwo\n")
    (work_folder / "q.tsv").write_text("input\nthree\n")
    (work_folder / "prompts.jsonl").write_text(
        '{"prompt": "a", "name": "first"}\n{"prompt": "bb", "seed": 7, "stop_strings": "e"}\n'
    )
    return work_folder


@pytest.fixture
def flaxzoo(work_folder, monkeypatch, capsys):
    """Runs a command in that folder; its status, standard output and messages."""
    monkeypatch.chdir(work_folder)

    def flaxzoo(command):
        capsys.readouterr()
        return main(shlex.split(command)), *capsys.readouterr()

    return flaxzoo


def test_a_prompt_is_shown_without_a_model(flaxzoo):
    arguments = 'prompt run --show --examples a.jsonl --query "She have a dog."'
    status, out, messages = flaxzoo(arguments)
    assert (status, messages) == (0, "")
    few = data.FewShot(data.PATTERNS["grammar"], data.prompt_examples(EXAMPLES), 3)
    assert out == few.prompt({"input": "She have a dog."}) + "\n"
    assert out.split("\n")[0:5:2] == [f"Poor English input: {row['input']}" for row in EXAMPLES]
    assert flaxzoo(f"{arguments} --shots 0")[1] == f"{PRINTED}\n"
    labels = '--labels "Poor English input: " "Good English output: "'
    assert flaxzoo(f"{arguments} {labels}")[1] == out
    assert len({flaxzoo(f"{arguments} --seed {seed}")[1] for seed in range(4)}) > 1
    shown = flaxzoo("prompt run --show --pattern 'Q: {q} A: {a}' --query-file q.txt")[1]
    assert shown == "Q: one A:\n----\nQ: two A:\n"
    assert flaxzoo("prompt run --show --examples a.jsonl --shots 0 --query-file q.tsv")[1] == (
        "Poor English input: three\nGood English output:\n"
    )


def test_a_pattern_with_several_fields_takes_an_object(flaxzoo):
    fields = '{"definition": "To yalubalu is to sing.", "word": "yalubalu"}'
    _, out, _ = flaxzoo(f"prompt run --show --pattern words --query '{fields}'")
    assert out == (
        "To yalubalu is to sing. An example of a sentence that uses the word yalubalu is:\n\n"
    )  # the line feed before the answer is in the prompt: one after it ends the answer
    # Values that are not texts are written as JSON.
    fields = '{"definition": ["a", 1], "word": null}'
    _, out, _ = flaxzoo(f"prompt run --show --pattern words --query '{fields}'")
    assert out == '["a", 1] An example of a sentence that uses the word null is:\n\n'


def test_examples_of_the_querys_task_are_shown(flaxzoo):
    arguments = "prompt run --show --examples tasks.jsonl --pattern question --shots 2 --query new"
    _, out, _ = flaxzoo(f"{arguments} --task y")
    assert out.count("Q: y") == 2
    assert "Q: x" not in out
    status, _, messages = flaxzoo(f"{arguments} --task z")
    assert status == 2
    assert "task 'z'" in messages


def test_a_full_context_loses_examples_or_is_an_error(flaxzoo):
    arguments = (
        'prompt run --examples a.jsonl --query "She have a dog." "He go" --max-new-tokens 40 --json'
    )
    status, out, messages = flaxzoo(arguments)
    assert status == 0, messages
    assert json.loads(out.splitlines()[0])["prompt"] == PRINTED
    assert re.search("2 of 2 prompts .* 40 tokens", messages)
    status, out, messages = flaxzoo(f"{arguments} --full-context error")
    assert (status, out) == (2, "")
    assert "3 examples" in messages
    assert messages.count("\n") == 1


def test_every_answer_says_why_it_ended(flaxzoo):
    arguments = "prompt run --examples a.jsonl --shots 0 --query one two --max-new-tokens 20"
    arguments += " --stop-strings a e"
    status, out, messages = flaxzoo(f"{arguments} --num-return-sequences 6 --json --seed 1")
    assert status == 0, messages
    assert "2 prompts: 8 rows" in messages
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["query"] for row in rows] == [{"input": "one"}, {"input": "two"}]
    assert rows[1]["prompt"] == "Poor English input: two\nGood English output:"
    answers = [one for row in rows for one in row["completions"]]
    assert {one["finish_reason"] for one in answers} == {"stop", "length"}
    for one in answers:
        assert not set("ae\n") & set(one["text"])
        stopped = one["pieces"][-1] in ("a", "e", "\n")
        assert one["finish_reason"] == ("stop" if stopped else "length")
    status, out, _ = flaxzoo(f"{arguments} --num-return-sequences 6")
    assert (status, out.count("\n")) == (0, 12)  # one line each
    greedy = [flaxzoo(f"{arguments} --seed {seed}")[1] for seed in (3, 4)]  # by default
    assert greedy[0] == greedy[1]


def test_completions_of_a_file(flaxzoo):
    arguments = "generate run --prompt-file prompts.jsonl --max-new-tokens 8 --seed 3"
    status, out, messages = flaxzoo(f"{arguments} --json")
    assert status == 0, messages
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["name"], first["prompt"], first["seed"]) == ("first", "a", 3)
    assert (second["prompt"], second["seed"]) == ("bb", 7)
    texts = [row["prompt"] + row["completions"][0]["text"] for row in (first, second)]
    assert flaxzoo(arguments)[1] == "\n----\n".join(texts) + "\n"
    [alone] = json.loads(
        flaxzoo("generate run --prompt bb --max-new-tokens 8 --seed 7 --stop-strings e --json")[1]
    )["samples"]
    assert alone["text"] == second["completions"][0]["text"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prompt run --examples a.jsonl", "--query nor --query-file"),
        ("prompt run --query a", "give --pattern"),
        ("prompt run --query a --shots 2 --pattern question", "--shots 2 .*examples"),
        ("prompt run --query a --queries b", "--queries: .*--query-file"),
        ("prompt run --query a --examples a.jsonl --pattern gramar", "grammar"),
        ("prompt run --query a --examples a.jsonl --pattern question", "got 'question'"),
        ("prompt run --query a --examples bare.jsonl", "fields input"),
        ("prompt run --query a --examples bare.jsonl --labels x y", r"2 labels \('x', 'y'\)"),
        ("prompt run --query a --examples a.jsonl --shots 4", "got 4"),
        ("prompt run --query a --examples none.jsonl", "none.jsonl"),
        ("prompt run --query a --pattern words", "2 fields"),
        ("prompt run --query a --pattern '{a}'", "0 fields"),
        ("prompt run --query a --pattern question --max-new-tokens 100", "--max-new-tokens 100"),
        (f"prompt run --query {'a' * 99} --pattern question", "got 105"),
        ("generate run --prompt a --prompt-file q.txt", "--prompt .*--prompt-file"),
        ("generate run --prompt-file none.txt", "'none.txt'"),
        (
            "generate run --prompt-file q.txt --batch-size 0",
            "--batch-size .*got 0",
        ),
    ],
)
def test_mistakes_are_named_in_a_line(flaxzoo, command, message):
    status, out, messages = flaxzoo(command)
    assert (status, out) == (2, "")
    assert re.search(message, messages)
    assert messages.startswith("flaxzoo: ")
    assert messages.count("\n") == 1
