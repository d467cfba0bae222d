"""Writes `models/API.md`, `data/API.md`, `train/API.md`: `python tests/api_reference.py`.

Each page has the public names of a package, each with its signature and the first paragraph of its
docstring. The test in `test_package.py` compares the pages with what this file makes.
"""

import enum
import inspect
import re
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("models", "data", "train")


def page(name: str, package: ModuleType) -> str:
    """Returns the text of a package's page."""
    parts = [
        f"# flaxzoo.{name}",
        "Made from the docstrings by `python tests/api_reference.py`; "
        f"[the guide](README.md) explains how the parts fit. `help(flaxzoo.{name}.NAME)` has the "
        "arguments and the errors.",
    ]
    for public in sorted(package.__all__, key=str.lower):
        thing = getattr(package, public)
        thing = getattr(thing, "__wrapped__", thing)  # of a function with a cache
        parts.append(f"## {public}\n\n```python\n{signature(public, thing)}\n```")
        parts.append(first_paragraph(thing, package, public))
    return "\n\n".join(parts) + "\n"


def signature(name: str, thing: object) -> str:
    """Returns how a name is written: a call for what can be called, else the name and its type."""
    if isinstance(thing, type) and getattr(thing, "_is_protocol", False):
        return f"class {name}(Protocol)"
    if isinstance(thing, type) and issubclass(thing, enum.Enum):  # Python's own, which varies
        return f"class {name}(Enum)"
    if not (inspect.isfunction(thing) or isinstance(thing, type)):
        return f"{name}: {type(thing).__name__}"
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (ValueError, TypeError):
        return f"{name}(…)"
    written, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            if "*args" not in written:
                written.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        text = stars.get(parameter.kind, "") + parameter.name
        default = parameter.default
        if default is not parameter.empty:
            plain = default is None or isinstance(default, int | float | str | tuple)
            shown = repr(default).replace("'", '"')
            text += f"={shown}" if plain else "=…"
        written.append(text)
    call = f"{name}({', '.join(written)})"
    return call if len(call) <= 100 else f"{name}(\n    " + ",\n    ".join(written) + ",\n)"


def first_paragraph(thing: object, package: ModuleType, name: str) -> str:
    """Returns the first paragraph of a docstring; of a value, the text below it in its file."""
    if inspect.isfunction(thing) or isinstance(thing, type):
        text = inspect.getdoc(thing) or ""
    else:
        text = _below(package, name)
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")


def _below(package: ModuleType, name: str) -> str:
    """Returns the string that stands below a value that is assigned in some file of a package."""
    assert package.__file__ is not None
    for file in sorted(Path(package.__file__).parent.rglob("*.py")):
        found = re.search(
            rf'^{name}\b[^\n]*=.*?\n"""(.*?)"""', file.read_text(encoding="utf-8"), re.M | re.S
        )
        if found:
            return found[1]
    return ""


def pages() -> dict[Path, str]:
    """Returns the text of every page, by its file."""
    from importlib import import_module

    return {
        REPOSITORY / name / "API.md": page(name, import_module(f"flaxzoo.{name}"))
        for name in PACKAGES
    }


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
