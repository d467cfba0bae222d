"""Finds the paragraphs of local files that match a query best (BM25)."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from .....data.common.errors import counted
from .....data.common.fields import require
from .tool import Tool

SUFFIXES = (".md", ".rst", ".txt")
"""The suffixes of the files that are read."""
BYTES = 32 << 20
"""Maximum total size of the texts. Each answer names the files that this limit excludes."""
_K, _B = 1.5, 0.75  # the usual constants of BM25
_WORD = re.compile(r"\w+")


class FileSearch:
    """Searches the paragraphs of all text files below a folder.

    Links that lead out of the folder are not followed.

    Args:
        folder: the folder, whose files are read only once.

    Raises:
        UserError: `folder` is not a folder or has no text.
    """

    def __init__(self, folder: str | Path) -> None:
        self._root = Path(os.path.realpath(os.path.expanduser(folder)))
        suffixes = ", ".join(SUFFIXES)
        require(
            self._root.is_dir(), f"{folder} is not a folder: name a folder with files {suffixes}"
        )
        # Read the paragraphs of all files, up to a total size.
        self._paragraphs: list[tuple[str, str]] = []
        left_out: list[str] = []
        room = BYTES
        for path in _text_files(self._root):
            name = str(path.relative_to(self._root))
            try:
                text = path.read_bytes() if path.stat().st_size <= room else None
            except OSError:
                text = None
            if text is None or b"\0" in text:  # UTF-16, or a binary file
                left_out.append(name)
                continue
            room -= len(text)
            pieces = re.split(r"\n\s*\n", text.decode(errors="replace"))
            self._paragraphs += [(name, part) for piece in pieces if (part := piece.strip())]
        self._note = _note_of(left_out)
        require(
            self._paragraphs,
            f"{folder} has no text that can be read {self._note}: name a folder with files "
            f"{suffixes}",
        )
        # Compute the statistics for BM25: the word counts and the length of each paragraph, and the
        # number of paragraphs that contain each word.
        self._words = [Counter(_words(text)) for _, text in self._paragraphs]
        self._sizes = [sum(words.values()) for words in self._words]
        self._containing = Counter(itertools.chain(*self._words))

    def search(self, query: str, number: int = 3) -> str:
        """Returns the paragraphs that match a query best, each after the name of its file.

        If files were left out, the paragraphs are preceded by a note that names these files.

        Args:
            query: the words to search for.
            number: the number of paragraphs.
        """
        # Sum the BM25 scores of the query's words.
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
        parts = [f"{name}: {text}" for name, text in found] or ["nothing found"]
        return "\n\n".join([*filter(None, [self._note]), *parts])


def _text_files(root: Path) -> Iterator[Path]:
    """Yields the text files below a folder in a fixed order, without links that lead out of it."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix.lower() not in SUFFIXES:
                continue
            real = Path(os.path.realpath(path))
            if real.is_relative_to(root) and real.is_file():
                yield path


def _note_of(left_out: Sequence[str]) -> str:
    """Returns a note that lists the files that are not searched; "" if all are searched."""
    if not left_out:
        return ""
    shown = ", ".join(left_out[:3]) + (", …" if len(left_out) > 3 else "")
    number = counted(len(left_out), "file")
    return (
        f"[{number} not searched, which cannot be read as text or exceed {BYTES >> 20} MiB "
        f"together with the others: {shown}]"
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def search_files(folder: str | Path) -> Tool:
    """Returns the tool `search`, which finds paragraphs in the text files below a folder.

    Raises:
        UserError: `folder` is not a folder or has no text.
    """
    search = FileSearch(folder)
    return Tool(
        "search",
        "Finds paragraphs of local documents.",
        {"query": "Words to look for."},
        lambda query: search.search(query),
    )
