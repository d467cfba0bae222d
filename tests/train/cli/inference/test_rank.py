"""`flaxzoo rank`: answers are shown, and rankings become records for a reward model."""

import io
import json

import jax
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.chat.records import preferences
from flaxzoo.train.cli.inference.rank import read_ranking
from flaxzoo.train.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    letters = "abcdefghijklmnopqrstuvwxyz :<>|_\n"
    tokenizer = data.train_tokenizer([letters], data.TokenizerConfig("characters"))
    config = models.GPTConfig(
        vocab_size=tokenizer.vocab_size, max_length=64, num_layers=1, d_model=8, num_heads=2
    )
    model = models.create(config)
    folder = tmp_path_factory.mktemp("rank") / "run"
    train.save_run(folder, model, models.init_params(model, jax.random.key(0)), tokenizer)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_rankings_become_records_of_preferences(run, chat, tmp_path, monkeypatch, capsys):
    output = tmp_path / "ranked.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("3 1=2\n\n2 1\n"))
    words = ["rank", str(run), str(output), "--prompt", "who", "what", "why", "when"]
    words += ["--num-samples", "3", "--max-new-tokens", "6", *(["--chat"] if chat else [])]
    assert main(words) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 2  # "what" was left out, and the input ended before "when"
    first, (second, third) = rows[0]["ranked"]
    assert len(rows[1]["ranked"]) == 2
    if chat:
        assert rows[0]["prompt"] == [{"role": "user", "content": "who"}]
        first, second, third = (answer[0]["content"] for answer in (first, second, third))
    for number, text in zip((3, 1, 2), (first, second, third), strict=True):
        assert f"[{number}] {text}" in shown
    # The reader of `flaxzoo train reward` takes each pair of different rank.
    records = [pair for row in rows for pair in preferences(row, "here")]
    assert len(records) == 3


@pytest.mark.slow
def test_an_answer_in_a_conversation_ends_with_the_given_strings_too(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("1 2\n"))
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["rank", str(run), str(tmp_path / "ranked.jsonl"), "--chat", "--prompt", "who"]
    words += ["--num-samples", "2", "--max-new-tokens", "8", "--stop-strings", *letters]
    assert main(words) == 0
    (row,) = map(json.loads, (tmp_path / "ranked.jsonl").read_text().splitlines())
    answers = [message["content"] for answer in row["ranked"] for message in answer]
    assert len(answers) == 2
    assert not set(letters) & set("".join(answers))


@pytest.mark.parametrize("line", ["1 1", "0 1", "1 4", "2", "1=2", "a b", "1 =2"])
def test_a_faulty_ranking_is_refused(line):
    with pytest.raises(data.UserError, match="from 1 to 3"):
        list(read_ranking(line, 3))
    assert list(read_ranking("2 1=3", 3)) == [[1], [0, 2]]
    assert list(read_ranking(" ", 3)) == []


def test_rank_needs_prompts(capsys):
    assert main(["rank", "run", "out.jsonl"]) == 2
    assert "--prompt nor --prompt-file" in capsys.readouterr().err
