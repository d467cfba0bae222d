"""Converts schemes that mark spans of words with one tag per word to the scheme BIO.

========  ==================================================================================
BIO       (IOB2) the first word of a span has ``B-``, the other words have ``I-``
IOB1      words have ``I-``; ``B-`` begins a span that directly follows one of the same type
BIOES     (BILOU) as BIO, but a last word has ``E-`` (``L-``), a single word ``S-`` (``U-``)
plain     tags of single words instead of spans, such as parts of speech
========  ==================================================================================

Ramshaw & Marcus 1995 (IOB1); Ratinov & Roth 2009 (BILOU). The scheme of a source is inferred from
all of its tags. After conversion to BIO, spans are compared and scored in the same way for all
schemes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, product
from typing import Literal

Scheme = Literal["BIO", "IOB1", "BIOES", "plain"]

_TAG = re.compile(r"O|[BIESLU]-.+")
_AS_BIO = {"S-": "B-", "U-": "B-", "E-": "I-", "L-": "I-"}
Location = tuple[int, int]
"""The index of a sentence, and the index of a word in the sentence."""


Located = tuple[Location, str]
"""The location of a tag, and the tag."""


def find_scheme(sentences: Sequence[Sequence[str]]) -> Scheme:
    """Infers the scheme of a source from all of its tags."""
    tags = set(chain.from_iterable(sentences))
    prefixes = {tag[0] for tag in filter(_TAG.fullmatch, tags)}
    # If no tag has a prefix such as B-, the scheme is plain. If all tags are O, the scheme is BIO.
    if prefixes.isdisjoint("BISU"):
        return "plain" if tags - {"O"} else "BIO"
    # Only BIOES and BILOU have prefixes for the last word of a span and for single-word spans.
    if not prefixes.isdisjoint("ESLU"):
        return "BIOES"
    # A span that starts with I- is an error in BIO, but normal in IOB1. Tolerate a few B- tags
    # where IOB1 requires I-: CoNLL-2003 contains two.
    starts, begins = (len(first_tags(sentences, prefix)) for prefix in "IB")
    return "IOB1" if starts > begins else "BIO"


def faulty_tags(sentences: Sequence[Sequence[str]], scheme: Scheme) -> list[Located]:
    """Returns tags that are invalid in a scheme or, for BIOES, in an invalid position.

    In the scheme BIO, an ``I-`` may also be in an invalid position; see ``first_tags``.
    """
    if scheme == "plain":
        return []
    faulty = [(at, tag) for at, _, tag in _neighbors(sentences) if not _TAG.fullmatch(tag)]
    return faulty or list(_misplaced_in_bioes(sentences) if scheme == "BIOES" else ())


def first_tags(sentences: Sequence[Sequence[str]], prefix: str) -> list[Located]:
    """Returns the tags that have a given prefix but do not continue a span of their type.

    The type of a tag is the text after its prefix. The type of ``O`` is empty.
    """
    return [
        (at, tag)
        for at, previous, tag in _neighbors(sentences)
        if tag[0] == prefix and tag[2:] != previous[2:]
    ]


def to_bio(tags: Sequence[str], scheme: Scheme) -> tuple[str, ...]:
    """Converts the tags of a sentence to BIO. In the input, a span may start with ``I-``."""
    if scheme == "plain":
        return tuple(tags)
    prefixed = [_AS_BIO.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]
    return tuple(
        f"B-{tag[2:]}" if tag[:2] == "I-" and tag[2:] != previous[2:] else tag
        for previous, tag in pairwise(["O", *prefixed])
    )


def span_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels of a model for some tags: ``O``, then all others in sorted order.

    For each type of span, there are two labels, with ``B-`` and ``I-``. Words outside all spans
    have the label ``O``.
    """
    labels = set(tags)
    types = {tag[2:] for tag in labels if tag.startswith(("B-", "I-"))}
    if types:
        # Even if all spans of a type have only one word, the model needs the I- label of this type.
        labels |= {"O", *(f"{mark}-{type}" for mark, type in product("BI", types))}
    return tuple(sorted(labels, key=lambda tag: (tag != "O", tag)))


def _neighbors(sentences: Sequence[Sequence[str]]) -> Iterator[tuple[Location, str, str]]:
    """Yields the location of each tag, the previous tag and the tag; sentences end with ``O``."""
    for i, sentence in enumerate(sentences):
        for j, (previous, tag) in enumerate(pairwise(["O", *sentence, "O"])):
            yield (i, j), previous, tag


def _misplaced_in_bioes(sentences: Sequence[Sequence[str]]) -> Iterator[Located]:
    """Finds tags that do not continue a span of their type, or that leave a span unfinished."""
    for (i, j), previous, tag in _neighbors(sentences):
        # `within` is the type of the span that the previous tag leaves unfinished, and `needed` is
        # the type of the span that `tag` continues.
        within = previous[2:] * (previous[0] in "BI")
        needed = tag[2:] * (tag[0] in "IEL")
        if within != needed:
            yield ((i, j - 1), previous) if tag == "O" else ((i, j), tag)
