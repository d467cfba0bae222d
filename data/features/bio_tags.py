"""Schemes that mark spans of words with one tag per word, and their conversion to BIO.

========  ==================================================================================
BIO       (IOB2) the first word of a span has ``B-``, the others ``I-``
IOB1      all words have ``I-``; ``B-`` begins only a span right after one of the same type BIOES
(BILOU) the last word has ``E-`` (``L-``), a span of one word ``S-`` (``U-``) plain     tags of
single words without spans: parts of speech ========
==================================================================================

Ramshaw & Marcus 1995 (IOB1); Ratinov & Roth 2009 (BILOU). The scheme of a source is inferred from
all its tags. After conversion to BIO, spans of all schemes are compared and scored alike.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from ..common.errors import DataError, UserError

Scheme = Literal["BIO", "IOB1", "BIOES", "plain"]

_TAG = re.compile(r"O|[BIESLU]-.+")
_AS_BIO = {"B": "B", "S": "B", "U": "B", "I": "I", "E": "I", "L": "I"}
Location = tuple[int, int]
"""The index of a sentence, and the index of a word in this sentence."""


class InconsistentTagError(UserError):
    """A tag does not fit the scheme of its source.

    Attributes:
      sentence: The index of the sentence.
      word: The index of the word in it.
      problem: What is wrong, for a message that begins with the location.
    """

    def __init__(self, location: Location, problem: str) -> None:
        super().__init__(problem)
        self.sentence, self.word = location
        self.problem = problem

    def at(self, location: str) -> DataError:
        """Returns the error with the location of the tag in its file."""
        return DataError(f"{location} has {self.problem}")


def find_scheme(sentences: Sequence[Sequence[str]], strict: bool = True) -> Scheme:
    """Infers the scheme of all tags of a source, and checks that every tag fits it.

    Args:
      sentences: The tags of each sentence.
      strict: Whether to reject an ``I-`` that does not continue a span in the scheme BIO.

    Raises:
      InconsistentTagError: The tags have different schemes.
    """
    # If no tag has a prefix such as B-, the scheme is plain. A source with only O has the scheme
    # BIO.
    tags = {tag for sentence in sentences for tag in sentence}
    if not any(tag.startswith(("B-", "I-", "S-", "U-")) for tag in tags):
        return "plain" if tags - {"O"} else "BIO"
    # If some tags mark spans, all tags must be O or mark spans.
    for location, _, tag in _neighbors(sentences):
        if not _TAG.fullmatch(tag):
            raise InconsistentTagError(
                location, f"the tag {tag!r}, but other tags mark spans: write O, B-TYPE or I-TYPE"
            )
    # Only BIOES and BILOU have prefixes for last and single words.
    if any(tag[0] in "ESLU" for tag in tags):
        _refuse_first(_misplaced_in_bioes(sentences), "BIOES")
        return "BIOES"
    # An I- that starts a span is an error in BIO, but the rule in IOB1. Tolerate a few B- tags
    # where IOB1 would write I-: CoNLL-2003 has two.
    not_bio = list(_misplaced(sentences, "I"))
    if len(not_bio) > sum(1 for _ in _misplaced(sentences, "B")):
        return "IOB1"
    if strict:
        _refuse_first(iter(not_bio), "BIO")
    return "BIO"


def misplaced_inside(sentences: Sequence[Sequence[str]]) -> list[Location]:
    """Finds every ``I-`` that does not continue a span; ``to_bio`` with IOB1 writes ``B-``."""
    return [location for location, _ in _misplaced(sentences, "I")]


def to_bio(tags: Sequence[str], scheme: Scheme) -> tuple[str, ...]:
    """Converts the tags of a sentence from a scheme to BIO."""
    if scheme in ("plain", "BIO"):
        return tuple(tags)
    if scheme == "BIOES":
        return tuple(tag if tag == "O" else _AS_BIO[tag[0]] + tag[1:] for tag in tags)
    # IOB1: an I- that does not continue a span starts a span.
    return tuple(
        f"B-{tag[2:]}" if tag[0] == "I" and not _continues(tag, previous) else tag
        for previous, tag in pairwise(["O", *tags])
    )


def span_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels of a model for these tags: ``O`` first, then the other labels by name.

    Every type of span gets both ``B-`` and ``I-``; words outside of all spans have ``O``.
    """
    labels = set(tags)
    types = {tag[2:] for tag in labels if tag.startswith(("B-", "I-"))}
    if types:
        # A type may occur only in spans of one word; the model still needs the I- of this type.
        labels |= {"O"} | {f"{mark}-{type}" for mark in "BI" for type in types}
    return tuple(sorted(labels, key=lambda tag: (tag != "O", tag)))


def _continues(tag: str, previous: str) -> bool:
    """Returns whether a tag has the same type as the tag before it."""
    return previous != "O" and previous[2:] == tag[2:]


def _neighbors(sentences: Sequence[Sequence[str]]) -> Iterator[tuple[Location, str, str]]:
    """Yields each tag with its location and the tag before it; the ends of a sentence are ``O``."""
    for i, sentence in enumerate(sentences):
        for j, (previous, tag) in enumerate(pairwise(["O", *sentence, "O"])):
            yield (i, j), previous, tag


def _misplaced(sentences: Sequence[Sequence[str]], prefix: str) -> Iterator[tuple[Location, str]]:
    """Finds the tags with a prefix that do not follow a tag of their type."""
    for location, previous, tag in _neighbors(sentences):
        if tag[0] == prefix and not _continues(tag, previous):
            yield location, tag


def _misplaced_in_bioes(sentences: Sequence[Sequence[str]]) -> Iterator[tuple[Location, str]]:
    """Finds tags that break the scheme: they continue no span of their type, or leave one open."""
    for (i, j), previous, tag in _neighbors(sentences):
        # The type of the span that is open after the previous tag, and of the span that `tag`
        # continues.
        within = previous[2:] * (previous[0] in "BI")
        needed = tag[2:] * (tag[0] in "IEL")
        if within != needed:
            yield ((i, j - 1), previous) if tag == "O" else ((i, j), tag)


def _refuse_first(misplaced: Iterator[tuple[Location, str]], scheme: str) -> None:
    for location, tag in misplaced:
        raise InconsistentTagError(
            location,
            f"the tag {tag!r}, which does not fit the tags around it in the scheme {scheme}: "
            "correct it",
        )
