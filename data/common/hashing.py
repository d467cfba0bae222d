"""Hashes of texts."""

import hashlib
from collections.abc import Iterable


def digest(*parts: Iterable[str]) -> str:
    """Hashes texts in order, to 32 hexadecimal digits."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        for text in part:
            raw = text.encode()
            # The length keeps ["ab", "c"] and ["a", "bc"] apart.
            whole.update(len(raw).to_bytes(8, "big") + raw)
    return whole.hexdigest()
