"""Hashes of texts."""

import hashlib
from collections.abc import Iterable


def digest(*parts: Iterable[str]) -> str:
    """Hashes texts in order, to 32 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        for text in part:
            raw = text.encode()
            # The length keeps ["ab", "c"] and ["a", "bc"] apart.
            hasher.update(len(raw).to_bytes(8, "big") + raw)
    return hasher.hexdigest()
