"""Splits text into sentences, either at line breaks or by rules.

The rules come from the package ``sentencex`` of the Wikimedia Foundation, and cover about 300
languages. They are fast, do not require a model, and handle abbreviations and quotations.
"""

import importlib
import re
from importlib.metadata import version
from typing import Any

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def lines_as_sentences(text: str) -> list[str]:
    """Returns the non-empty lines of a document, without surrounding white space."""
    return [line.strip() for line in text.split("\n") if line and not line.isspace()]


def splitter(language: str) -> str:
    """Returns the language and the version of the splitting rules."""
    return f"{language} sentencex {version('sentencex')}"


def split_sentences(text: str, language: str = "en") -> list[str]:
    """Splits running text into sentences.

    A blank line ends a sentence. A line break within a paragraph does not end a sentence. Like all
    other white space, it is replaced by a single space.

    Args:
      text: The text of one document.
      language: The language code, such as ``en`` or ``de``. For a language without rules, the rules
        of a related language are used.

    Returns:
      The sentences, none of them empty, without surrounding white space.
    """
    # Import only here, because the library loads 4 MB of rules. It has no type annotations.
    segment: Any = importlib.import_module("sentencex").segment
    # Join the lines of a paragraph first, so that a line break does not end a sentence.
    paragraphs = (" ".join(paragraph.split()) for paragraph in _BLANK_LINE.split(text))
    pieces = (piece.strip() for paragraph in paragraphs for piece in segment(language, paragraph))
    return list(filter(None, pieces))
