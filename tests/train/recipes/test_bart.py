"""The recipes of BART: noise is removed."""

import dataclasses
import json

import numpy as np
import pytest
from flaxzoo import models, train

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.mark.slow
def test_denoising_learns(tmp_path):
    """The recipe at a smaller size: the loss falls far below that of a model without text."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"the cat {i} sat here. it slept. it woke" for i in range(90)))
    config = train.recipe("bart-denoising")
    small = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, max_length=32, num_layers=1, d_model=32, num_heads=2, d_ff=48
        ),
        data=dataclasses.replace(
            config.data,
            source=f"text:{text}#line",
            validation_fraction=0.2,
            length=32,
            tokenizer=dataclasses.replace(config.data.tokenizer, vocab_size=290),
        ),
        optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=1e-2, warmup_steps=2),
        execution=models.Execution(),
        steps=30,
        batch_size=8,
        evaluate_every=15,
        checkpoint_every=15,
        sample_prompt=None,
    )
    train.train(small, tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["split"] == "validation"]
    assert losses[1] < losses[0] < np.log(300)
    assert losses[1] < 0.6 * np.log(300)
