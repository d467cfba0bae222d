"""Transformer models in JAX and Flax: `flaxzoo.models`, `flaxzoo.data`, `flaxzoo.train`.

The three packages are imported on first use, so `import flaxzoo` is cheap.
"""

import os
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import data as data
    from . import models as models
    from . import train as train

    __version__: str

__all__ = ["__version__", "data", "models", "train"]

REDUCTIONS = "--xla_cpu_experimental_ynn_fusion_type="
"""The flag of XLA that lists the operations that XLA:CPU runs with its library YNN."""


def _avoid_wrong_sums() -> None:
    """Compiles sums on CPUs without YNN if jaxlib is 0.10.2, whose sums of large arrays are wrong.

    See issue 39103 of jax. jaxlib 0.11 has the correct sums, but needs Python 3.12.
    """
    from jaxlib.version import __version__ as version

    flags = os.environ.get("XLA_FLAGS", "")
    if version != "0.10.2" or REDUCTIONS in flags:
        return
    os.environ["XLA_FLAGS"] = f"{REDUCTIONS}-reduce {flags}"
    # XLA reads the flags when jax starts its first backend.
    bridge = sys.modules.get("jax._src.xla_bridge")
    has_run = bridge is not None and bridge.backends_are_initialized()
    if has_run and sys.modules["jax"].default_backend() == "cpu":
        warnings.warn(
            "jaxlib 0.10.2 may compute wrong sums on a CPU, because jax ran before flaxzoo was "
            "imported: import flaxzoo first, or install jax 0.11",
            stacklevel=3,
        )


_avoid_wrong_sums()


def __getattr__(name: str) -> object:
    if name in ("data", "models", "train"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        from importlib.metadata import version

        return version("flaxzoo")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
