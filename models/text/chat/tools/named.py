"""Creates a tool from its name on the command line."""

from .....data.common.errors import UserError, suggest
from .arithmetic import arithmetic
from .database import query_database
from .python_program import python_program
from .search_files import search_files
from .tool import Tool

PLAIN = {"arithmetic": arithmetic, "python": python_program}
"""Tools without an argument."""
OF_PATH = {"search": search_files, "database": query_database}
"""Tools that read a folder or a file. The path of the folder or file is appended to the tool's name
after a colon."""
NAMES = (*PLAIN, "search:FOLDER", "database:FILE")


def named_tool(name: str) -> Tool:
    """Returns a tool by its name: `arithmetic`, `python`, `search:FOLDER`, or `database:FILE`.

    Raises:
        UserError: the name is unknown, the folder has no text, or the file is not a database.
    """
    kind, _, path = name.partition(":")
    if path and kind in OF_PATH:
        return OF_PATH[kind](path)
    if name in PLAIN:
        return PLAIN[name]()
    raise UserError(f"tool {name!r} does not exist: {suggest(name, NAMES)}")
