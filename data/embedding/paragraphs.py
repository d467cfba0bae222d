"""Makes pairs from plain text: the first sentence and the rest of each paragraph.

Such pairs train a retrieval model without labeled data, as in Lee et al. 2019, "Latent retrieval
for weakly supervised open domain question answering", section 3.1. The paper uses a random sentence
of the paragraph instead of the first sentence.
"""

import re
from collections.abc import Iterator

from ..common.errors import DataError
from ..common.fields import require_one_of
from ..corpora.sentence_splitting import split_sentences
from ..sources.hash_split import Split
from ..sources.labelled_names import LabelledSource, Record
from ..sources.load_documents import load_documents

BUILTIN = "builtin:python-docs"
HELD_OUT = 0.1
"""The fraction of the documents used for validation."""
_FEWEST = 5
"""Minimum number of words in each text of a pair."""
_BLANK_LINE = re.compile(r"\n\s*\n")


def paragraph_records(source: LabelledSource, split: Split) -> list[Record]:
    """Returns the pairs in a split of the built-in text.

    Raises:
      DataError: The name is unknown.
    """
    require_one_of("the built-in pairs", source.name, (BUILTIN,), error=DataError)
    documents = load_documents(BUILTIN, split, validation_fraction=HELD_OUT)
    # Some paragraphs occur in several documents.
    pairs = dict.fromkeys(pair for document in documents for pair in _pairs(document))
    return [Record(f"{BUILTIN} {split} pair {i}", pair) for i, pair in enumerate(pairs, start=1)]


def _pairs(document: str) -> Iterator[tuple[str, str]]:
    for paragraph in _BLANK_LINE.split(document):
        # Paragraphs of prose begin with a capital letter, unlike tables, grammars and programs.
        if not re.match(r"\s*[A-Z]", paragraph):
            continue
        first, *rest = split_sentences(paragraph)
        pair = first, " ".join(rest)
        if min(len(text.split()) for text in pair) >= _FEWEST:
            yield pair
