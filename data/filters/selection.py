"""Selects documents based on their texts, for example by a classifier from ``train``."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from .conditions import LeftOut

# Number of texts per call, which is enough for a classifier to fill its batches.
_AT_ONCE = 1024


class Selector(Protocol):
    """A function that decides which documents are kept; see ``train.QualityClassifier``.

    Each decision depends only on the text. The selector must be picklable, because the worker
    processes of ``prepare`` also select documents.
    """

    @property
    def name(self) -> str:
        """The reason for leaving out a text, such as ``the classifier runs/quality below 0.5``."""
        ...

    @property
    def fingerprint(self) -> str:
        """A stable hash of all inputs that determine the decisions."""
        ...

    def __call__(self, texts: Sequence[str], /) -> Sequence[bool]:
        """Returns whether each text is kept."""
        ...


def decisions(selector: Selector, texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields each text and whether it is kept. The selector is called on batches of texts."""
    remaining = iter(texts)
    while chunk := list(islice(remaining, _AT_ONCE)):
        yield from zip(chunk, map(bool, selector(chunk)), strict=True)


def count_left_out(left_out: LeftOut, selector: Selector, number: int) -> None:
    """Counts the documents that a selector leaves out, even if their number is 0."""
    left_out[selector.name] += number
