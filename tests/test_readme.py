"""Every command and every Python block of the README is run, at a tiny size."""

import re
import shlex
from pathlib import Path

import pytest
from flaxzoo.train import cli

README = Path(__file__).parent.parent / "README.md"

# Appended to each training command: the same run, only smaller.
SMALL = shlex.split(
    "--steps 4 --batch-size 8 --data.length 64 --model.max-length 64 --model.d-model 16 "
    "--model.num-layers 1 --model.num-heads 2 --optimizer.warmup-steps 1 --evaluate-every 2 "
    "--checkpoint-every 2 --sample-prompt None"
)
SMALL_VOCABULARY = ["--data.tokenizer.vocab-size", "300", "--model.vocab-size", "300"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def commands():
    """The arguments of each `flaxzoo …` in a shell block, in order."""
    found = []
    for block in blocks("sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "flaxzoo" in words:
                found.append(words[words.index("flaxzoo") + 1 :])
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the README speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    text = README.read_text(encoding="utf-8")
    for name in ("README.md", "train.txt", "valid.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text(text * 3, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_every_command_and_python_block_runs(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    ran = commands()
    assert len(ran) >= 9
    for arguments in ran:
        if arguments[0] == "train":
            vocabulary = [] if arguments[1] == "shakespeare-char" else SMALL_VOCABULARY
            arguments = [*arguments, *SMALL, *vocabulary]
        assert cli.main(arguments) == 0, (arguments, capsys.readouterr().err)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert (place / "runs" / "quickstart" / "report.md").is_file()


def test_the_test_command_is_the_one_that_ci_runs():
    script = (README.parent / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -e '.[test]' && pytest" in README.read_text(encoding="utf-8")
    assert "pip install -q -e '.[test]' && pytest" in script
