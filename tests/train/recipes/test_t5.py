"""The recipes of T5: gaps are learned, and any pairs of texts from there."""

import dataclasses
import json

import numpy as np
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.common.errors import UserError
from flaxzoo.train.evaluation.evaluate import score_run

pytestmark = pytest.mark.usefixtures("on_one_device")

WORDS = ("red", "blue", "green", "old", "new", "big")


def small(config, source, **data_fields):
    """A recipe at a size that a test can train."""
    model = dataclasses.replace(
        config.model, max_length=32, num_layers=1, d_model=32, d_head=8, d_ff=48
    )
    given = {"source": source, "validation_fraction": 0.2, "length": 32, **data_fields}
    return dataclasses.replace(
        config,
        model=model,
        data=dataclasses.replace(config.data, **given),
        optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=1e-2, warmup_steps=2),
        execution=models.Execution(),
        steps=30,
        batch_size=8,
        evaluate_every=15,
        checkpoint_every=30,
        sample_prompt=None,
    )


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A run of `t5-quickstart` on a text whose words follow from each other."""
    folder = tmp_path_factory.mktemp("t5")
    text = folder / "text.txt"
    text.write_text("\n".join(f"the cat number {i} sat on the mat and slept" for i in range(90)))
    config = train.recipe("t5-quickstart")
    tokenizer = dataclasses.replace(config.data.tokenizer, vocab_size=300)
    config = small(
        config,
        f"text:{text}#line",
        num_sentinels=8,
        mean_span_length=2.0,
        tokenizer=tokenizer,
    )
    train.train(config, folder / "run", quiet=True)
    return folder / "run"


@pytest.mark.slow
def test_the_quickstart_learns(quickstart):
    """Its configuration at a smaller size: the loss falls below that of a model without text."""
    lines = (quickstart / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, lines) if row["split"] == "validation"]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert losses[1] < 0.6 * np.log(300)
    model, params = models.load(quickstart)
    assert (model.config.gated, model.config.tie_output) == (True, False)
    assert params["token_embedding"]["embedding"].shape[0] == 300  # sentinels included
    assert len(data.load_tokenizer(quickstart / "tokenizer").sentinels) == 8
    # An answer to a text with gaps names the gaps, each with its text.
    translate = models.TextTranslator.of_run(quickstart)
    [[answer]] = translate(["the cat <extra_id_0> sat on the mat"], num_beams=1)
    assert "<extra_id_0>" in answer.text


@pytest.mark.slow
def test_text_to_text_begins_with_it_and_prints_all_scores(quickstart, tmp_path):
    """JSON lines with names of the user's choice, targets of another length, every score."""
    file = tmp_path / "pairs.jsonl"
    pairs = [(a, b) for a in WORDS for b in WORDS]
    rows = [{"question": f"{a} {b}", "answer": f"{b} {a}", "n": 1} for a, b in pairs]
    file.write_text("\n".join(map(json.dumps, rows)))
    config = small(train.recipe("text-to-text"), f"jsonl:{file}#question,answer", target_length=24)
    config = dataclasses.replace(config, init_from=str(quickstart), steps=15, checkpoint_every=15)
    train.train(config, tmp_path / "run", quiet=True)
    scores = score_run(tmp_path / "run", f"jsonl:{file}", num_beams=1, log=lambda _: None)
    assert {"nll", "perplexity", "accuracy", "bleu", "chrf", "exact_match"} <= set(scores)
    assert all(0 <= scores[name] <= 1 for name in ("rouge1", "rouge2", "rougeL", "exact_match"))
    assert scores["sentences"] == len(pairs)


def test_text_to_text_of_a_published_size():
    assert train.recipe("text-to-text", "bart-base").model.num_layers == 6
    with pytest.raises(UserError, match=r"gpt .*seq2seq_lm"):
        train.recipe("text-to-text", "gpt2")
