import json
import subprocess
import sys
import types

import pytest
from flaxzoo.train.runs.metrics_log import MetricsLog, read_metrics


def log(folder, steps, first_step=0, **options):
    folder.mkdir(exist_ok=True)
    with MetricsLog(folder, first_step=first_step, wandb_project=None, **options) as it:
        for step in steps:
            it.write(step, "train", {"loss": 1 / step})
            if step % 2 == 0:
                it.write(step, "validation", {"loss": 2.5, "tokens": 7})


def test_a_line_per_group_and_step(tmp_path):
    log(tmp_path, [1, 2])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "split": "train", "loss": 1.0},
        {"step": 2, "split": "train", "loss": 0.5},
        {"step": 2, "split": "validation", "loss": 2.5, "tokens": 7},
    ]
    assert read_metrics(tmp_path, "train") == rows[:2]
    assert read_metrics(tmp_path, "validation") == rows[2:]
    assert read_metrics(tmp_path / "elsewhere", "train") == []
    assert sum(file.stat().st_size for file in (tmp_path / "tensorboard").iterdir()) > 100


def test_lines_are_on_disk_at_once(tmp_path):
    with MetricsLog(tmp_path, first_step=0, wandb_project=None) as it:
        it.write(1, "train", {"loss": 3.0})
        assert read_metrics(tmp_path, "train") == [{"step": 1, "split": "train", "loss": 3.0}]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "split": "tr', '{"step": 5}'])
def test_what_came_after_the_checkpoint_is_forgotten(tmp_path, torn):
    # Also a line that a killed process left without its end.
    log(tmp_path / "whole", range(1, 8))
    log(tmp_path / "ours", range(1, 6))
    with (tmp_path / "ours" / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log(tmp_path / "ours", range(4, 8), first_step=3)
    names = ("whole", "ours")
    whole, ours = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in names)
    assert ours == whole
    left = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert left == ["metrics.jsonl", "tensorboard"]


def test_weights_and_biases_is_told_too(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: calls.append("end")
    )
    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)  # pyright: ignore[reportArgumentType]
    (tmp_path / "config.json").write_text("{}")
    for step in (1, 2):  # stopped and taken up again: the same run there, too
        with MetricsLog(tmp_path, first_step=step - 1, wandb_project="zoo") as it:
            it.write(step, "train", {"loss": 1.5})
    options = calls[0]
    assert options["project"] == "zoo"
    assert options["id"].startswith(tmp_path.name)
    assert calls == [
        *(options, (1, {"train/loss": 1.5}), "end"),
        *(options, (2, {"train/loss": 1.5}), "end"),
    ]


def test_weights_and_biases_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"wandb_project 'zoo' .*pip install 'flaxzoo\[wan"):
        MetricsLog(tmp_path, first_step=0, wandb_project="zoo")


@pytest.mark.slow
def test_torch_is_not_imported_for_it(tmp_path):
    """As tensorboardX would: it takes longer than the rest of what a training run imports."""
    program = (
        "import importlib.util, pathlib, sys\n"
        "from flaxzoo.train.runs.metrics_log import MetricsLog\n"
        "with MetricsLog(pathlib.Path(sys.argv[1]), first_step=0, wandb_project=None) as it:\n"
        "    it.write(1, 'train', {'loss': 3.0})\n"
        "assert 'torch' not in sys.modules\n"
        "assert importlib.util.find_spec('torch')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program, str(tmp_path)], check=True)
