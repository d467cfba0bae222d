"""Schemes that mark spans of words with one tag per word, and their conversion to BIO.

========  ==================================================================================
BIO       (IOB2) the first word of a span has ``B-``, the others ``I-``
IOB1      all words have ``I-``; ``B-`` begins only a span right after one of the same type
BIOES     (BILOU) the last word has ``E-`` (``L-``), a span of one word ``S-`` (``U-``)
plain     tags of single words without spans: parts of speech
========  ==================================================================================

Ramshaw & Marcus 1995 (IOB1); Ratinov & Roth 2009 (BILOU). The scheme of a source is inferred from
all its tags. After conversion to BIO, spans of all schemes are compared and scored alike.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, product
from typing import Literal

Scheme = Literal["BIO", "IOB1", "BIOES", "plain"]

_TAG = re.compile(r"O|[BIESLU]-.+")
_AS_BIO = {"S-": "B-", "U-": "B-", "E-": "I-", "L-": "I-"}
Location = tuple[int, int]
"""The index of a sentence, and the index of a word in this sentence."""


Located = tuple[Location, str]
"""A tag with its location."""


def find_scheme(sentences: Sequence[Sequence[str]]) -> Scheme:
    """Infers the scheme of a source from all its tags."""
    tags = set(chain.from_iterable(sentences))
    prefixes = {tag[0] for tag in filter(_TAG.fullmatch, tags)}
    # If no tag has a prefix such as B-, the scheme is plain. A source with only O has the scheme
    # BIO.
    if prefixes.isdisjoint("BISU"):
        return "plain" if tags - {"O"} else "BIO"
    # Only BIOES and BILOU have prefixes for last and single words.
    if not prefixes.isdisjoint("ESLU"):
        return "BIOES"
    # An I- that starts a span is an error in BIO, but the rule in IOB1. Tolerate a few B- tags
    # where IOB1 would write I-: CoNLL-2003 has two.
    starts, begins = (len(first_tags(sentences, prefix)) for prefix in "IB")
    return "IOB1" if starts > begins else "BIO"


def faulty_tags(sentences: Sequence[Sequence[str]], scheme: Scheme) -> list[Located]:
    """Returns the tags that no sentence of a scheme has, or that break the scheme BIOES.

    In the scheme BIO, an ``I-`` may also be faulty; see ``first_tags``.
    """
    if scheme == "plain":
        return []
    faulty = [(at, tag) for at, _, tag in _neighbors(sentences) if not _TAG.fullmatch(tag)]
    return faulty or list(_misplaced_in_bioes(sentences) if scheme == "BIOES" else ())


def first_tags(sentences: Sequence[Sequence[str]], prefix: str) -> list[Located]:
    """Returns the tags with a prefix that do not continue a span of their type.

    The type is the text after the prefix; the type of ``O`` is empty.
    """
    return [
        (at, tag)
        for at, previous, tag in _neighbors(sentences)
        if tag[0] == prefix and tag[2:] != previous[2:]
    ]


def to_bio(tags: Sequence[str], scheme: Scheme) -> tuple[str, ...]:
    """Converts the tags of a sentence from a scheme to BIO; an ``I-`` may start a span."""
    if scheme == "plain":
        return tuple(tags)
    prefixed = [_AS_BIO.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]
    return tuple(
        f"B-{tag[2:]}" if tag[:2] == "I-" and tag[2:] != previous[2:] else tag
        for previous, tag in pairwise(["O", *prefixed])
    )


def span_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels of a model for these tags: ``O`` first, then the other labels by name.

    Every type of span gets both ``B-`` and ``I-``; words outside of all spans have ``O``.
    """
    labels = set(tags)
    types = {tag[2:] for tag in labels if tag.startswith(("B-", "I-"))}
    if types:
        # A type may occur only in spans of one word; the model still needs the I- of this type.
        labels |= {"O", *(f"{mark}-{type}" for mark, type in product("BI", types))}
    return tuple(sorted(labels, key=lambda tag: (tag != "O", tag)))


def _neighbors(sentences: Sequence[Sequence[str]]) -> Iterator[tuple[Location, str, str]]:
    """Yields each tag with its location and the tag before it; the ends of a sentence are ``O``."""
    for i, sentence in enumerate(sentences):
        for j, (previous, tag) in enumerate(pairwise(["O", *sentence, "O"])):
            yield (i, j), previous, tag


def _misplaced_in_bioes(sentences: Sequence[Sequence[str]]) -> Iterator[Located]:
    """Finds tags that break the scheme: they continue no span of their type, or leave one open."""
    for (i, j), previous, tag in _neighbors(sentences):
        # The type of the span that is open after the previous tag, and of the span that `tag`
        # continues.
        within = previous[2:] * (previous[0] in "BI")
        needed = tag[2:] * (tag[0] in "IEL")
        if within != needed:
            yield ((i, j - 1), previous) if tag == "O" else ((i, j), tag)
