import json

import numpy as np
import pytest
from flaxzoo.train.runs.report import draw_curve, write_report
from matplotlib.image import imread
from matplotlib.legend import Legend

VALIDATION = {"loss": 1.23456, "perplexity": 3.43689, "bits_per_byte": 1.78109, "tokens": 12345}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    rows = [{"step": n, "split": "train", "loss": 3 / n} for n in range(1, 9)]
    rows.append({"step": 8, "split": "validation", "loss": 0.4, "tokens": 3})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_facts_numbers_and_sample(run):
    write_report(run, {"devices": "1 × cpu"}, VALIDATION, "日 said\n  the cat")
    text = (run / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# my run\n\n| | |\n| --- | --- |\n| devices | 1 × cpu |\n")
    assert "| validation loss | 1.2346 |\n" in text
    assert "| validation perplexity | 3.4369 |\n" in text
    assert "| validation bits_per_byte | 1.7811 |\n" in text
    assert "| validation tokens | 12,345 |\n" in text
    assert "![loss](loss.png)" in text
    assert text.endswith("## A sample\n\n```text\n日 said\n  the cat\n```\n")


def test_no_sample_no_heading(run):
    write_report(run, {}, VALIDATION, None)
    assert "sample" not in (run / "report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_curve_is_a_picture(run, tmp_path):
    draw_curve(run, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = imread(tmp_path / "curve.png")
    assert picture.shape[:2] == (400, 700)
    # Two lines and what is around them: more colours than an empty plot has.
    draw_curve(tmp_path, tmp_path / "empty.png")
    colours = [
        len(np.unique(imread(file).reshape(-1, picture.shape[2]), axis=0))
        for file in (tmp_path / "curve.png", tmp_path / "empty.png")
    ]
    assert colours[0] > colours[1]


def test_the_legend_has_a_fixed_place(run, monkeypatch, tmp_path):
    """The search for the best place takes more than a second in long runs, and then warns."""
    searches = []
    monkeypatch.setattr(Legend, "_find_best_position", lambda *_: searches.append(1) or (0, 0))
    draw_curve(run, tmp_path / "curve.png")
    assert searches == []


SAMPLES = [
    {"step": step, "prompt": "1|1", "completion": "2\n3", "reward": step / 2} for step in (0, 1, 3)
]


def test_answers_of_the_first_and_the_last_evaluation(run):
    write_report(run, {}, VALIDATION, None, samples=SAMPLES)
    text = (run / "report.md").read_text(encoding="utf-8")
    head = "| prompt | answer | reward |\n| --- | --- | --- |\n"
    assert text.endswith(
        f"## Answers before training\n\n{head}| 1\\|1 | 2⏎3 | 0.0 |\n"
        f"\n## Answers after 3 steps\n\n{head}| 1\\|1 | 2⏎3 | 1.5 |\n"
    )


def test_an_undefined_reward_is_an_empty_cell(run):
    write_report(run, {}, VALIDATION, None, samples=[SAMPLES[0] | {"reward": None}, SAMPLES[0]])
    text = (run / "report.md").read_text(encoding="utf-8")
    assert text.endswith("| 1\\|1 | 2⏎3 |  |\n| 1\\|1 | 2⏎3 | 0.0 |\n")


def test_answers_without_rewards_have_no_column_of_rewards(run):
    answers = [{"step": 1, "prompt": "1+1", "completion": "2"}]
    write_report(run, {}, VALIDATION, None, samples=answers)
    text = (run / "report.md").read_text(encoding="utf-8")
    table = "| prompt | answer |\n| --- | --- |\n| 1+1 | 2 |\n"
    assert text.endswith(f"## Answers after 1 step\n\n{table}")
