"""Measure how soon flaxzoo starts, beside the goals.

    python tests/benchmarks/startup.py [--runs 7] [--cold-runs 3] [--only HELP …]

Prints a line for each case: minimum and median of the seconds by the clock, the median of the
seconds of computing (all threads, user and system), and the goal. Modules are read as bytecode, as
an installed package has it, and every case runs once before it is measured; "cold" has an empty
cache of vocabularies, tokens and compiled programs in each run. The clock counts only on an idle
machine, so the load is printed before and after.
"""

import argparse
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAXZOO = (sys.executable, "-m", "flaxzoo")
# One step; the recipe's warm-up is longer than that.
QUICKSTART = (*FLAXZOO, *"train quickstart --steps 1 --optimizer.warmup-steps 0".split())


@dataclasses.dataclass(frozen=True)
class Case:
    """A command, and when it counts as started."""

    name: str
    command: tuple[str, ...]
    goal: float | None
    """Seconds; None for what is only compared with."""
    until: str | None = None
    """The beginning of the line of standard error with which the time ends; None: at its end."""
    is_cold: bool = False
    """Whether every run has an empty cache."""


CASES = (
    Case("flaxzoo --help", (*FLAXZOO, "--help"), 0.7),
    Case("flaxzoo generate --help", (*FLAXZOO, "generate", "--help"), 0.7),
    Case("import jax, flax.linen", (sys.executable, "-c", "import jax, flax.linen"), None),
    Case(
        "models.GPTConfig, models.create",
        (sys.executable, "-c", "from flaxzoo import models; models.create(models.preset('gpt2'))"),
        1.5,
    ),
    Case("flaxzoo train quickstart --help", (*FLAXZOO, "train", "quickstart", "--help"), 1.0),
    Case("quickstart, first step, cached", QUICKSTART, 5.0, until="step 1 of 1"),
    Case("quickstart, first step, cold", QUICKSTART, 15.0, until="step 1 of 1", is_cold=True),
)


def run(case: Case, folder: Path) -> tuple[float, float]:
    """Run a case once; return the seconds by the clock and those of computing.

    Args:
      case: What to run.
      folder: For the cache, and for run folders.

    Raises:
      SystemExit: The command failed.
    """
    cache = tempfile.mkdtemp(dir=folder) if case.is_cold else str(folder / "cache")
    environment = {
        **{name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "FLAXZOO_CACHE": cache,
        "JAX_PLATFORMS": "cpu",
    }
    workdir = () if case.until is None else ("--workdir", tempfile.mkdtemp(dir=folder))
    start = time.perf_counter()
    process = subprocess.Popen(
        [*case.command, *workdir],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A group of its own, which is ended with all that it started.
        start_new_session=True,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if case.until is not None and line.startswith(case.until):
            break
    is_reached = case.until is not None and bool(lines) and lines[-1].startswith(case.until)
    seconds = time.perf_counter() - start
    if is_reached:
        os.killpg(process.pid, signal.SIGKILL)
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = seconds if is_reached else time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if not is_reached and (process.returncode or case.until is not None):
        raise SystemExit(f"{' '.join(case.command)} failed:\n{''.join(lines)}")
    return seconds, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--cold-runs", type=int, default=3)
    parser.add_argument("--only", default="", help="measure the cases whose names contain this")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'case':<34} {'min':>7} {'median':>7} {'computing':>10} {'goal':>6}")
    with tempfile.TemporaryDirectory() as name:
        for case in CASES:
            if arguments.only not in case.name:
                continue
            if not case.is_cold:
                run(case, Path(name))
            number = arguments.cold_runs if case.is_cold else arguments.runs
            seconds, computing = zip(*(run(case, Path(name)) for _ in range(number)), strict=True)
            goal = "" if case.goal is None else f"{case.goal:.1f}"
            print(
                f"{case.name:<34} {min(seconds):7.2f} {statistics.median(seconds):7.2f} "
                f"{statistics.median(computing):10.2f} {goal:>6}",
                flush=True,
            )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
