"""A tool that answers SQL queries from a local SQLite database, without changing it."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from .....data.common.errors import UserError
from .....data.common.fields import require
from .tool import Tool

SECONDS = 5.0
"""Maximum time of a query."""
ROWS = 50
"""Maximum number of rows in an answer. A note is added if there are more rows."""
BYTES = 1 << 20
"""Maximum size of a value that a query computes."""
_STEPS = 10_000
"""The elapsed time is checked whenever SQLite has executed this many instructions."""
_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
"""The SQLite actions that a query may perform. A query may not write, attach files, or change
settings."""


def query_database(file: str | Path) -> Tool:
    """Returns the tool `database`, which answers SQL queries; its description lists the tables.

    Raises:
        UserError: the file is not an SQLite database.
    """
    path = Path(file).expanduser().resolve()
    problem = f"{file} must be a database of SQLite, got"
    require(path.is_file(), f"{problem} no file: name an existing file")
    try:
        with closing(_connected(path)) as connection:
            tables = connection.execute(
                "SELECT sql FROM sqlite_schema WHERE type IN ('table', 'view') AND sql IS NOT NULL"
            ).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"{problem} another file ({error}): name a database") from None
    schema = "; ".join(" ".join(sql.split()) for (sql,) in tables)
    return Tool(
        "database",
        f"Answers a query of SQL (SQLite, read only). Tables: {schema}",
        {"query": "One SELECT."},
        lambda query: answered(path, query),
    )


def answered(path: Path, query: str) -> str:
    """Returns the column names and the rows of a query's answer, with values separated by tabs.

    Raises:
        UserError: the query would change the database, has an error, or takes too long.
    """
    with closing(_connected(path)) as connection:
        connection.set_authorizer(_authorized)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, BYTES)
        deadline = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
        try:
            cursor = connection.execute(query)
            rows = cursor.fetchmany(ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            late = f" (a query may take {SECONDS:g} s)" if time.monotonic() > deadline else ""
            raise UserError(f"the query cannot be answered: {error}{late}") from None
    require(cursor.description, "the query must be a SELECT, got a query without columns")
    lines = [[name for name, *_ in cursor.description], *rows[:ROWS]]
    note = [f"[more than {ROWS} rows]"] if len(rows) > ROWS else []
    return "\n".join([*("\t".join(map(str, line)) for line in lines), *note])


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)


def _authorized(action: int, *names: str | None) -> int:
    """Returns whether a query may perform an action of SQLite."""
    is_allowed = action in _ALLOWED and "load_extension" not in names
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY
