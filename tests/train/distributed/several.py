"""What each of several processes of test_multiprocess.py does: train, until it is told to stop.

As a program it takes a JSON list of jobs, `[config, workdir, do, step]` each: in the given step
process 1 does something (see `DEEDS`).
"""

import dataclasses
import functools
import json
import os
import signal
import sys
from pathlib import Path

import jax
from flaxzoo.train.distributed import multiprocess as processes
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.engine import loop
from flaxzoo.train.objectives.tasks import objective_of
from flaxzoo.train.runs.config_json import from_dict

DEEDS = {
    "stop": lambda: signal.raise_signal(signal.SIGTERM),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": lambda: (_ for _ in ()).throw(FileNotFoundError("a file of text is gone")),
}


@functools.cache
def program_of(config):
    """Runs of one configuration share what they trace and compile."""
    return parallel.compile_trainer(config, objective_of(config))


def go(config, workdir, do=None, at=None, program_of=program_of):
    """Trains; the last process (of one, that one) does something in the step `at`."""
    actor = jax.process_index() == jax.process_count() - 1

    def compile_trainer(config, objective):
        program = program_of(config)

        def step(state, batch):
            if actor and do is not None and int(state.step) + 1 == at:
                DEEDS[do]()
            return program.step(state, batch)

        return dataclasses.replace(program, step=step)

    original, loop.compile_trainer = loop.compile_trainer, compile_trainer
    try:
        return loop.train(config, workdir, quiet=True)
    finally:
        loop.compile_trainer = original


if __name__ == "__main__":
    processes.SILENCE_SECONDS = int(sys.argv[2])
    with processes.distributed_session(60):
        for config, workdir, do, at in json.loads(Path(sys.argv[1]).read_text()):
            result = go(from_dict(config), workdir, do, at)
            print(f"step {result.step}, signal {result.signal}", file=sys.stderr)
