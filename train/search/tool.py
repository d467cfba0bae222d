"""A tool that lets a model retrieve texts from a search index during a conversation."""

from pathlib import Path

from ...data.common.progress import LogFn
from ...models.text.chat.tools.tool import Tool
from .index import SearchIndex


def search_index(folder: str | Path, number: int = 3, *, log: LogFn = print) -> Tool:
    """Returns the tool `search`, which finds the texts of an index that are nearest to a query.

    Args:
        folder: the folder that `flaxzoo index` has written.
        number: the number of texts that each call returns.
        log: called with a line if a query is truncated.

    Raises:
        FileNotFoundError: the folder or its model does not exist.
        RunError: the folder is not an index, or a file is damaged.
    """
    index = SearchIndex.open(folder, log=log)

    def run(query: str) -> str:
        (hits,) = index.search([query], number, log=log)
        return "\n\n".join(f"{hit.id}: {hit.text}" for hit in hits)

    return Tool("search", "Finds local pages.", {"query": "What to look for."}, run)
