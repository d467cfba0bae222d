"""Sentence splitting: at line breaks, or by rules.

The rules come from ``sentencex`` of the Wikimedia Foundation and cover some 300 languages. The
rules are fast, need no downloaded model, and handle abbreviations and quotations.
"""

import importlib
import re
from importlib.metadata import version
from typing import Any

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def lines_as_sentences(text: str) -> list[str]:
    """Returns the non-empty lines of a document, stripped of white space."""
    return [line.strip() for line in text.split("\n") if line and not line.isspace()]


def splitter(language: str) -> str:
    """Returns the language and the version of the splitting rules."""
    return f"{language} sentencex {version('sentencex')}"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Splits running text into sentences.

    A blank line ends a sentence. A line break inside a paragraph does not end a sentence; like all
    white space, it becomes a single space.

    Args:
      text: One document.
      language: The code of the language, such as ``en`` or ``de``. A language without rules uses
        the rules of a related language.

    Returns:
      The sentences, stripped of white space; none is empty.
    """
    # Import on use, because the library loads 4 MB of rules. The library has no type annotations.
    segment: Any = importlib.import_module("sentencex").segment
    # Join the lines of a paragraph first, so that a line break does not end a sentence.
    paragraphs = (" ".join(paragraph.split()) for paragraph in _BLANK_LINE.split(text))
    pieces = (piece.strip() for paragraph in paragraphs for piece in segment(language, paragraph))
    return list(filter(None, pieces))
