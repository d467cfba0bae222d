import json

import numpy as np
import pytest
from flaxzoo.train.runs.report import draw_curve, write_report
from matplotlib.image import imread

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
