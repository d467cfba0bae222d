"""Imports names when they are first used, so that `import flaxzoo.data` is cheap.

A package lists its public names only in its `__init__.pyi`, which editors and type checkers also
read, as imports such as `from .room.module import Name as Name`.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import TypeVar

Record = TypeVar("Record")


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, `__dir__` and `__all__` of a package, based on its stub.

    Args:
      package: The package's `__name__`.
      file: The package's `__file__`; the stub is in the same folder.
    """
    # Parse the stub without running it; a name is imported when it is used.
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    # Maps each name to the module that defines it, relative to the package.
    module_of = {
        name.name: "." * node.level + str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    return get, lambda: sorted(module_of), sorted(module_of)


class LazyRecords(MutableMapping[str, Record]):
    """A mapping of records by name. A record is loaded only when it is looked up."""

    def __init__(self, loaders: Mapping[str, Callable[[], Record]]) -> None:
        """Creates the mapping.

        Args:
          loaders: Maps each name to a function that returns its record, for example by an import.
        """
        self._loaders = dict(loaders)

    def __getitem__(self, name: str) -> Record:
        return self._loaders[name]()

    def __setitem__(self, name: str, record: Record) -> None:
        self._loaders[name] = lambda: record

    def __delitem__(self, name: str) -> None:
        del self._loaders[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaders

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)
