"""Public names that are imported when they are first used, so that `import flaxzoo.data` is cheap.

A package states its public names once, in its `__init__.pyi`, where editors and type checkers
read them too: `from .room.module import Name as Name`.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns a package's `__getattr__`, `__dir__` and `__all__`, as its stub states them.

    Args:
      package: The package's `__name__`.
      file: The package's `__file__`; the stub lies beside it.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    module_of = {
        name.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{module_of[name]}", package), name)

    return get, lambda: sorted(module_of), sorted(module_of)
