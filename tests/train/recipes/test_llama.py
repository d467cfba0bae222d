"""The recipes of Llama."""

import dataclasses
import json

import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.text.generate import TextGenerator

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
    """Its configuration at a smaller size: the loss falls, and its run continues texts."""
    config = train.recipe("llama-quickstart")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the cat sat on mat {i} and slept" for i in range(60)))
    tokenizer = dataclasses.replace(config.data.tokenizer, vocab_size=300)
    small = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, vocab_size=300, max_length=16, num_layers=2, d_model=32, d_ff=48
        ),
        data=dataclasses.replace(
            config.data,
            source=f"text:{text}#block",
            validation_fraction=0.2,
            length=16,
            tokenizer=tokenizer,
        ),
        optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=2e-2, warmup_steps=2),
        steps=60,
        evaluate_every=30,
        checkpoint_every=60,
        sample_prompt="the cat",
    )
    train.train(small, tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["split"] == "validation"]
    assert len(losses) == 2
    assert max(losses) < 0.3 * np.log(300)  # the loss of a model that knows nothing, log V
    model, params = models.load(tmp_path / "run")
    assert (model.config.num_heads, model.config.kv_heads) == (4, 2)
    assert params["layers"]["attention"]["key"]["kernel"].shape == (2, 32, 2, 8)
    [sample] = TextGenerator.of_run(tmp_path / "run")(
        ["the cat"], max_new_tokens=4, temperature=0.0
    )
    assert sample.text.startswith(" sat")
