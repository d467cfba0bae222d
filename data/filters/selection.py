"""Selects documents by their texts, for example with a classifier from ``train``."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from .conditions import LeftOut

# Texts per call: enough for a classifier to fill its batches.
_AT_ONCE = 1024


class Selector(Protocol):
    """Decides which documents are kept; see ``train.QualityClassifier``.

    A decision depends only on the text. The selector must be picklable, because the workers of
    ``prepare`` also select documents.
    """

    @property
    def name(self) -> str:
        """The reason for leaving out documents: ``the classifier runs/quality below 0.5``."""
        ...

    @property
    def fingerprint(self) -> str:
        """A stable hash of everything that determines the decisions."""
        ...

    def __call__(self, texts: Sequence[str], /) -> Sequence[bool]:
        """Returns for each text whether it is kept."""
        ...


def decisions(selector: Selector, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields each text and whether a selector keeps it; calls the selector on batches of texts."""
    remaining = iter(texts)
    while chunk := list(islice(remaining, _AT_ONCE)):
        yield from zip(chunk, map(bool, selector(chunk)), strict=True)


def count_left_out(left_out: LeftOut, selector: Selector, number: int) -> None:
    """Adds to the counts how many documents a selector leaves out, even if the number is 0."""
    left_out[selector.name] += number
