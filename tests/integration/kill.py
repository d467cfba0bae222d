"""Kills training processes with `kill -9` at random moments, and checks that nothing is lost.

    python tests/integration/kill.py [--kills 100] [--kills-per-run 4] [--seed 0]
                                     [--steps 30] [--objectives causal translation …]

First, a run of each objective is trained without interruption. Then the same run is trained in
another folder by processes that are killed: while they start, while they train, or when a
half-written checkpoint appears. `MOMENTS` has the share of each moment. A killed run is started
again, and after a few kills it may finish. It must end with the metrics, the parameters and the
optimizer state of the uninterrupted run, bit for bit, and no complete checkpoint may be lost.

Prints one line of JSON at the end or after Ctrl-C: `killed`, `during_save` (a half-written
checkpoint remained), `resumed` (kills of runs that ended correctly), `lost` (kills of all others),
and the number of kills by objective, `by_objective`, and by moment, `by_moment`. Progress goes to
standard error. The status is 1 if anything is lost.

Processes are forked from one that has imported everything and computed nothing, which is faster
than starting them. All files are deleted at the end.
"""

import argparse
import collections
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

SCRATCH = Path(tempfile.mkdtemp(prefix="flaxzoo-kill-"))
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1",
    "FLAXZOO_CACHE": str(SCRATCH / "cache"),
    "JAX_COMPILATION_CACHE_DIR": str(SCRATCH / "xla"),  # a killed process leaves half an entry
}
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import matplotlib.backends.backend_agg  # noqa: E402  (else imported in each run)
import matplotlib.figure  # noqa: E402, F401
import sentencepiece  # noqa: E402, F401
import tensorboardX.summary  # noqa: E402, F401
import tokenizers  # noqa: E402, F401
from flaxzoo.data.sources.tfds import local_dataset  # noqa: E402, F401
from flaxzoo.models.run_files import steps  # noqa: E402
from flaxzoo.train.engine import train as training  # noqa: E402
from support.objective_runs import RUNS, write_sources  # noqa: E402
from support.run_folders import assert_same, everything, lines  # noqa: E402

MOMENTS = ("start", "training", "save", "save", "training", "save", "training", "save")
"""A process is killed before its first step, after some steps, within a save: in random order."""
LONGEST = 300.0
"""Seconds after which a process that shows no sign of life is taken for hanging."""

PROCESSES = multiprocessing.get_context("fork")


def forked(task, *arguments):
    """A process of its own that does something; this one must not compute."""
    process = PROCESSES.Process(target=task, args=arguments, daemon=True)
    process.start()
    return process


def ended(process):
    """Whether a process ends by itself, and well."""
    process.join(LONGEST)
    return process.exitcode == 0


def train(config, folder):
    training.train(config, folder, quiet=True)


def train_all(runs):
    """Trains runs in one process, which is quicker than in one each."""
    for config, folder in runs:
        train(config, folder)


def end_alike(config, ours, whole):
    """Trains a run to its end, which must be that of another."""
    train(config, ours)
    assert lines(ours) == lines(whole)
    assert_same(everything(ours, config.steps), everything(whole, config.steps))


def half_written(folder):
    """Whether there is a checkpoint without its final name."""
    return any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def wait_for(happened, process):
    """Waits until something happened, or the process ended, or hangs."""
    deadline = time.monotonic() + LONGEST
    while not happened() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)


def moments(draw):
    """The moments to kill at, without end."""
    while True:
        yield from draw.sample(MOMENTS, len(MOMENTS))


def kill(process, folder, moment, last, draw):
    """Kills a process; answers the moment and what was on disk, or None if it had ended."""
    before = max(steps(folder), default=0)
    if moment == "start":
        time.sleep(draw.uniform(0.0, 2.0))
    else:
        # It has been taken up, and goes on by a few checkpoints at most.
        further = before + draw.randint(0, last // 4)
        wait_for(lambda: max(steps(folder), default=0) > further, process)
        if moment == "save":
            wait_for(lambda: half_written(folder), process)
            time.sleep(draw.choice((0.0, draw.uniform(0.0, 0.2))))
        else:
            time.sleep(draw.uniform(0.0, 0.2))
    if not process.is_alive():
        return None
    process.kill()
    process.join()
    return moment, half_written(folder), steps(folder)


def killed_run(config, ours, whole, kills, at, draw):
    """Trains a run with at most so many kills; answers what each was, and whether all went well."""
    killed, well = [], True
    while len(killed) < kills:
        process = forked(train, config, ours)
        outcome = kill(process, ours, next(at), config.steps, draw)
        if outcome is None:  # it was quicker
            well &= ended(process)
            break
        killed.append(outcome)
    well &= ended(forked(end_alike, config, ours, whole))
    newest = [max(kept, default=0) for _, _, kept in killed]
    return killed, well and newest == sorted(newest)


def killed_objective(name, run, kills, at, draw):
    """Kills a run of an objective so many times at most; answers what `main` counts."""
    ours = SCRATCH / "ours"
    killed, well = killed_run(run[0], ours, run[1], kills, at, draw)
    shutil.rmtree(ours)
    moments = ", ".join(
        f"{moment}{' (half a checkpoint)' if half else ''} at {max(kept, default=0)}"
        for moment, half, kept in killed
    )
    print(f"{name}: {'same' if well else 'LOST'} after {moments}", file=sys.stderr, flush=True)
    counted = collections.Counter(
        {
            "killed": len(killed),
            "during_save": sum(half for _, half, _ in killed),
            "resumed" if well else "lost": len(killed),
        }
    )
    return counted, collections.Counter(moment for moment, _, _ in killed)


def read_arguments():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-per-run", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--objectives", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = read_arguments()
    gc.set_threshold(100_000, 50, 100)  # as in conftest.py
    draw = random.Random(options.seed)
    at = moments(draw)
    write_sources(SCRATCH)
    fields = {"steps": options.steps, "log_every": 1, "checkpoint_every": 2}
    runs = {n: (RUNS[n](SCRATCH, **fields), SCRATCH / f"whole-{n}") for n in options.objectives}
    if not ended(forked(train_all, list(runs.values()))):
        raise SystemExit("the uninterrupted runs did not end")
    count, by_objective, by_moment = (collections.Counter() for _ in range(3))
    names = itertools.cycle(options.objectives)
    name = next(names)
    with contextlib.suppress(KeyboardInterrupt):
        while count["killed"] < options.kills:
            kills = min(options.kills_per_run, options.kills - count["killed"])
            counted, moment_counts = killed_objective(name, runs[name], kills, at, draw)
            count += counted
            by_objective[name] += counted["killed"]
            by_moment += moment_counts
            if counted["killed"]:  # else the run was too quick: once more
                name = next(names)
    result = {name: count[name] for name in ("killed", "during_save", "resumed", "lost")}
    result |= {"by_objective": by_objective, "by_moment": by_moment}
    print(json.dumps(result), flush=True)
    return int(count["lost"] > 0)


if __name__ == "__main__":
    try:
        status = main()
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    sys.exit(status)
