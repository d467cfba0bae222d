"""How a train step grows: with depth, with length, and over virtual devices.

    python tests/benchmarks/scaling.py OUTPUT [--curves depth length devices] [--rounds 2]

Each point is a process of its own without a compilation cache; of several rounds the least time
is kept, for a shared machine only ever adds to it. Prints a table; OUTPUT gets a plot (PNG) of
each curve, and the figures as scaling.json. All steps of a curve have as many tokens, so that a
flat line is what costs nothing more.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Point:
    """A tiny GPT's train step."""

    curve: str
    x: int
    """What the curve runs over."""
    depth: int = 2
    tokens: int = 2048
    length: int = 256
    devices: int = 1
    axis: str = "data"
    steps: int = 3


@dataclasses.dataclass(frozen=True)
class Curve:
    """A plot."""

    title: str
    xs: str
    points: tuple[Point, ...]
    shown: tuple[str, ...]
    """Which of `MEASURES` it shows."""


MEASURES = {
    "trace": "tracing, s",
    "compile": "compiling, s",
    "step": "a step, s",
    "memory": "peak of a device, MiB",
}

CURVES = {
    "depth": Curve(
        "Compiling a scanned stack",
        "layers",
        tuple(Point("depth", d, depth=d, tokens=512, steps=1) for d in (6, 12, 24, 48, 96)),
        ("trace", "compile"),
    ),
    "length": Curve(
        "The same tokens in longer rows",
        "length",
        tuple(Point("length", t, tokens=8192, length=t) for t in (512, 1024, 2048, 4096, 8192)),
        ("step", "memory"),
    ),
    "devices": Curve(
        "The same step over virtual devices of the same cores",
        "devices",
        tuple(
            Point(f"devices ({axis})", n, devices=n, axis=axis)
            for axis in ("data", "fsdp")
            for n in (1, 2, 4, 8)
        ),
        ("step", "memory"),
    ),
}


def measure(point: Point) -> dict[str, float]:
    """In this process, which has the devices."""
    from flaxzoo import models, train
    from flaxzoo.data import CausalLMData, TokenizerConfig
    from flaxzoo.train.plan.bench import bench

    config = train.TrainConfig(
        model=models.GPTConfig(
            vocab_size=512,
            max_length=point.length,
            num_layers=point.depth,
            d_model=64,
            num_heads=1,
        ),
        data=CausalLMData(
            source="made up", length=point.length, tokenizer=TokenizerConfig(vocab_size=512)
        ),
        optimizer=train.OptimizerConfig(peak_learning_rate=1e-3),
        mesh=train.MeshConfig(**{"data": 1, point.axis: point.devices}),
        steps=100,
        batch_size=point.tokens // point.length,
    )
    measured = bench(config, timed_steps=point.steps)
    return {
        "trace": measured.trace_seconds,
        "compile": measured.compile_seconds,
        "step": min(measured.seconds),
        "memory": measured.peak_bytes / 2**20,
    }


def ask(point: Point) -> dict[str, float]:
    """The figures, from a process of their own."""
    flags = f"--xla_force_host_platform_device_count={point.devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, "--point", json.dumps(dataclasses.asdict(point))]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def least(points: tuple[Point, ...], rounds: int) -> list[dict[str, Any]]:
    """The least of each figure; a round takes all points, for others come and go meanwhile."""
    answers = [[ask(point) for point in points] for _ in range(rounds)]
    return [
        {
            "curve": point.curve,
            "x": point.x,
            **{name: min(answer[name] for answer in own) for name in MEASURES},
        }
        for point, own in zip(points, zip(*answers, strict=True), strict=True)
    ]


def plot(curve: Curve, rows: list[dict[str, Any]], file: Path) -> None:
    """Each measure in a picture of its own, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(curve.shown), figsize=(10, 4), layout="constrained")
    for place, name in zip(places, curve.shown, strict=True):
        for line in dict.fromkeys(row["curve"] for row in rows):
            own = [row for row in rows if row["curve"] == line]
            place.plot([r["x"] for r in own], [r[name] for r in own], "o-", label=line)
        place.set_xscale("log", base=2)
        place.set_ylim(bottom=0)
        place.set(xlabel=curve.xs, ylabel=MEASURES[name])
        place.legend()
    figure.suptitle(curve.title)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="How a train step grows.")
    parser.add_argument("output", type=Path, nargs="?", default=Path("scaling"))
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(measure(Point(**json.loads(arguments.point)))))
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    print(f"{'curve':<15} {'':>6}" + "".join(f"{what:>24}" for what in MEASURES.values()))
    for name in arguments.curves:
        found[name] = least(CURVES[name].points, arguments.rounds)
        for row in found[name]:
            figures = "".join(f"{row[measure]:>24.2f}" for measure in MEASURES)
            print(f"{row['curve']:<15} {row['x']:>6}{figures}", flush=True)
        plot(CURVES[name], found[name], arguments.output / f"{name}.png")
    (arguments.output / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
