"""Types of arguments that several commands share, and where messages go."""

import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

Positional = tyro.conf.Positional


def named(name: str) -> Any:
    """Returns an annotation that shows an argument under `name` in the help."""
    return tyro.conf.arg(metavar=name)


RunName = Positional[Annotated[str, named("RUN")]]
RunFolder = Positional[Annotated[Path, named("RUN")]]
SourceName = Positional[Annotated[str, named("SOURCE")]]
OutputPath = Positional[Annotated[Path, named("OUTPUT")]]


def log(line: str) -> None:
    """Prints a message to standard error; standard output is for results."""
    print(line, file=sys.stderr)


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and those after it."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:cut], arguments[cut + 1 :]
