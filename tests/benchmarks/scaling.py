"""Measure how a train step grows with depth, with length, and with virtual devices.

    python tests/benchmarks/scaling.py OUTPUT [--curves depth length devices] [--rounds 2]

Each point is measured in a process of its own without a compilation cache. The minimum of several
rounds is kept, because other work on a shared machine only adds to a time. Prints a table, and
writes a plot (PNG) of each curve and all figures (scaling.json) to the folder OUTPUT. All steps of
a curve have the same number of tokens, so a flat line means that growth costs nothing.
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
    """A point of a curve: the train step of a tiny GPT."""

    curve: str
    x: int
    """The value of the quantity that the curve varies."""
    depth: int = 2
    tokens: int = 2048
    length: int = 256
    devices: int = 1
    axis: str = "data"
    steps: int = 3


@dataclasses.dataclass(frozen=True)
class Curve:
    """A plot of some measures over one quantity."""

    title: str
    x_label: str
    points: tuple[Point, ...]
    measures: tuple[str, ...]
    """Names of `MEASURES`, each with axes of its own."""


MEASURES = {
    "trace": "trace, s",
    "compile": "compile, s",
    "step": "step, s",
    "memory": "peak per device, MiB",
}

CURVES = {
    "depth": Curve(
        "Compiling a scanned stack",
        "layers",
        tuple(Point("depth", d, depth=d, tokens=512, steps=1) for d in (6, 12, 24, 48, 96)),
        ("trace", "compile"),
    ),
    "length": Curve(
        "The same tokens in longer sequences",
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
    """Measure a point in this process, which has the devices."""
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
            source="synthetic", length=point.length, tokenizer=TokenizerConfig(vocab_size=512)
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


def measure_in_process(point: Point) -> dict[str, float]:
    """Measure a point in a process of its own."""
    flags = f"--xla_force_host_platform_device_count={point.devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, "--point", json.dumps(dataclasses.asdict(point))]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def minima(points: tuple[Point, ...], rounds: int) -> list[dict[str, Any]]:
    """Return the minimum of each figure over rounds, each of which measures all points in turn."""
    results = [[measure_in_process(point) for point in points] for _ in range(rounds)]
    return [
        {
            "curve": point.curve,
            "x": point.x,
            **{name: min(result[name] for result in own) for name in MEASURES},
        }
        for point, own in zip(points, zip(*results, strict=True), strict=True)
    ]


def plot(curve: Curve, rows: list[dict[str, Any]], file: Path) -> None:
    """Write a plot with the curve's measures side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(curve.measures), figsize=(10, 4), layout="constrained"
    )
    for axes, name in zip(all_axes, curve.measures, strict=True):
        for line in dict.fromkeys(row["curve"] for row in rows):
            own = [row for row in rows if row["curve"] == line]
            axes.plot([r["x"] for r in own], [r[name] for r in own], "o-", label=line)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set(xlabel=curve.x_label, ylabel=MEASURES[name])
        axes.legend()
    figure.suptitle(curve.title)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Measure the curves and write their plots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", default=Path("scaling"))
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(measure(Point(**json.loads(arguments.point)))))
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {}
    print(f"{'curve':<15} {'':>6}" + "".join(f"{label:>24}" for label in MEASURES.values()))
    for name in arguments.curves:
        results[name] = minima(CURVES[name].points, arguments.rounds)
        for row in results[name]:
            figures = "".join(f"{row[measure]:>24.2f}" for measure in MEASURES)
            print(f"{row['curve']:<15} {row['x']:>6}{figures}", flush=True)
        plot(CURVES[name], results[name], arguments.output / f"{name}.png")
    (arguments.output / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
