"""Retrieval: the paragraphs of local files that fit a question best (BM25)."""

import math
import re
from collections import Counter
from pathlib import Path

from ....data.errors import UserError
from .tool import Tool

SUFFIXES = (".md", ".rst", ".txt")
"""The files that are read."""
LARGEST = 1 << 20
"""Bytes of a file; larger ones are left out."""
FILES = 10_000
"""Files at most."""
_K, _B = 1.5, 0.75  # the usual constants of BM25
_WORD = re.compile(r"\w+")


class FileSearch:
    """The paragraphs of the text files below a folder.

    A link that leads out of the folder is not followed.

    Args:
        folder: the folder, read once.

    Raises:
        UserError: it is no folder, or has no text.
    """

    def __init__(self, folder: str | Path) -> None:
        self._root = Path(folder).expanduser().resolve()
        if not self._root.is_dir():
            raise UserError(f"{folder} is no folder: name one with files {', '.join(SUFFIXES)}")
        self._paragraphs: list[tuple[str, str]] = []
        for path in sorted(self._root.rglob("*"))[:FILES]:
            real = path.resolve()
            if path.suffix not in SUFFIXES or not real.is_relative_to(self._root):
                continue
            if not real.is_file() or real.stat().st_size > LARGEST:
                continue
            text = real.read_text(encoding="utf-8", errors="replace")
            name = str(path.relative_to(self._root))
            parts = (part.strip() for part in re.split(r"\n\s*\n", text))
            self._paragraphs += [(name, part) for part in parts if part]
        if not self._paragraphs:
            raise UserError(f"{folder} has no text: name a folder with files {', '.join(SUFFIXES)}")
        self._words = [Counter(_words(text)) for _, text in self._paragraphs]
        self._sizes = [sum(words.values()) for words in self._words]
        self._containing = Counter(word for words in self._words for word in words)

    def search(self, query: str, number: int = 3) -> str:
        """Returns the paragraphs that fit a query best, each after the name of its file.

        Args:
            query: some words.
            number: how many paragraphs.
        """
        mean = sum(self._sizes) / len(self._sizes)
        scores = [0.0] * len(self._paragraphs)
        for word in set(_words(query)):
            containing = self._containing[word]
            rarity = math.log(1 + (len(scores) - containing + 0.5) / (containing + 0.5))
            for i, words in enumerate(self._words):
                if count := words[word]:
                    size = _K * (1 - _B + _B * self._sizes[i] / mean)
                    scores[i] += rarity * count * (_K + 1) / (count + size)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:number]
        found = [self._paragraphs[i] for i in order if scores[i] > 0]
        return "\n\n".join(f"{name}: {text}" for name, text in found) or "nothing found"


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def search_files(folder: str | Path) -> Tool:
    """Returns the tool `search`, which finds paragraphs in the text files below a folder.

    Raises:
        UserError: it is no folder, or has no text.
    """
    search = FileSearch(folder)
    return Tool(
        "search",
        "Finds paragraphs of local documents.",
        {"query": "Words to look for."},
        lambda query: search.search(query),
    )
