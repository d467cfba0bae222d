"""Tools by the names that the command line knows."""

from .....data.common.errors import UserError, suggest
from .arithmetic import arithmetic
from .python_program import python_program
from .search_files import search_files
from .tool import Tool

NAMES = ("arithmetic", "python", "search:FOLDER")


def named_tool(name: str) -> Tool:
    """Returns a tool by its name: `arithmetic`, `python`, or `search:FOLDER`.

    Raises:
        UserError: there is no such tool, or its folder has no text.
    """
    kind, _, rest = name.partition(":")
    if kind == "search" and rest:
        return search_files(rest)
    if name == "arithmetic":
        return arithmetic()
    if name == "python":
        return python_program()
    raise UserError(f"tool {name!r} does not exist: {suggest(name, NAMES)}")
