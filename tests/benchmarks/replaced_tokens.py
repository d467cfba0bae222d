"""Compare replaced-token detection with masked tokens at equal steps, on a downstream task.

    FLAXZOO_DATASETS=FOLDER python tests/benchmarks/replaced_tokens.py --output runs/compare \
        [--task tag] [--steps 400] [--length 32] [--seeds 3] [--source SOURCE]

Two ELECTRAs of the same sizes read the same batches of the Brown corpus: one predicts the masked
tokens, one finds the tokens that a generator of a quarter of the width replaced. Each is then
fine-tuned with the same settings, and so are random parameters: to tag CoNLL-2003 (tag), or to
classify phrases of SST-2 (classify). Prints the validation score of each seed, and the mean and the
standard deviation over the seeds. Finished runs in the output folder are not repeated. The default
sizes (texts of 32 tokens, 400 steps of 64 texts, 200 steps of fine-tuning) take about half an hour
of one CPU core.
"""

import argparse
import dataclasses
import os
import statistics
import time
from pathlib import Path

from flaxzoo import train
from flaxzoo.train.config import TrainConfig
from flaxzoo.train.objectives.masked_lm import MaskedLMConfig
from flaxzoo.train.recipes import recipe

TASKS = {
    "tag": (
        "bert-tag",
        "conll:{}/ner/conll2003.eng.train.gz",
        "conll:{}/ner/conll2003.eng.testa.gz",
        "f1",
    ),
    "classify": (
        "bert-classify",
        "tsv:{}/cls/sst2_phrases.train.tsv.gz",
        "tsv:{}/cls/sst2.dev.tsv.gz",
        "accuracy",
    ),
}
"""Task → recipe, training data, validation data, score."""
OBJECTIVES = ("masked", "replaced", "random")


def pretraining(objective: str, options: argparse.Namespace, seed: int) -> TrainConfig:
    """Return the settings of a pretraining run."""
    config = recipe("electra-quickstart")
    vocabulary = dataclasses.replace(config.data.tokenizer, vocab_size=8192)
    data = dataclasses.replace(
        config.data, source=options.source, length=options.length, tokenizer=vocabulary
    )
    # Random parameters are those before the first step.
    steps = 1 if objective == "random" else options.steps
    rate = 1e-12 if objective == "random" else config.optimizer.peak_learning_rate
    config = dataclasses.replace(
        config,
        data=data,
        optimizer=dataclasses.replace(config.optimizer, peak_learning_rate=rate),
        steps=steps,
        seed=seed,
        evaluate_every=steps,
        checkpoint_every=steps,
    )
    if objective == "replaced":
        return config
    model = config.model.with_head("masked_lm", ())
    return dataclasses.replace(config, model=model, objective=MaskedLMConfig())


def finetuning(options: argparse.Namespace, init_from: Path, seed: int) -> TrainConfig:
    """Return the settings of a fine-tuning run."""
    name, source, validation, _ = TASKS[options.task]
    config, folder = recipe(name), os.environ["FLAXZOO_DATASETS"]
    data = dataclasses.replace(
        config.data,
        source=source.format(folder),
        validation=validation.format(folder),
        length=options.length,
    )
    return dataclasses.replace(
        config, data=data, init_from=str(init_from), seed=seed, steps=options.task_steps, epochs=0.0
    )


def run(config: TrainConfig, folder: Path) -> dict[str, float]:
    """Return the validation scores of a run, which is trained unless it is finished."""
    start = time.perf_counter()
    result = train.train(config, folder, quiet=True)
    print(f"{folder}: {time.perf_counter() - start:.0f} s", flush=True)
    assert result.validation is not None
    return dict(result.validation)


def main() -> None:
    """Trains and prints."""
    datasets = os.environ["FLAXZOO_DATASETS"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="tag")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=32, help="tokens in a text")
    parser.add_argument("--task-steps", type=int, default=200, help="fine-tuning steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--source", default=f"text:{datasets}/docs/brown.train.txt.gz#sentences")
    options = parser.parse_args()

    metric, scores = TASKS[options.task][-1], {name: [] for name in OBJECTIVES}
    for seed in range(options.seeds):
        for name in OBJECTIVES:
            config = pretraining(name, options, seed)
            first = options.output / f"{name}-{config.steps}-{seed}"
            run(config, first)
            folder = first.with_name(f"{first.name}-{options.task}-{options.task_steps}")
            scores[name].append(run(finetuning(options, first, seed), folder)[metric])
            print(f"seed {seed}, {name}: {metric} {scores[name][-1]:.4f}", flush=True)
    print(
        f"\n| pretraining, {options.steps} steps | {metric} of {options.seeds} seeds | mean | std |"
    )
    print("| --- | --- | --- | --- |")
    for name, found in scores.items():
        listed, spread = ", ".join(f"{x:.3f}" for x in found), statistics.pstdev(found)
        print(f"| {name} | {listed} | {statistics.mean(found):.3f} | {spread:.3f} |")


if __name__ == "__main__":
    main()
