"""Reward models, DPO and reinforcement learning in two processes: each run is that of one."""

import dataclasses
import json

import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.data import DPOData, PolicyData, RewardData, TokenizerConfig

from ...support.objective_runs import policy
from ...support.run_folders import everything, lines
from .several import go

STEPS = 2
CHARACTERS = TokenizerConfig(kind="characters")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def runs(work_folder):
    """Configurations by name; `reward` is trained in `work_folder` before the others."""
    work_folder.mkdir()
    sums = [(a, b) for a in range(9) for b in range(9)]
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "chosen": str(a + b), "rejected": "0"}
        for a, b in sums
        if a + b
    ]
    # Nine do not fill two batches of eight: a process has none of the rows of the second.
    held_out = write_lines(work_folder / "held-out.jsonl", rows[:9])
    source = write_lines(work_folder / "rows.jsonl", rows[9:])
    of = {"source": source, "validation": held_out, "tokenizer": CHARACTERS}
    steps = {"steps": STEPS, "log_every": 1, "evaluate_every": 1, "checkpoint_every": STEPS}
    # A larger epsilon keeps gradients that are zero but for rounding from becoming whole steps.
    optimizer = train.OptimizerConfig(peak_learning_rate=1e-2, warmup_steps=0, epsilon=1e-3)
    base = dataclasses.replace(
        policy("grpo")(work_folder, **steps),
        data=RewardData(length=12, **of),
        objective=train.RewardConfig(),
        optimizer=optimizer,
    )
    lora = models.LoRAConfig(rank=2, dropout_rate=0.2)
    rewards = (str(work_folder / "reward"), "length:2")

    settings = {"max_new_tokens": 4, "beta": 0.1, "num_iterations": 2}
    return {
        "reward": base,
        "dpo": dataclasses.replace(
            base,
            data=DPOData(length=12, **of),
            objective=train.DPOConfig(reference="frozen"),
            init_from=str(work_folder / "reward"),
            lora=lora,
        ),
        "grpo": dataclasses.replace(
            base,
            data=PolicyData(length=9, **of),
            objective=train.GRPOConfig(rewards=rewards, num_mini_batches=2, **settings),
            mesh=train.MeshConfig(data=1, fsdp=2),
        ),
        "ppo": dataclasses.replace(
            base,
            data=PolicyData(length=9, **of),
            objective=train.PPOConfig(rewards=("length:2",), **settings),
        ),
    }


EVALUATED = {
    "reward": {"accuracy", "margin", "mean_reward", "min_reward", "max_reward", "pairs"},
    "dpo": {"rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "pairs"},
    "grpo": {"reward", "rewards/reward/mean", "rewards/length/mean", "kl", "prompts"},
    "ppo": {"reward", "rewards/length/mean", "completions/mean_length", "kl", "prompts"},
}
"""Some metrics of an evaluation."""


@pytest.mark.slow
def test_two_processes_train_what_one_trains(run_in_two, tmp_path):
    """With a reward model as a reward, also for the rows of one process alone."""
    two, one = tmp_path / "two", tmp_path / "one"
    configs = runs(one)
    mesh = train.MeshConfig(data=2, fsdp=4)
    for name, config in configs.items():
        go(dataclasses.replace(config, mesh=mesh), one / name)
    jobs = ((config, two / name, None, None) for name, config in configs.items())
    assert run_in_two(1, *jobs) == 0
    for name in configs:
        ours, theirs = ([json.loads(line) for line in lines(at / name)] for at in (two, one))
        for row, expected in zip(ours, theirs, strict=True):
            assert row.pop("split") == expected.pop("split")
            assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert ours[-1].keys() >= EVALUATED[name]
        arrays, expected = everything(two / name, STEPS), everything(one / name, STEPS)
        assert arrays.keys() == expected.keys()
        for path, x in arrays.items():
            np.testing.assert_allclose(x, expected[path], rtol=1e-3, atol=2e-5, err_msg=path)
        answers = "samples.jsonl"
        if (one / name / answers).exists():
            assert (two / name / answers).read_text() == (one / name / answers).read_text()
