"""Parses names of several data sets, as in ``sets:qa=jsonl:pairs.jsonl | sts=csv:sts.csv``."""

from ..common.errors import DataError
from ..common.fields import require
from ..sources.labelled_names import named_parts

KIND = "sets:"


def sources_of(name: str) -> dict[str, str]:
    """Returns the sources of several data sets by their names, or {} for a single source.

    Raises:
      DataError: Fewer than two data sets are named, or two data sets have the same name.
    """
    if not name.startswith(KIND):
        return {}
    problem = f"source {name!r} needs at least two different names of data sets"
    problem = f"{problem}: write sets:NAME=SOURCE | NAME=SOURCE"
    parts = named_parts(name.removeprefix(KIND), problem)
    require(len(dict(parts)) == len(parts), problem, error=DataError)
    return dict(parts)
