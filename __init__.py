"""Transformer models in JAX and Flax: `flaxzoo.models`, `flaxzoo.data`, `flaxzoo.train`.

The three packages are imported on first use, so `import flaxzoo` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import data as data
    from . import models as models
    from . import train as train

    __version__: str

__all__ = ["__version__", "data", "models", "train"]


def __getattr__(name: str) -> object:
    if name in ("data", "models", "train"):
        return import_module(f".{name}", __name__)
    if name == "__version__":
        from importlib.metadata import version

        return version("flaxzoo")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
