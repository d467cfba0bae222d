"""Repeat the experiments that the lectures describe, at sizes that take minutes on two CPU cores.

    python tests/benchmarks/lectures.py EXPERIMENT --output runs/lectures [--seeds 1]

encoder       A Transformer whose encoder sees only earlier tokens, against the usual one.
counter       Positions 1, 2, 3, … appended to the embeddings, trained at 1,000, read to 5,000.
shots         Accuracy by the number of examples in the prompt, for four sizes.
instructions  Loss on a task that was held out, before and after instruction tuning, for four sizes.
bert          BERT without tokens that stay unchanged, and without next sentences.

Prints a JSON line for each run. Finished runs in the output folder are not repeated.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import data, models, train
from flaxzoo.data.features import masking
from flaxzoo.train.runs.metrics_log import read_metrics

Row = dict[str, Any]

TASKS = """
[[tasks]]
name = "sentiment"
source = "builtin:reviews"
forms = [
  "Is this review positive or negative?\\n{text}\\n{label}",
  "{text} How did the author like it? {label}",
]

[[tasks]]
name = "translation"
source = "builtin:numbers-en-fr"
forms = ["Translate the number into French.\\n{source}\\n{target}", "French for {source}? {target}"]

[[tasks]]
name = "sums"
source = "builtin:sums"
forms = ["{question} {answer}", "Calculate. {question}\\n{answer}"]
"""
"""The tasks of `instructions`. The last one is held out."""


def finished(config: train.TrainConfig, folder: Path) -> Row:
    """Trains a run unless it is finished; returns its size and the last validation scores."""
    started = time.process_time()
    if not (folder / "done").exists():
        train.train(config, folder, quiet=True)
        (folder / "done").touch()
    model, params = models.load(folder)
    scores = read_metrics(folder, "validation")[-1]
    size = {"parameters": train.count_parameters(params), "width": model.config.d_model}
    return {**size, "cpu_seconds": round(time.process_time() - started), **scores}


def encoder(output: Path, seed: int) -> Iterator[Row]:
    """Yields the scores of the recipe `numbers-en-fr` with and without a causal encoder."""
    for causal in (False, True):
        settings = {"model.encoder_causal": causal, "sample_prompt": None}
        settings |= {"model.d_model": 64, "evaluate_every": 300, "checkpoint_every": 300}
        config = train.recipe("numbers-en-fr", steps=300, batch_size=16, seed=seed, **settings)
        yield {"encoder_causal": causal, **finished(config, output / f"encoder-{causal}-{seed}")}


def counter(output: Path, seed: int) -> Iterator[Row]:
    """Yields the loss inside the trained length and beyond it, by the kind of positions."""
    text = "\n\n".join(
        data.load_documents("builtin:python-docs", "validation", validation_fraction=0.1)
    )
    for kind in ("appended_counter", "sinusoidal", "none"):
        recipe = train.recipe("quickstart", steps=200, batch_size=1, seed=seed, sample_prompt=None)
        sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "max_length": 1000}
        config = dataclasses.replace(
            recipe,
            model=models.LectureGPTConfig(vocab_size=1, **sizes, positions=kind, dropout_rate=0.0),
            data=dataclasses.replace(
                recipe.data, length=1000, tokenizer=data.TokenizerConfig("characters")
            ),
        )
        folder = output / f"counter-{kind}-{seed}"
        row = finished(config, folder)
        model, params = models.load(folder)
        longer = models.create(model.config.with_max_length(5000))
        _, tokenizer = train.open_run(folder)
        ids = jnp.asarray(tokenizer.encode(text, add_special_tokens=False))
        losses = _losses_by_position(longer, params, ids[: 2 * 5001].reshape(2, 5001))
        beyond = {"to_1000": losses[:1000].mean(), "to_2000": losses[1000:2000].mean()}
        yield {"positions": kind, **row, **beyond, "to_5000": losses[2000:].mean()}


def _losses_by_position(model: Any, params: Any, ids: jax.Array) -> np.ndarray:
    """Returns the mean loss at each position, float32 [T]."""

    @jax.jit
    def of_row(row: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, input_ids=row[None, :-1]).logits[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, row[1:])

    return np.mean([np.asarray(of_row(row)) for row in ids], axis=0)


SIZES = {"1x16": (1, 16), "1x32": (1, 32), "2x32": (2, 32), "2x64": (2, 64)}
"""The layers and widths of four small models."""


def shots(output: Path, seed: int) -> Iterator[Row]:
    """Yields the accuracy on held-out tasks by the number of examples in the prompt."""
    for name, (num_layers, d_model) in SIZES.items():
        settings = {"model.num_layers": num_layers, "model.d_model": d_model, "sample_prompt": None}
        config = train.recipe("in-context", seed=seed, **settings)
        folder = output / f"shots-{name}-{seed}"
        row = finished(config, folder)
        asked = data.prompt_examples("builtin:patterns#copy,reverse,count")
        found = models.few_shot_accuracy(
            models.ContinuationScorer.of_run(folder),
            data.PATTERNS["patterns"],
            asked,
            shots=(0, 1, 2, 4, 8, 16),
            answers="texts",
            limit=200,
        )
        yield {"size": name, **row, "shots": {n: each.accuracy for n, each in found.items()}}


def instructions(output: Path, seed: int) -> Iterator[Row]:
    """Yields the loss on a held-out task before and after tuning on instructions for others."""
    tasks = output / "tasks.toml"
    tasks.parent.mkdir(parents=True, exist_ok=True)
    tasks.write_text(TASKS)
    for width in (16, 32, 64, 128):
        settings = {"model.d_model": width, "model.num_layers": 2, "sample_prompt": None}
        settings |= {"data.tokenizer.vocab_size": 1024, "model.num_heads": 2}
        base = output / f"base-{width}-{seed}"
        row = finished(train.recipe("quickstart", steps=60, seed=seed, **settings), base)
        config = train.recipe(
            "sft",
            steps=40,
            seed=seed,
            init_from=str(base),
            **{"data.source": f"instructions:{tasks}", "data.hold_out": ("sums",)},
        )
        tuned = output / f"tuned-{width}-{seed}"
        finished(config, tuned)
        losses = [scores["loss"] for scores in read_metrics(tuned, "validation")]
        yield {**row, "held_out_before": losses[0], "held_out_after": losses[-1]}


def bert(output: Path, seed: int) -> Iterator[Row]:
    """Yields the scores of a BERT, and of classifiers that begin from it, by what it learns from.

    Without unchanged tokens, a tenth of the predicted tokens that would stay are masked instead.
    """
    for name in ("as published", "no unchanged tokens", "no next sentences"):
        settings = {"data.next_sentence": name != "no next sentences", "sample_prompt": None}
        folder = output / f"bert-{name.replace(' ', '-')}-{seed}"
        with pytest.MonkeyPatch.context() as patch:
            if name == "no unchanged tokens":
                patch.setattr(masking, "_MASKED", 0.9)
                patch.setattr(masking, "_RANDOM", 1.0)
            row = finished(
                train.recipe("bert-quickstart", steps=250, batch_size=32, seed=seed, **settings),
                folder,
            )
        # All variants are scored with the published masks, and by a classifier of reviews.
        classifier = train.recipe(
            "bert-classify",
            steps=60,
            seed=seed,
            init_from=str(folder),
            **{"data.source": "builtin:reviews"},
        )
        found = finished(classifier, folder.with_name(f"{folder.name}-reviews"))
        yield {"bert": name, **row, **train.score_run(folder), "reviews": found["accuracy"]}


EXPERIMENTS = {one.__name__: one for one in (encoder, counter, shots, instructions, bert)}


def main() -> None:
    """Runs one experiment and prints its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for row in EXPERIMENTS[options.experiment](options.output, seed):
            print(json.dumps({"seed": seed, **row}, default=float), flush=True)


if __name__ == "__main__":
    main()
