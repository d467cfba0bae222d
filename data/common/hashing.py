"""Computes hashes of texts."""

import hashlib
from collections.abc import Iterable


def digest(*parts: Iterable[str]) -> str:
    """Returns a hash of texts in order, as 32 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        for text in part:
            raw = text.encode()
            # Include the length, so that ["ab", "c"] and ["a", "bc"] have different hashes.
            hasher.update(len(raw).to_bytes(8, "big") + raw)
    return hasher.hexdigest()
