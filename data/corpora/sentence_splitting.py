"""Sentence splitting: at line breaks, or by rules.

The rules are those of ``sentencex`` of the Wikimedia Foundation, for some 300 languages. They are
fast, need no downloaded model, and know abbreviations and quotations.
"""

import importlib
import re
from importlib.metadata import version
from typing import Any

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def lines_as_sentences(text: str) -> list[str]:
    """Returns the lines of a document, stripped of white space; empty lines are left out."""
    return [line.strip() for line in text.split("\n") if line and not line.isspace()]


def splitter(language: str) -> str:
    """Returns the language and the version of the rules, which decide where a text is split."""
    return f"{language} sentencex {version('sentencex')}"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Splits running text into sentences.

    A blank line ends a sentence. A line break inside a paragraph does not; like all other white
    space it becomes a single space.

    Args:
      text: One document.
      language: The code of its language, such as ``en`` or ``de``. A language without rules uses
        those of the nearest related language.

    Returns:
      The sentences, stripped of white space; none is empty.
    """
    # Imported here because it loads 4 MB of rules. The library has no type annotations.
    segment: Any = importlib.import_module("sentencex").segment
    paragraphs = (" ".join(paragraph.split()) for paragraph in _BLANK_LINE.split(text))
    pieces = (piece.strip() for paragraph in paragraphs for piece in segment(language, paragraph))
    return [piece for piece in pieces if piece]
