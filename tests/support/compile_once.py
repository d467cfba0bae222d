"""Runs of the same configuration share the functions that jax traces and compiles."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TRACED = (
    *("model", "data", "objective", "optimizer", "execution", "mesh", "lora"),
    *("steps", "schedule_start", "batch_size", "micro_batches", "gather", "parallel"),
)
"""The fields of a run that its step depends on."""


def _fields(config: Any) -> str:
    return repr([getattr(config, name) for name in TRACED])


@contextmanager
def compile_once(is_on: Callable[[], bool]) -> Iterator[None]:
    """Keep the step of each configuration, so that a resumed run is not traced and compiled again.

    Most tests of runs train one configuration several times. Tests in `integration` and `faults`
    resume runs in processes that compile for themselves.

    Args:
        is_on: whether the current test may use the steps of earlier ones.
    """
    compiling = sys.modules.get("flaxzoo.train.engine.compile")
    start = sys.modules.get("flaxzoo.train.engine.start")
    if compiling is None or start is None:
        yield
        return

    def kept(make: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
        made: dict[Any, Any] = {}

        @functools.wraps(make)
        def make_once(*args: Any) -> Any:
            key = key_of(*args) if is_on() else None
            if key is None:
                return make(*args)
            if key not in made:
                made[key] = args, make(*args)  # the arguments, so that no other gets their `id`
            return made[key][1]

        return make_once

    with pytest.MonkeyPatch.context() as patch:
        objective_of = kept(
            start.objective_of, lambda config, own: _fields(config) if own is None else None
        )
        configured_step = kept(
            compiling.configured_step,
            lambda config, objective, *rest: (_fields(config), id(objective), *rest),
        )
        patch.setattr(start, "objective_of", objective_of)
        patch.setattr(compiling, "configured_step", configured_step)
        yield
