"""Answers to queries: a model that has learned two answers by heart, and full contexts."""

import json
import re

import jax
import numpy as np
import optax
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.tokenizers.characters import CharacterTokenizer
from flaxzoo.models.hf.save_weights import write_weights
from flaxzoo.train.cli.main import main

pytestmark = pytest.mark.usefixtures("on_one_device")

PATTERN = data.PromptPattern("{input} > {output}\n")
SHOTS = [
    data.PromptExample({"input": a, "output": b})
    for a, b in (("ab", "ba"), ("cd", "dc"), ("e", "e"))
]
LETTERS = CharacterTokenizer(" >abcdefxy\n")
T = 40


@pytest.fixture(scope="module")
def generator():
    """A model that has learned five lines by heart, in any order."""
    config = models.GPTConfig(
        vocab_size=LETTERS.vocab_size, max_length=T, num_layers=1, d_model=32, num_heads=2
    )
    model = models.create(config)
    lines = ["ab > ba\n", "cd > dc\n", "x > yx\n", "y > xy\n", "e > e\n"]
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(lines, 10)) for _ in range(32)]
    rows = np.array([LETTERS.encode(text, add_special_tokens=False)[: T + 1] for text in texts])
    batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
    batch["segment_ids"] = np.ones_like(batch["labels"])
    tx = optax.adam(1e-2)
    state = train.init_state(models.init_params(model, jax.random.key(0)), tx)
    step = jax.jit(train.make_train_step(model.apply, train.CAUSAL, tx))
    batch = jax.tree.map(jax.numpy.int32, batch)
    losses = []
    for i in range(150):
        state, metrics = step(state, batch, jax.random.key(i))
        losses.append(metrics["loss"])
    assert losses[-1] < 0.6
    return models.TextGenerator(model, state.params, LETTERS)


@pytest.mark.slow
def test_answers_end_at_the_line_feed(generator):
    few = data.FewShot(PATTERN, SHOTS, 2)
    queries = [{"input": "x"}, {"input": "y"}, data.PromptExample({"input": "x", "output": "?"})]
    answers = models.answer_queries(generator, few, queries, max_new_tokens=8)
    assert [answer.text for answer in answers] == ["yx", "xy", "yx"]
    assert all(answer.finished for answer in answers)
    assert [answer.prompt for answer in answers] == [few.prompt(query) for query in queries]
    for query, answer in zip(queries, answers, strict=True):
        [alone] = models.answer_queries(generator, few, [query], max_new_tokens=8)
        assert alone == answer
    [short] = models.answer_queries(generator, few, queries[:1], max_new_tokens=2)
    assert (short.text, short.finished) == ("y", False)
    [stopped] = models.answer_queries(
        generator, few, queries[:1], max_new_tokens=8, stop_strings=["x"]
    )
    assert stopped.text == "y"


@pytest.mark.slow
def test_a_full_context_loses_its_first_examples_with_a_note(generator):
    pool = [data.PromptExample({"input": "a" * n, "output": "b"}) for n in range(1, 9)]
    few = data.FewShot(PATTERN, pool, 8)
    lines = []
    [answer] = models.answer_queries(
        generator, few, [{"input": "x"}], max_new_tokens=10, log=lines.append
    )
    assert generator.num_tokens(answer.prompt) <= T - 10
    assert few.prompt({"input": "x"}).endswith(answer.prompt)
    assert lines == [
        "1 of 1 prompts lost their first examples: with 10 tokens for the answer, prompts have at "
        "most 30"
    ]
    for wrong, message in (
        ({"drop": False}, "8 examples .*query .* got 79"),
        (
            {"max_new_tokens": T},
            f"max_new_tokens {T} .*{T} tokens",
        ),
    ):
        with pytest.raises(data.UserError, match=message):
            models.answer_queries(
                generator, few, [{"input": "x"}], **{"max_new_tokens": 10, **wrong}
            )
    with pytest.raises(data.UserError, match="query"):
        models.answer_queries(generator, few, [])


@pytest.mark.slow
def test_the_command(generator, tmp_path, capsys):
    folder, shots = tmp_path / "model", tmp_path / "shots.jsonl"
    folder.mkdir()
    write_weights(folder, generator._model.config, generator._params)
    LETTERS.save(folder)
    shots.write_text("".join(json.dumps(dict(shot.fields)) + "\n" for shot in SHOTS))
    base = ["prompt", str(folder), "--examples", str(shots), "--pattern", r"{input} > {output}\n"]

    def flaxzoo(*arguments):
        capsys.readouterr()
        status = main([*base, *arguments])
        return status, capsys.readouterr()

    few = data.FewShot(PATTERN, SHOTS, 2)
    status, captured = flaxzoo("--shots", "2", "--query", "x", "y", "--show")
    assert status == 0
    assert captured.out.rstrip("\n") == "\n----\n".join(few.prompt({"input": q}) for q in "xy")
    status, captured = flaxzoo("--shots", "2", "--query", "x", "y")
    assert captured.out == "yx\nxy\n"
    status, captured = flaxzoo("--shots", "2", "--query-file", str(shots), "--json")
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["query"] for row in rows] == [dict(shot.fields) for shot in SHOTS]
    assert rows[0]["prompt"] == few.prompt(SHOTS[0])
    for wrong, message in (
        (["--query", "x", "--shots", "9"], "got 9"),
        (["--query", "x", "--query-file", "y"], "--query .*--query-file"),
        (["--query", "x", "--labels", "a"], "--pattern .*--labels"),
        (["--query", "x" * 99], "query "),
    ):
        status, captured = flaxzoo(*wrong)
        assert status == 2
        assert re.search(message, captured.err)
        assert captured.err.count("\n") == 1
