"""Names that are imported when they are first used, so that `import flaxzoo.data` is cheap.

A package states its public names once, in its `__init__.pyi`, where editors and type checkers
read them too: `from .room.module import Name as Name`.
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
    """Returns a package's `__getattr__`, `__dir__` and `__all__`, as its stub states them.

    Args:
      package: The package's `__name__`.
      file: The package's `__file__`; the stub is in the same folder.
    """
    # Only parse the stub; its imports run when a name is used.
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    # Name → the module that has it, relative to the package.
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
    """Records by name. Looking up a record loads it; listing the names loads no record."""

    def __init__(self, loaders: Mapping[str, Callable[[], Record]]) -> None:
        """Creates the mapping.

        Args:
          loaders: For each name the function that returns its record, such as an import.
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
