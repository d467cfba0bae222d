"""Selects documents by their texts, for example with a classifier from ``train``."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from ..common.atomic_io import write_file
from .conditions import LeftOut

_AT_ONCE = 1024


class Selector(Protocol):
    """Decides which documents are kept; see ``train.QualityClassifier``.

    A decision depends on the text alone. The selector must be picklable, because workers of
    ``prepare`` select documents, too.
    """

    @property
    def name(self) -> str:
        """The reason stated for documents left out: ``the classifier runs/quality below 0.5``."""
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


def cached_decisions(
    selector: Selector, texts: Iterable[str], content: str, cache: Path
) -> np.ndarray:
    """Returns for each text whether a selector keeps it, bool [n], from the cache if possible.

    Args:
      selector: The selector.
      texts: The texts, which are not read if the decisions are cached.
      content: A hash of the texts and their order.
      cache: The folder of cached data.
    """
    key = hashlib.blake2b(f"{content} {selector.fingerprint}".encode(), digest_size=16).hexdigest()
    path = cache / "selections" / f"{key}.npy"
    if not path.is_file():
        kept = [keep for _, keep in decisions(selector, texts)]
        file = io.BytesIO()
        np.save(file, np.array(kept, np.bool_))
        write_file(path, file.getvalue())
    return np.load(path)


def count_left_out(left_out: LeftOut, selector: Selector, number: int) -> None:
    """Adds the number of documents that a selector leaves out to the counts, even if it is 0."""
    left_out[selector.name] += number
