"""Kills training processes with `kill -9` at random moments, and looks whether anything is lost.

    python tests/faults/kill.py [--kills 100] [--kills-per-run 4] [--seed 0]
                                [--objectives causal translation …]

For each objective in turn a run is trained without being stopped. Then the same run is trained
in another folder by processes that are killed: while they start, while they train, or as soon
as a half-written checkpoint is seen, each about as often as `MOMENTS` says. A killed run is
started again, and after a few kills left to end. It must end with the metrics, the parameters and
the optimizer state of the run never stopped, bit for bit, and no whole checkpoint may have gone.

Prints one line of JSON at the end, or when Ctrl-C asks for it: `killed`, `during_save` (a
half-written checkpoint was left), `resumed` (kills of runs that ended as they had to), `lost` (of
all others), and `by_objective` how many kills each had. What happens is told on standard error.
The status is 1 if anything is lost.

Processes are forked from one that has imported everything and computed nothing, which is much
quicker than to start them anew. Nothing is left behind.
"""

import argparse
import collections
import contextlib
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
    "JAX_COMPILATION_CACHE_DIR": str(SCRATCH / "xla"),  # whoever is killed leaves half an entry
}
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from flaxzoo.models.loading import steps  # noqa: E402
from flaxzoo.train import loop  # noqa: E402
from train.objective_runs import RUNS, write_sources  # noqa: E402
from train.run_folders import assert_same, everything, lines  # noqa: E402

STEPS = 30
MOMENTS = {"start": 0.1, "training": 0.45, "save": 0.45}
"""How often a process is killed before its first step, after some steps, within a save."""
LONGEST = 300.0
"""Seconds after which a process that shows no sign of life is taken for hanging."""

PROCESSES = multiprocessing.get_context("fork")


def go(config, folder):
    """Trains in a process of its own, which is answered."""
    process = PROCESSES.Process(
        target=loop.train, args=(config, folder), kwargs={"quiet": True}, daemon=True
    )
    process.start()
    return process


def ended(process):
    """Whether a process ends by itself, and well."""
    process.join(LONGEST)
    return process.exitcode == 0


def same(ours, whole):
    """Whether two runs ended alike; read in another process, for this one must not compute."""

    def compare():
        assert lines(ours) == lines(whole)
        assert_same(everything(ours, STEPS), everything(whole, STEPS))

    process = PROCESSES.Process(target=compare, daemon=True)
    process.start()
    return ended(process)


def half_written(folder):
    """Whether there is a checkpoint without its final name."""
    return any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def wait_for(happened, process):
    """Waits until something happened, or the process ended, or hangs."""
    deadline = time.monotonic() + LONGEST
    while not happened() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.0005)


def kill(process, folder, draw):
    """Kills a process; answers the moment and what was on disk, or None if it had ended."""
    moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    before = max(steps(folder), default=0)
    if moment == "start":
        time.sleep(draw.uniform(0.0, 2.0))
    else:
        # It has been taken up, and goes on by a few checkpoints at most.
        further = before + draw.randint(0, 8)
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


def killed_run(config, folder, kills, draw):
    """Trains a run with at most so many kills; answers what each was, and whether all went well."""
    killed, whole = [], True
    while len(killed) < kills:
        process = go(config, folder)
        outcome = kill(process, folder, draw)
        if outcome is None:  # it was quicker
            whole &= ended(process)
            break
        killed.append(outcome)
    process = go(config, folder)
    whole &= ended(process)
    newest = [max(kept, default=0) for _, _, kept in killed]
    return killed, whole and newest == sorted(newest)


def killed_objective(name, kills, draw):
    """Kills a run of an objective so many times at most; answers what `main` counts."""
    config = RUNS[name](SCRATCH, steps=STEPS, log_every=1, checkpoint_every=2)
    ours, never_killed = SCRATCH / "ours", SCRATCH / f"whole-{name}"
    if not never_killed.exists() and not ended(go(config, never_killed)):
        raise SystemExit(f"{name}: the run that nobody kills did not end")
    killed, whole = killed_run(config, ours, kills, draw)
    whole = whole and same(ours, never_killed)
    shutil.rmtree(ours)
    told = ", ".join(
        f"{moment}{' (half a checkpoint)' if half else ''} at {max(kept, default=0)}"
        for moment, half, kept in killed
    )
    print(f"{name}: {'same' if whole else 'LOST'} after {told}", file=sys.stderr, flush=True)
    return collections.Counter(
        {
            "killed": len(killed),
            "during_save": sum(half for _, half, _ in killed),
            "resumed" if whole else "lost": len(killed),
        }
    )


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--kills-per-run", type=int, default=4)
    parser.add_argument("--objectives", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    write_sources(SCRATCH)
    count, by_objective, number = collections.Counter(), collections.Counter(), 0
    with contextlib.suppress(KeyboardInterrupt):
        while count["killed"] < asked.kills:
            name = asked.objectives[number % len(asked.objectives)]
            kills = min(asked.kills_per_run, asked.kills - count["killed"])
            counted = killed_objective(name, kills, draw)
            count += counted
            by_objective[name] += counted["killed"]
            number += bool(counted["killed"])  # else the run was too quick: once more
    names = ("killed", "during_save", "resumed", "lost")
    print(json.dumps({**{n: count[n] for n in names}, "by_objective": by_objective}), flush=True)
    return int(count["lost"] > 0)


if __name__ == "__main__":
    try:
        status = main()
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    sys.exit(status)
