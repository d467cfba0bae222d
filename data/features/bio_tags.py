"""Schemes that mark spans of words by a tag a word, and their conversion to BIO.

========  ==================================================================================
BIO       (IOB2) every span begins with ``B-``, its other words have ``I-``
IOB1      spans have ``I-``; ``B-`` only begins one that follows another of its type
BIOES     (BILOU) the last word has ``E-`` (``L-``), a span of one word ``S-`` (``U-``)
plain     one tag per word that is not of a span: parts of speech
========  ==================================================================================

Ramshaw & Marcus 1995 (IOB1); Ratinov & Roth 2009 (BILOU). Which one a source has is found
from all of its tags. In BIO spans compare and score alike, whatever they came from.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from ..errors import DataError, UserError

Scheme = Literal["BIO", "IOB1", "BIOES", "plain"]

_TAG = re.compile(r"O|[BIESLU]-.+")
_AS_BIO = {"B": "B", "S": "B", "U": "B", "I": "I", "E": "I", "L": "I"}
Place = tuple[int, int]
"""A sentence, and a word of it."""


class InconsistentTagError(UserError):
    """A tag that does not fit its source's scheme.

    Attributes:
        sentence: Of which sentence.
        word: Which word of it.
        problem: What is wrong, for a message that begins with the location.
    """

    def __init__(self, location: Place, problem: str) -> None:
        super().__init__(problem)
        self.sentence, self.word = location
        self.problem = problem

    def at(self, location: str) -> DataError:
        """The error to show."""
        return DataError(f"{location} has {self.problem}")


def find_scheme(sentences: Sequence[Sequence[str]], strict: bool = True) -> Scheme:
    """Finds the scheme of all tags of a source, and checks that each fits it.

    Args:
        sentences: The tags of each sentence.
        strict: Whether to refuse an ``I-`` that continues nothing in the scheme BIO.

    Raises:
        InconsistentTagError: Some tags are of one scheme and some of another.
    """
    tags = {tag for sentence in sentences for tag in sentence}
    if not any(tag.startswith(("B-", "I-", "S-", "U-")) for tag in tags):
        return "plain" if tags - {"O"} else "BIO"
    for location, tag in _places(sentences):
        if not _TAG.fullmatch(tag):
            raise InconsistentTagError(
                location, f"the tag {tag!r}, where others mark spans: write O, B-TYPE or I-TYPE"
            )
    if any(tag[0] in "ESLU" for tag in tags):
        _refuse_first(_misplaced_in_bioes(sentences), "BIOES")
        return "BIOES"
    not_bio = list(_misplaced(sentences, "I"))
    if not not_bio:
        return "BIO"
    # A B- that IOB1 does without begins a span all the same: CoNLL-2003 has two of them.
    if len(not_bio) > sum(1 for _ in _misplaced(sentences, "B")):
        return "IOB1"
    if strict:
        _refuse_first(iter(not_bio), "BIO")
    return "BIO"


def misplaced_inside(sentences: Sequence[Sequence[str]]) -> list[Place]:
    """Finds every ``I-`` that continues nothing; as IOB1 ``to_bio`` makes a ``B-`` of it."""
    return [location for location, _ in _misplaced(sentences, "I")]


def to_bio(tags: Sequence[str], scheme: Scheme) -> tuple[str, ...]:
    """Converts the tags of a sentence, which are of the scheme, to BIO."""
    if scheme in ("plain", "BIO"):
        return tuple(tags)
    if scheme == "BIOES":
        return tuple(tag if tag == "O" else _AS_BIO[tag[0]] + tag[1:] for tag in tags)
    before = ["O", *tags]
    return tuple(
        f"B-{tag[2:]}" if tag[0] == "I" and not _continues(tag, previous) else tag
        for previous, tag in zip(before, tags, strict=False)
    )


def span_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """The labels that a model of these tags needs, ``O`` first, then by name.

    Every type of span gets both ``B-`` and ``I-``, and what is outside of spans ``O``.
    """
    labels = set(tags)
    types = {tag[2:] for tag in labels if tag.startswith(("B-", "I-"))}
    if types:
        labels |= {"O"} | {f"{mark}-{type}" for mark in "BI" for type in types}
    return tuple(sorted(labels, key=lambda tag: (tag != "O", tag)))


def count_spans(sentences: Iterable[Sequence[str]]) -> int:
    """The number of spans in BIO tags."""
    return sum(tag.startswith("B-") for sentence in sentences for tag in sentence)


def _continues(tag: str, previous: str) -> bool:
    """Whether a tag is of the type of the one before it."""
    return previous != "O" and previous[2:] == tag[2:]


def _places(sentences: Sequence[Sequence[str]]) -> Iterator[tuple[Place, str]]:
    for i, sentence in enumerate(sentences):
        for j, tag in enumerate(sentence):
            yield (i, j), tag


def _misplaced(sentences: Sequence[Sequence[str]], prefix: str) -> Iterator[tuple[Place, str]]:
    """The tags with a prefix that nothing of their type comes before."""
    for (i, j), tag in _places(sentences):
        if tag[0] == prefix and not (j and _continues(tag, sentences[i][j - 1])):
            yield (i, j), tag


def _misplaced_in_bioes(sentences: Sequence[Sequence[str]]) -> Iterator[tuple[Place, str]]:
    """The tags that do not continue what is open, or leave it open."""
    for i, sentence in enumerate(sentences):
        following = [*sentence[1:], "O"]
        within = ""  # the type of the span that is not closed yet
        for j, (tag, after) in enumerate(zip(sentence, following, strict=False)):
            if (tag[2:] if tag[0] in "IEL" else "") != within:
                yield (i, j), tag
            within = tag[2:] if tag[0] in "BI" else ""
            if within and after == "O":
                yield (i, j), tag


def _refuse_first(misplaced: Iterator[tuple[Place, str]], scheme: str) -> None:
    for location, tag in misplaced:
        raise InconsistentTagError(
            location,
            f"the tag {tag!r}, which does not fit the tags around it in the scheme {scheme} of "
            "the rest: correct it",
        )
