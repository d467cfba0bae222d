"""Divides documents into splits by a hash of each document's text.

A document stays in its split if files are renamed, reordered or extended.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..common.errors import DataError, counted
from ..common.fields import require

Split = Literal["train", "validation"]

_SPLITS: tuple[Split, ...] = ("train", "validation")


def text_digest(text: str) -> bytes:
    """Returns the hash of a document's text as 16 bytes, with the most significant byte first."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class HashSplit:
    """A rule that divides documents: digests below a limit belong to the validation split.

    Attributes:
      limit: The exclusive upper bound of the digests in the validation split, 16 bytes; empty if
        that split is empty.
    """

    limit: bytes

    @classmethod
    def of(cls, digests: Iterable[bytes], fraction: float, name: str) -> "HashSplit":
        """Chooses the limit so that no split is empty.

        Args:
          digests: The digests of the documents.
          fraction: The fraction of documents for validation, in [0, 1).
          name: The source's name, for error messages.

        Raises:
          DataError: All documents are equal, or there is none, and ``fraction`` is not 0.
        """
        if fraction == 0:
            return cls(b"")
        # Equal texts have equal digests, so they are always in the same split.
        ordered = sorted(set(digests))
        require(
            len(ordered) > 1,
            f"source {name!r} has {counted(len(ordered), 'different text')}, but a division "
            f"into splits requires two: add documents (text:GLOB#block or #line divides a "
            f"file), or "
            "set validation_fraction 0 and name a separate source for validation",
            DataError,
        )
        # The smallest digest is always in validation, and the largest is always in training.
        return cls(min(max(cls.of_each(fraction).limit, ordered[1]), ordered[-1]))

    @classmethod
    def of_each(cls, fraction: float) -> "HashSplit":
        """Computes the limit from ``fraction`` alone, so a split may be empty."""
        # Digests are uniformly distributed, so about this fraction of them is below the limit.
        return cls(int(fraction * 2**128).to_bytes(16, "big"))

    def split(self, digest: bytes) -> Split:
        """Returns the split of a document."""
        return "validation" if digest < self.limit else "train"

    def splits(self, digests: Iterable[bytes]) -> tuple[Split, ...]:
        """Returns the splits that contain at least one of the given documents."""
        found = set(map(self.split, digests))
        return tuple(split for split in _SPLITS if split in found)
