"""Division of documents into splits by the hash of their texts.

A document stays in its split when files are renamed, reordered or extended.
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
    """Hashes the text of a document; the order of the 16 bytes is the order of the hash values."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class HashSplit:
    """A division into splits: documents with a digest below a limit are for validation.

    Attributes:
      limit: The exclusive upper bound of validation digests, 16 bytes; empty if nothing is for
          validation.
    """

    limit: bytes

    @classmethod
    def of(cls, digests: Iterable[bytes], fraction: float, name: str) -> "HashSplit":
        """Chooses the limit so that no split is empty.

        Args:
          digests: The digests of the documents.
          fraction: The fraction for validation, in [0, 1).
          name: The source's name, for the message.

        Raises:
          DataError: All documents are equal, and ``fraction`` is not 0.
        """
        if fraction == 0:
            return cls(b"")
        # Equal texts have equal digests and always share a split.
        ordered = sorted(set(digests))
        require(
            len(ordered) > 1,
            f"source {name!r} has {counted(len(ordered), 'different text')}, but a division "
            f"into splits requires two: add documents (text:GLOB#block or #line divides a "
            f"file), or "
            "set validation_fraction 0 and name a separate source for validation",
            DataError,
        )
        # Keep the smallest digest in validation and the largest in training.
        return cls(min(max(cls.of_each(fraction).limit, ordered[1]), ordered[-1]))

    @classmethod
    def of_each(cls, fraction: float) -> "HashSplit":
        """Computes the limit only from ``fraction``; a split may be empty."""
        # Digests are uniformly distributed, so about `fraction` of them is below the limit.
        return cls(int(fraction * 2**128).to_bytes(16, "big"))

    def split(self, digest: bytes) -> Split:
        """Returns the split of a document."""
        return "validation" if digest < self.limit else "train"

    def splits(self, digests: Iterable[bytes]) -> tuple[Split, ...]:
        """Returns the splits that contain at least one of the given documents."""
        found = set(map(self.split, digests))
        return tuple(split for split in _SPLITS if split in found)
