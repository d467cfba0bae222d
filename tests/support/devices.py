"""The number of devices that runs are compiled for."""

import contextlib
import functools
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def on_devices(number: int = 1) -> Iterator[None]:
    """Compiles runs for the first of the eight devices, as `make_mesh` of a run finds them."""
    import jax
    from flaxzoo.train.engine import compile as compiling

    with pytest.MonkeyPatch.context() as patch:
        make_mesh = functools.partial(compiling.make_mesh, devices=jax.devices()[:number])
        patch.setattr(compiling, "make_mesh", make_mesh)
        yield
