"""jax's persistent compilation cache, shared by all commands."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

HIT = "/jax/compilation_cache/cache_hits"


def enable_compilation_cache(*, least_seconds: float = 1.0) -> None:
    """Caches compiled programs in flaxzoo's cache folder, unless jax already has a cache folder.

    Args:
        least_seconds: The minimum compile time of the programs that are stored.
    """
    import jax

    from ..data.common.files import default_cache_dir

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", os.fspath(default_cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)


@contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Yields a list that collects an entry for each program that jax reads from the cache."""
    import jax

    hits: list[str] = []

    def note(event: str, **_: object) -> None:
        if event == HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)
