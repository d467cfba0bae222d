"""Time the scoring of prompts that share their examples: with sharing, without, and lm-eval's `hf`.

    python tests/benchmarks/prompting.py [--requests 200] [--shots 16] [--rounds 3] [--layers 12]

A model of GPT-2's sizes with random weights scores the labels of queries after the same examples.
The methods take turns in each round, after calls that compile. Prints the median and the least
time of each, the share of computed tokens that is padding, and the largest difference of a
log-probability from lm-eval's. The harness's own model runs in torch (`pip install
'flaxzoo[test]'`), on as many threads as there are cores, with `--batch-size` requests at a time.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

WORDS = "the small dog sleeps below a red house while we wait is it big or small yes or no".split()


def make_folder(folder: Path, layers: int, width: int) -> None:
    """Write a GPT-2 with random weights, and a vocabulary of a few words, for both libraries."""
    import torch
    import transformers
    from flaxzoo.data.tokenizers.training import TokenizerConfig, train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS) * 9], TokenizerConfig("byte-bpe", 300))
    end = tokenizer.special_ids.eos
    assert end is not None
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, bos_token_id=end, eos_token_id=end
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.export(folder, max_length=1024)


def draw_requests(number: int, shots: int) -> list[tuple[str, str]]:
    """Return prompts of the same examples and a query each, two labels for each of them."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=4))

    examples = "".join(
        f"Text: {text()}\nLabel: {draw.choice(['yes', 'no'])}\n" for _ in range(shots)
    )
    queries = [f"{examples}Text: {text()}\nLabel:" for _ in range(number // 2)]
    return [(query, label) for query in queries for label in (" yes", " no")]


def load() -> str:
    """Return the load of the machine over the last minute."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> None:
    """Time all methods in turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()

    from flaxzoo import train
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name), arguments.layers, arguments.width)
        device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        hf: Any = HFLM
        theirs = hf(
            pretrained=name, device=device, batch_size=arguments.batch_size, dtype="float32"
        )
        scorer = train.ContinuationScorer.of_run(name)
        pairs = draw_requests(arguments.requests, arguments.shots)
        instances = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        requests = [scorer.encode_pair(*pair) for pair in pairs]
        paddings: dict[str, float] = {}
        tokens = sum(len(context) + len(ids) - 1 for context, ids in requests)
        print(
            f"{len(pairs)} requests of {arguments.shots} shots, {tokens / len(pairs):.0f} tokens "
            f"each; {arguments.layers} layers of width {arguments.width}"
        )

        def ours(method: str) -> list[float]:
            scores = scorer.score(requests, share_prefixes=method == "shared prefix")
            counts = scorer.counts
            paddings[method] = counts.padding
            print(
                f"  {method}: {counts.given:,} tokens given, {counts.needed:,} needed, "
                f"{counts.computed:,} computed, {counts.padding:.1%} of them padding"
            )
            return [score.log_probability for score in scores]

        methods: dict[str, Callable[[str], list[float]]] = {
            "shared prefix": ours,
            "each by itself": ours,
            "lm-eval's hf": lambda _: [x for x, _ in theirs.loglikelihood(instances, True)],
        }
        for method in ("shared prefix", "each by itself"):
            ours(method)  # compiles
        theirs.loglikelihood(instances[: arguments.batch_size], True)
        results: dict[str, list[float]] = {}
        times: dict[str, list[float]] = {method: [] for method in methods}
        print(f"before: {load()}")
        for _ in range(arguments.rounds):
            for method, run in methods.items():
                start = time.perf_counter()
                results[method] = run(method)
                times[method].append(time.perf_counter() - start)
        print(f"after: {load()}")
        expected = np.asarray(results["lm-eval's hf"])
        shared = statistics.median(times["shared prefix"])
        for method, seconds in times.items():
            median = statistics.median(seconds)
            difference = np.abs(np.asarray(results[method]) - expected).max()
            print(
                f"{method:<15} median {median:8.2f} s, least {min(seconds):8.2f} s, "
                f"{median / shared:6.1f} times that of the shared prefix, "
                f"farthest from hf {difference:.1e}"
            )


if __name__ == "__main__":
    main()
