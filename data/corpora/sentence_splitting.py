"""Sentences: the lines of a text that has one on each, or split by rules.

The rules are those of ``sentencex``, which the Wikimedia foundation keeps for some 300
languages: fast, without a model to fetch, and it knows abbreviations and quotations.
"""

import importlib
import re
from importlib.metadata import version
from typing import Any

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def lines_as_sentences(text: str) -> list[str]:
    """Takes each line as a sentence.

    Args:
      text: One document.

    Returns:
      Its lines without the white space around them; empty ones are left out.
    """
    return [line.strip() for line in text.split("\n") if line and not line.isspace()]


def splitter(language: str) -> str:
    """Names what decides how running text is split: the language, the rules' version."""
    return f"{language} sentencex {version('sentencex')}"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Splits running text into sentences.

    A blank line ends a sentence. A line break inside a paragraph does not, and like any
    other white space it becomes a single space.

    Args:
      text: One document.
      language: Its language's code, such as ``en`` or ``de``; the nearest relative's rules
        are used for a language without any of its own.

    Returns:
      The sentences without the white space around them, none of them empty.
    """
    # 4 MB of rules, only when asked for; the library states no types.
    segment: Any = importlib.import_module("sentencex").segment
    paragraphs = (" ".join(paragraph.split()) for paragraph in _BLANK_LINE.split(text))
    pieces = (piece.strip() for paragraph in paragraphs for piece in segment(language, paragraph))
    return [piece for piece in pieces if piece]
