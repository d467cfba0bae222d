"""Writes and reads `samples.jsonl`, which has some completions of each evaluation of a policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...data.chat.policy import PolicyExamples
from ...data.common.atomic_io import write_file
from ...data.common.errors import counted
from ...data.common.json_text import to_json
from ...data.tokenizers.base import Tokenizer
from .metrics_log import read_rows

Row = Mapping[str, Any]
"""A completion, with `step`, `prompt`, `completion`, and possibly `reward`."""

SAMPLES_FILE = "samples.jsonl"
NUM_SAMPLES = 8
"""The number of completions to keep per evaluation."""


def write_samples(
    folder: Path,
    step: int,
    *,
    examples: PolicyExamples,
    predictions: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
) -> None:
    """Adds the completions of an evaluation's first prompts, and removes samples of later steps.

    Args:
        folder: the run folder.
        step: the step of the evaluation.
        examples: the prompts.
        predictions: `labels`, `answer_mask` and `reward` of each prompt, from the evaluation.
        tokenizer: the tokenizer of the policy.
    """
    # A resumed run repeats steps, so replace the samples of this step and of later steps.
    earlier = [sample for sample in read_samples(folder) if sample["step"] < step]
    new = [
        {
            "step": step,
            "prompt": examples.prompts.prompt(0, index).text,
            "completion": tokenizer.decode(labels[mask != 0].tolist()),
            "reward": round(float(reward), 6) if np.isfinite(reward) else None,
        }
        for index, (labels, mask, reward) in enumerate(
            zip(
                predictions["labels"][:NUM_SAMPLES],
                predictions["answer_mask"][:NUM_SAMPLES],
                predictions["reward"][:NUM_SAMPLES],
                strict=True,
            )
        )
    ]
    content = "".join(to_json(sample) + "\n" for sample in [*earlier, *new])
    write_file(folder / SAMPLES_FILE, content.encode())


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Returns all samples of a run, in order, with `step`, `prompt`, `completion` and `reward`."""
    return read_rows(folder / SAMPLES_FILE)


def first_and_last(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Groups the rows of the first and of the last step; both may be the same step."""
    steps = sorted({row["step"] for row in (*rows[:1], *rows[-1:])})
    return {step: [row for row in rows if row["step"] == step] for step in steps}


def when(step: int) -> str:
    """Returns "before training" for step 0, and otherwise such as "after 40 steps"."""
    return f"after {counted(step, 'step')}" if step else "before training"
