"""Time how fast prepared examples are read into batches, as `flaxzoo train` reads them.

    flaxzoo prepare 'text:books/*.txt#block' OUT --tokenizer TOKENIZER --length 1024
    python tests/benchmarks/prepared.py OUT [--batch-size 64] [--seconds 10] [--num-workers 0]

Examples are drawn from all shards at random. Prints one JSON line: "median" is the median over
rounds of the tokens per second of one process, without padding. "per_cpu_second", given without
workers, divides by the CPU time of the process, for machines that others use as well.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

from flaxzoo import data
from flaxzoo.data.prepared.read_shards import SPLITS, prepared_split, prepared_tokenizer


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second, round by round, after one second of warm-up."""
    source = f"prepared:{arguments.folder}"
    split = prepared_split(source, SPLITS[:1], prepared_tokenizer(source), {})
    batches = data.train_iterator(
        split.examples,
        batch_size=arguments.batch_size,
        seed=0,
        num_steps=1 << 31,
        num_workers=arguments.num_workers,
    )
    read(batches, 1.0)
    cpu_start = time.process_time()
    rates = [read(batches, arguments.seconds) for _ in range(arguments.rounds)]
    cpu_seconds = time.process_time() - cpu_start
    batches.close()
    result = {
        "data": split.summary,
        "length": next(iter(split.examples.example(0, 0).values())).shape[0],
        "cores": len(os.sched_getaffinity(0)),
        "median": round(statistics.median(rates)),
        "rounds": [round(rate) for rate in rates],
    }
    if not arguments.num_workers:
        result["per_cpu_second"] = round(sum(rates) * arguments.seconds / cpu_seconds)
    return result


def read(batches: data.BatchIterator, seconds: float) -> float:
    """Read batches for a while and return tokens per second."""
    tokens, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        tokens += int((next(batches)["segment_ids"] > 0).sum())
    return tokens / passed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=0)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
