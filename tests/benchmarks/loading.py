"""Compare how fast flaxzoo and transformers load a model, in turns on one machine.

    python tests/benchmarks/loading.py FOLDER [--rounds 8]

FOLDER is in Hugging Face's format. Prints one JSON object, in seconds: "first" is the first load of
a process, without its imports, and "again" are later loads in one process each. transformers only
maps the file into memory, so "used" is the time until every parameter has been read once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEERS = ("flaxzoo", "transformers")


def load_flaxzoo(folder: str) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """Return a function that loads with flaxzoo, and one that reads every parameter."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from flaxzoo import models
    from flaxzoo.models.loading import model_config

    # Imported here, as the class of transformers is: names of `models` are imported when used.
    load_model = models.load
    models.create(model_config(Path(folder)))

    def load() -> Any:
        return jax.block_until_ready(load_model(folder)[1])

    return load, lambda params: sum(float(np.asarray(x).sum()) for x in jax.tree.leaves(params))


def load_transformers(folder: str) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """Return a function that loads with transformers, and one that reads every parameter."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(os.path.join(folder, "config.json")) as file:
        cls = getattr(transformers, json.load(file)["architectures"][0])

    def read(model: Any) -> float:
        return sum(float(x.detach().sum()) for x in model.parameters())

    return lambda: cls.from_pretrained(folder), read


def serve(peer: str, folder: str) -> None:
    """Load once for every line of standard input and print the two times."""
    load, read = (load_flaxzoo if peer == "flaxzoo" else load_transformers)(folder)
    for _ in sys.stdin:
        start = time.perf_counter()
        loaded = load()
        middle = time.perf_counter()
        read(loaded)
        print(json.dumps([middle - start, time.perf_counter() - start]), flush=True)
        del loaded


class Peer:
    """A process that loads a model on request."""

    def __init__(self, name: str, folder: str) -> None:
        command = [sys.executable, __file__, folder, "--serve", name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def load(self) -> tuple[float, float]:
        """Return the seconds until it has loaded, and until all parameters have been read."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        loaded, used = json.loads(self.process.stdout.readline())
        return loaded, used

    def end(self) -> None:
        """Wait until the process has ended."""
        self.process.communicate()


def measure(folder: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each kind and peer, round by round."""
    kinds = ("first", "first, used", "again", "again, used")
    seconds: dict[str, dict[str, list[float]]] = {kind: {p: [] for p in PEERS} for kind in kinds}

    def record(kind: str, name: str, peer: Peer) -> None:
        loaded, used = peer.load()
        seconds[kind][name].append(loaded)
        seconds[f"{kind}, used"][name].append(used)

    for _ in range(rounds):
        for name in PEERS:
            peer = Peer(name, folder)
            record("first", name, peer)
            peer.end()
    peers = {name: Peer(name, folder) for name in PEERS}
    for peer in peers.values():
        peer.load()
    for _ in range(rounds):
        for name, peer in peers.items():
            record("again", name, peer)
    for peer in peers.values():
        peer.end()
    return seconds


def report(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return median and minimum of both, and the ratio of flaxzoo to transformers."""
    result: dict[str, Any] = {}
    for name, statistic in {"median": statistics.median, "min": min}.items():
        values = {peer: statistic(times) for peer, times in seconds.items()}
        result[name] = {peer: round(value, 4) for peer, value in values.items()}
        result[name]["ratio"] = round(values["flaxzoo"] / values["transformers"], 2)
    return result


def main() -> None:
    """Measure both and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--serve", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.folder)
        return
    seconds = measure(arguments.folder, arguments.rounds)
    print(json.dumps({kind: report(times) for kind, times in seconds.items()}, indent=1))


if __name__ == "__main__":
    main()
