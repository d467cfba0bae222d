"""Which loads a folder faster, flaxzoo or transformers? Both in turns, on one machine.

    python tests/benchmarks/loading.py FOLDER [--rounds 8]

FOLDER is in Hugging Face's form. "first" is the first load of a process, its imports not counted;
"again" the ones after it, in a process for each. transformers maps the file and reads nothing, so
"used" is the time until every number was looked at once. Prints one JSON line of seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PEERS = ("flaxzoo", "transformers")


def ours(folder: str) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """How flaxzoo loads, and how all that it loaded is looked at."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from flaxzoo import models

    def load() -> Any:
        return jax.block_until_ready(models.load(folder)[1])

    return load, lambda params: sum(float(np.asarray(x).sum()) for x in jax.tree.leaves(params))


def theirs(folder: str) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """How transformers loads, and how all that it loaded is looked at."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(os.path.join(folder, "config.json")) as file:
        cls = getattr(transformers, json.load(file)["architectures"][0])

    def look(model: Any) -> float:
        return sum(float(x.detach().sum()) for x in model.parameters())

    return lambda: cls.from_pretrained(folder), look


def serve(peer: str, folder: str) -> None:
    """Loads once for every line that comes in, and prints the two times."""
    load, look = (ours if peer == "flaxzoo" else theirs)(folder)
    for _ in sys.stdin:
        start = time.perf_counter()
        loaded = load()
        middle = time.perf_counter()
        look(loaded)
        print(json.dumps([middle - start, time.perf_counter() - start]), flush=True)
        del loaded


class Peer:
    """A process that loads when it is told to."""

    def __init__(self, name: str, folder: str) -> None:
        command = [sys.executable, __file__, folder, "--serve", name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def load(self) -> tuple[float, float]:
        """Seconds until it has loaded, and until all of it was looked at."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        loaded, used = json.loads(self.process.stdout.readline())
        return loaded, used

    def end(self) -> None:
        """Waits until it is gone."""
        self.process.communicate()


def measure(folder: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each kind and peer, round by round."""
    kinds = ("first", "first, used", "again", "again, used")
    seconds: dict[str, dict[str, list[float]]] = {kind: {p: [] for p in PEERS} for kind in kinds}

    def note(kind: str, name: str, peer: Peer) -> None:
        loaded, used = peer.load()
        seconds[kind][name].append(loaded)
        seconds[f"{kind}, used"][name].append(used)

    for _ in range(rounds):
        for name in PEERS:
            peer = Peer(name, folder)
            note("first", name, peer)
            peer.end()
    peers = {name: Peer(name, folder) for name in PEERS}
    for peer in peers.values():
        peer.load()
    for _ in range(rounds):
        for name, peer in peers.items():
            note("again", name, peer)
    for peer in peers.values():
        peer.end()
    return seconds


def report(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Median and minimum of both, and the ratio of ours to theirs."""
    found: dict[str, Any] = {}
    for name, of in {"median": statistics.median, "min": min}.items():
        values = {peer: of(times) for peer, times in seconds.items()}
        found[name] = {peer: round(value, 4) for peer, value in values.items()}
        found[name]["ratio"] = round(values["flaxzoo"] / values["transformers"], 2)
    return found


def main() -> None:
    """Measures both."""
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
