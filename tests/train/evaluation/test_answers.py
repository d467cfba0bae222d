"""The report of a fine-tuned model compares it with the model that it started from."""

import dataclasses
import json

import jax
import pytest
from flaxzoo import data, models, train
from flaxzoo.train.evaluation.answers import log_rows
from flaxzoo.train.evaluation.reward_model import RewardModel

pytestmark = pytest.mark.usefixtures("on_one_device")

TEXTS = [(f"{a}+{b}=", str(a + b)) for a in range(3) for b in range(3)]
PAIRS = [{"prompt": p, "chosen": answer, "rejected": "0"} for p, answer in TEXTS if answer != "0"]
TOKENIZER = data.TokenizerConfig(kind="characters")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "start"
    tokenizer = data.train_tokenizer(["0123456789+=\n"], TOKENIZER)
    config = models.GPTConfig(
        vocab_size=tokenizer.vocab_size, max_length=16, num_layers=1, d_model=16, num_heads=2
    )
    model = models.create(config)
    train.save_run(folder, model, models.init_params(model, jax.random.key(0)), tokenizer)
    return folder


def tuned(recipe, records, start, folder):
    """Returns the validation rows and the report of a fine-tuned run."""
    source = data.Examples.of(records)
    given = train.recipe(recipe)
    config = dataclasses.replace(
        given,
        data=dataclasses.replace(given.data, source=source, validation=source, length=16),
        init_from=str(start),
        steps=2,
        epochs=0.0,
        batch_size=8,
    )
    train.train(config, folder, quiet=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if r["split"] == "validation"], (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_scores_and_answers_before_and_after(start, tmp_path, recipe):
    records = [{"prompt": p, "completion": answer} for p, answer in TEXTS]
    folder = tmp_path / "run"
    rows, report = tuned(recipe, records if recipe == "sft" else PAIRS, start, folder)
    assert rows[0]["step"] == 0
    for title, source in (("before training", start), ("after 2 steps", folder)):
        section = report.split(f"## Answers {title}\n")[1]
        assert "\n| prompt | answer |\n| --- | --- |\n" in section  # nothing has a reward
        generator = models.TextGenerator.of_run(source)
        answer = generator([TEXTS[1][0]], do_sample=False, max_new_tokens=60, log=lambda _: None)
        shown = answer[0].text.replace("\n", "⏎").replace("|", "\\|")
        assert f"| {TEXTS[1][0]} | {shown} |" in section


@pytest.mark.slow
def test_rewards_of_two_pairs(start, tmp_path):
    folder = tmp_path / "run"
    rows, report = tuned("reward", PAIRS, start, folder)
    assert rows[0]["step"] == 0
    first = PAIRS[0]
    contexts = [data.PromptedText(first["prompt"], "")] * 2
    both = [first["chosen"], first["rejected"]]
    for text, reward in zip(both, RewardModel.of_run(folder)(contexts, both), strict=True):
        assert f"| {first['prompt']} | {text} | {round(reward, 4)} |" in report


def row(step, prompt, **more):
    return {"step": step, "prompt": prompt, "completion": "four"} | more


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        # One prompt, or a model at the start that cannot answer: each row is logged once.
        (
            [row(0, "2+2="), row(3, "2+2=")],
            ["before training: '2+2=' → 'four'", "after 3 steps: '2+2=' → 'four'"],
        ),
        (
            [row(1, "a"), row(1, "b")],
            ["after 1 step: 'a' → 'four'", "after 1 step: 'b' → 'four'"],
        ),
        # Two answers of a policy at the first and the last step, and its undefined reward.
        (
            [row(step, x, reward=None if x == "b" else 0.5) for step in (0, 5, 9) for x in "abc"],
            [
                "before training: 'a' → 'four'; reward 0.5000",
                "before training: 'b' → 'four'",
                "after 9 steps: 'a' → 'four'; reward 0.5000",
                "after 9 steps: 'b' → 'four'",
            ],
        ),
        (
            [row(0, "a\nb", completion="\n \n"), row(1, "x " * 60, completion="")],
            [
                "before training: 'a b' → (white space)",
                f"after 1 step: '{'x ' * 47}[...]' → (empty)",
            ],
        ),
        # Both answers of two pairs.
        (
            [row(9, x, reward=float(i)) for x in "ab" for i in range(2)],
            [f"after 9 steps: '{x}' → 'four'; reward {i}.0000" for x in "ab" for i in range(2)],
        ),
    ],
)
def test_the_log_shows_few_answers_once(rows, expected):
    lines = []
    log_rows(rows, lines.append)
    assert lines == expected
