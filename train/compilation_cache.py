"""Compiled programs are kept between commands."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HIT = "/jax/compilation_cache/cache_hits"


def enable_compilation_cache() -> None:
    """Keeps them in flaxzoo's folder of what can be made again, unless jax was told where."""
    import jax

    from ..data.sources.documents import default_cache_dir

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", os.fspath(default_cache_dir() / "xla"))


@contextmanager
def cache_hits() -> Iterator[list[str]]:
    """A list that grows by one for each program that the cache has while this is open."""
    import jax

    hits: list[str] = []

    def note(event: str, **_: Any) -> None:
        if event == HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)
