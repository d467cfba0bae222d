"""What each of several processes of test_multiprocess.py does: train, until it is told to stop.

As a program it takes a JSON list of jobs, `[config, workdir, do, step]` each: in the given step
process 1 does something (see `DEEDS`), or its compiler refuses the step (see `REFUSALS`). With
"read", a callback reads the parameters at each evaluation.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from flaxzoo.train import Callback
from flaxzoo.train.config import objective_of
from flaxzoo.train.distributed import multiprocess as processes
from flaxzoo.train.engine import compile as parallel
from flaxzoo.train.engine import machine_memory, sharded_step, start
from flaxzoo.train.engine.train import train
from flaxzoo.train.runs.config_json import from_dict

DEEDS = {
    "stop": lambda: signal.raise_signal(signal.SIGTERM),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": lambda: (_ for _ in ()).throw(FileNotFoundError("a file of text is gone")),
}

REFUSALS = {
    "has no memory": "RESOURCE_EXHAUSTED: Ran out of memory",
    "cannot compile": "INTERNAL: a fault of the compiler",
}


@contextlib.contextmanager
def refusal(message):
    """The compiler of process 1 refuses to gather parameters once, which its memory allows."""
    trace, memory = sharded_step.ShardedStep.trace, machine_memory.device_memory

    def refused(step, batch, candidate):
        if "gathered once a step, which" in candidate.exchange and jax.process_index() == 1:
            raise jax.errors.JaxRuntimeError(message)
        print(f"traced: {candidate.exchange}", file=sys.stderr)
        return trace(step, batch, candidate)

    sharded_step.ShardedStep.trace = refused
    machine_memory.device_memory = lambda devices: (2 + jax.process_index()) << 30
    machine_memory.memory_of_each.cache_clear()
    try:
        yield
    finally:
        sharded_step.ShardedStep.trace, machine_memory.device_memory = trace, memory
        machine_memory.memory_of_each.cache_clear()


class Reader(Callback):
    """Writes the parameters at the newest evaluation into a file, on process 0."""

    def __init__(self, file):
        self.file = file

    def on_start(self, running):
        self.running = running

    def on_evaluation(self, step, metrics):
        read, params = self.running.params()
        assert read == step
        leaves = jax.tree_util.tree_flatten_with_path({"params": params})[0]
        np.savez(self.file, **{jax.tree_util.keystr(path): x for path, x in leaves})


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
            if actor and do in DEEDS and int(state.step) + 1 == at:
                DEEDS[do]()
            return program.step(state, batch)

        return dataclasses.replace(program, step=step)

    original, start.compile_trainer = start.compile_trainer, compile_trainer
    try:
        readers = [Reader(workdir.with_suffix(".npz"))] if do == "read" else []
        return train(config, workdir, quiet=True, callbacks=readers)
    finally:
        start.compile_trainer = original


def set_devices(monkeypatch, number):
    """Says how many devices a process has that is started now."""
    jax.devices()  # this one's are eight, whatever comes first
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={number}"
    monkeypatch.setenv("XLA_FLAGS", flags)


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 100)  # as in conftest.py
    processes.SILENCE_SECONDS = int(sys.argv[2])
    with processes.distributed_session(60):
        for config, workdir, do, at in json.loads(Path(sys.argv[1]).read_text()):
            refusing = refusal(REFUSALS[do]) if do in REFUSALS else contextlib.nullcontext()
            with refusing:
                result = go(from_dict(config), Path(workdir), do, at)
            print(f"step {result.step}, signal {result.signal}", file=sys.stderr)
