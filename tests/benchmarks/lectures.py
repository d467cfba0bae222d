"""Repeat the experiments that the lectures describe, at sizes that take minutes on two CPU cores.

    python tests/benchmarks/lectures.py EXPERIMENT --output runs/lectures [--seeds 1]

encoder       A Transformer whose encoder sees only earlier tokens, against the usual one.
counter       Positions 1, 2, 3, … appended to the embeddings, trained at 1,000, read to 5,000.
shots         Accuracy by the number of examples in the prompt, for four sizes.
instructions  Accuracy on tasks that were held out of instruction tuning, for four sizes.
refusals      Refusals of a tuned model, by the number of solved examples before the request.
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

LETTERS = "abcdefgh"
ORDERS = {
    "copy": (0, 1, 2),
    "reverse": (2, 1, 0),
    "rotate": (1, 2, 0),
    "swap": (1, 0, 2),
    "first": (0,),
    "last": (2,),
}
"""For each order, the indices of the letters that an answer takes from a word of three letters."""
MARKS = {
    "plain": "{}",
    "brackets": "[ {} ]",
    "quotes": '" {} "',
    "stars": "* {} *",
    "plus": "+ {}",
    "point": "{} .",
}
"""The characters around the letters of an answer."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of `instructions`, which consists of an order and marks, each with a name."""

    order: str
    marks: str

    def answer(self, word: str) -> str:
        """Returns the answer, such as `[ c b a ]` for `abc`."""
        return MARKS[self.marks].format(" ".join(word[i] for i in ORDERS[self.order]))

    def line(self, word: str) -> str:
        """Returns a solved example, which does not name the task."""
        return f"{self.query(word)} {self.answer(word)}\n"

    @staticmethod
    def query(word: str) -> str:
        """Returns a query without an instruction."""
        return f" {' '.join(word)} >"

    def instruction(self, word: str) -> str:
        """Returns a query that names the task."""
        return f" {self.order} with {self.marks} :{self.query(word)}"


HELD_OUT = [Task(*names) for names in zip(ORDERS, MARKS, strict=True)]
"""The tasks that have no instructions in training. Other tasks have the same orders and marks."""
TASKS = [
    task for order in ORDERS for marks in MARKS if (task := Task(order, marks)) not in HELD_OUT
]
"""The tasks with instructions in training."""
COPIES = [Task("copy", marks) for marks in MARKS]
"""The tasks of `refusals`."""


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
        sizes: Row = {"num_layers": 1, "d_model": 32, "num_heads": 2, "max_length": 1000}
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
    """Yields the accuracy on tasks that were held out of tuning, before and after it."""
    for name, (num_layers, d_model) in SIZES.items():
        settings = {"model.num_layers": num_layers, "model.d_model": d_model}
        base, row = _untuned(output, f"{name}-{seed}", seed, TASKS + HELD_OUT, settings)
        rng = np.random.default_rng(seed)
        rows = [
            {"prompt": task.instruction(word), "completion": f" {task.answer(word)}"}
            for task in TASKS
            for word in _words(rng, 200)
        ]
        tuned = _tuned(base, rows, seed, steps=400)
        accuracies = {
            "untuned, 6 examples": _accuracy(base, HELD_OUT, shots=6),
            "untuned": _accuracy(base, HELD_OUT),
            "tuned": _accuracy(tuned, HELD_OUT),
            "tuned, trained tasks": _accuracy(tuned, TASKS),
        }
        yield {"size": name, **row, **accuracies}


def refusals(output: Path, seed: int) -> Iterator[Row]:
    """Yields how often a forbidden request is refused, by the number of examples before it.

    Tuning teaches the model to refuse words that begin with h. As in Ouyang et al. 2022, the model
    also reads text of the first kind during tuning. This text is solved examples, none of which has
    a forbidden word.
    """
    settings = {"model.num_layers": 2, "model.d_model": 64}
    base, row = _untuned(output, f"refusals-{seed}", seed, COPIES, settings)
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for i in range(3000):
        task = COPIES[i % len(COPIES)]
        word, *others = _allowed(rng, 2 + i % 6)
        query = _examples(task, others) + task.query(word)
        rows.append({"prompt": query, "completion": f" {task.answer(word)}"})
        rows.append({"prompt": task.instruction(word), "completion": f" {task.answer(word)}"})
        forbidden = _forbidden(word)
        query = task.instruction(forbidden) if i % 2 else task.query(forbidden)
        rows.append({"prompt": query, "completion": " no"})
    tuned = _tuned(base, [rows[i] for i in rng.permutation(len(rows))], seed, steps=400)
    words = _allowed(rng, 120)
    tasks = COPIES * (len(words) // len(COPIES))
    answers = _generated(tuned, [t.instruction(w) for t, w in zip(tasks, words, strict=True)])
    yield {**row, "allowed": _share(answers, [*map(Task.answer, tasks, words)])}
    words = [*map(_forbidden, words)]
    for shots in (0, 1, 2, 4, 6):
        prompts = [
            _examples(task, _allowed(rng, shots)) + task.query(word)
            for task, word in zip(tasks, words, strict=True)
        ]
        answers = _generated(tuned, prompts)
        refused = _share(answers, ["no"] * len(words))
        answered = _share(answers, [*map(Task.answer, tasks, words)])
        yield {"examples": shots, "refused": refused, "answered": answered}


def _allowed(rng: np.random.Generator, number: int) -> list[str]:
    """Draws words that do not begin with h."""
    return [rng.choice([*LETTERS[:-1]]) + word[1:] for word in _words(rng, number)]


def _forbidden(word: str) -> str:
    """Returns the word with an h in place of its first letter."""
    return f"h{word[1:]}"


def _examples(task: Task, words: list[str]) -> str:
    """Returns a solved example for each word."""
    return "".join(map(task.line, words))


def _share(found: list[str], expected: list[str]) -> float:
    """Returns the share of texts that are as expected."""
    return float(np.mean([a == b for a, b in zip(found, expected, strict=True)]))


def _words(rng: np.random.Generator, number: int) -> list[str]:
    """Draws words of three letters."""
    return ["".join(word) for word in rng.choice([*LETTERS], (number, 3))]


def _untuned(
    output: Path, name: str, seed: int, tasks: list[Task], settings: Row
) -> tuple[Path, Row]:
    """Trains on solved examples of tasks, without instructions.

    The text also has the words of the instructions in random order, so that they become tokens.

    Returns:
      The folder of the run, and its measurements.
    """
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(8000):
        task = tasks[rng.integers(len(tasks))]
        texts.append(_examples(task, _words(rng, 8)))
    texts += [f" {' '.join(rng.choice([*ORDERS, *MARKS, 'with', ':'], 40))}\n" for _ in range(400)]
    file = output / f"examples-{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = settings | {
        "model.max_length": 128,
        "data.source": f"jsonl:{file}#text",
        "data.validation_fraction": 0.01,
        "data.length": 128,
        "data.tokenizer.kind": "byte-bpe",
        "data.tokenizer.vocab_size": 315,
    }
    steps = {"steps": 600, "evaluate_every": 600, "checkpoint_every": 600, "sample_prompt": None}
    config = train.recipe("in-context", batch_size=16, seed=seed, **steps, **settings)
    folder = output / f"untuned-{name}"
    return folder, finished(config, folder)


def _tuned(base: Path, rows: list[Row], seed: int, steps: int) -> Path:
    """Trains an untuned run on prompts and completions, unless it is finished."""
    config = train.recipe("sft", steps=steps, seed=seed, init_from=str(base), sample_prompt=None)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, source=rows),
        evaluate_every=steps,
        checkpoint_every=steps,
    )
    folder = base.with_name(base.name.replace("untuned", "tuned"))
    finished(config, folder)
    return folder


def _accuracy(run: Path, tasks: list[Task], shots: int = 0) -> float:
    """Returns the share of correct answers to instructions, or to queries after examples."""
    rng, prompts, answers = np.random.default_rng(99), [], []
    for task in tasks * (120 // len(tasks)):
        *examples, word = _words(rng, shots + 1)
        query = task.query(word) if shots else task.instruction(word)
        prompts.append(_examples(task, examples) + query)
        answers.append(task.answer(word))
    return _share(_generated(run, prompts), answers)


def _generated(run: Path, prompts: list[str]) -> list[str]:
    """Returns the most probable continuation of each prompt, up to the end of its line."""
    texts = models.TextGenerator.of_run(run)(
        prompts, do_sample=False, max_new_tokens=8, stop_strings=["\n"], log=lambda line: None
    )
    return [each.text.strip() for each in texts]


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


EXPERIMENTS = {one.__name__: one for one in (encoder, counter, shots, instructions, refusals, bert)}


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
