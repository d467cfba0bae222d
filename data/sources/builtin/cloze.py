"""Sentences and the paragraphs that they come from, without a download.

``builtin:python-docs`` as pairs: the anchor is a sentence of a paragraph of the documentation that
comes with Python, and the positive is the paragraph without this sentence (Lee et al. 2019, "Latent
retrieval for weakly supervised open domain question answering", section 4: the inverse cloze task).
"""

import re
from collections import Counter
from itertools import groupby

from ...common.errors import DataError
from ...common.fields import require_one_of
from ..hash_split import Split, text_digest
from ..labelled_names import LabelledSource, Record

NAMES = ("python-docs",)
"""The built-in sources of pairs."""
# A sentence ends before a word that is capitalized or quoted.
_BETWEEN_SENTENCES = re.compile(r"(?<=[.?!])\s+(?=[A-Z\"*])")
_FEWEST_WORDS = 6
# Paragraphs whose hash has a first byte below this are held out: a tenth.
_HELD_OUT_BELOW = 26


def cloze_records(source: LabelledSource, split: Split) -> list[Record]:
    """Returns the pairs of a split.

    Args:
      source: ``builtin:python-docs``.
      split: The split of the paragraphs.

    Raises:
      DataError: The built-in source does not exist.
    """
    require_one_of(f"{source.name}: the pairs", source.location, NAMES, error=DataError)
    records: list[Record] = []
    paragraphs = _paragraphs()
    # A sentence of several paragraphs does not say which one it is from.
    number = Counter(x for text in paragraphs for x in _BETWEEN_SENTENCES.split(text))
    for paragraph in paragraphs:
        is_held_out = text_digest(paragraph)[0] < _HELD_OUT_BELOW
        if is_held_out != (split == "validation"):
            continue
        sentences = _BETWEEN_SENTENCES.split(paragraph)
        for i, sentence in enumerate(sentences):
            if number[sentence] == 1 and len(sentence.split()) >= _FEWEST_WORDS:
                rest = " ".join(sentences[:i] + sentences[i + 1 :])
                location = f"{source.name} pair {len(records) + 1}"
                records.append(Record(location, (sentence, rest)))
    return records


def _paragraphs() -> list[str]:
    """Returns the different paragraphs of at least two sentences, without code and lists."""
    # Import on use: the module has 0.5 MB of literals.
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for name in sorted(topics):
        for has_text, lines in groupby(topics[name].splitlines(), lambda line: bool(line.strip())):
            # Code, lists and tables are indented or marked.
            text = " ".join(lines) if has_text else ""
            if text[:1].isalpha() and _BETWEEN_SENTENCES.search(text):
                found[text] = None
    return list(found)
