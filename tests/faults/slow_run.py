"""A run of `flaxzoo train` in which something takes a minute; as a program: KIND, then arguments.

- `step`: step 3 on the device;
- `program`: a call in C before step 3, as if it were compiled again;
- `data`: the batch of step 3;
- `seconds`: two seconds on the device in every step.
"""

import dataclasses
import functools
import hashlib
import itertools
import sys
import time

import jax
from flaxzoo.data.batching import BatchIterator
from flaxzoo.train.cli import main
from flaxzoo.train.engine import compile as compiling
from flaxzoo.train.engine import start


@functools.partial(jax.jit, static_argnames="iterations")
def slowly(metrics, iterations):
    """Returns the same metrics after many passes through a loop."""

    def spin(_, x):
        return jax.numpy.tanh(x @ x)

    waited = jax.lax.fori_loop(0, iterations, spin, jax.numpy.ones((64, 64)))
    waited = waited @ waited  # jax waits for what seems cheap, and does not count passes
    return jax.tree.map(lambda x: x + 0 * waited.sum(), metrics)


def iterations_of(seconds):
    """Returns how many passes take so long here."""
    number = 3_000
    jax.block_until_ready(slowly({"x": 1.0}, number))
    started = time.perf_counter()
    jax.block_until_ready(slowly({"x": 2.0}, number))
    return int(number * seconds / (time.perf_counter() - started))


def announce(what):
    """Prints a word for the test, which waits for it."""
    print(what, flush=True)


def slow_step(kind, program, iterations):
    """Returns the step of a trainer, made slow."""

    numbers = itertools.count(1)

    def step(state, batch):
        number = next(numbers)
        if kind == "program" and number == 3:
            announce("slow")
            hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)  # without Python's lock
        state, metrics = program.step(state, batch)
        if kind == "seconds" or (kind == "step" and number == 3):
            metrics = slowly(metrics, iterations)
            announce("slow")
        return state, metrics

    return step


def train_slowly(kind, arguments):
    """Runs the command, with something slow in it."""
    iterations = iterations_of(60 if kind == "step" else 2)
    compile_trainer, next_batch = compiling.compile_trainer, BatchIterator.__next__

    def compile_slow(config, objective):
        program = compile_trainer(config, objective)
        return dataclasses.replace(program, step=slow_step(kind, program, iterations))

    def next_slow(iterator):
        if kind == "data" and iterator.get_state() == {"step": 2}:
            announce("slow")
            time.sleep(60)
        return next_batch(iterator)

    start.compile_trainer = compile_slow
    BatchIterator.__next__ = next_slow
    return main.main(arguments)


if __name__ == "__main__":
    sys.exit(train_slowly(sys.argv[1], sys.argv[2:]))
