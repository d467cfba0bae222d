"""Implements the simplest tokenizer, whose vocabulary consists of single characters."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.fields import require
from ..common.json_text import optional_object
from ..common.numbering import numbered
from .base import END_OF_TEXT, Encoded, SpecialIds, printable
from .export import ExportedTokenizer
from .folder import checked

UNKNOWN = "<unk>"
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_NUM_SPECIAL = 2


class CharacterTokenizer(ExportedTokenizer):
    """Assigns an id to each character; the first ids are ``<|endoftext|>`` (0) and ``<unk>`` (1).

    A character that is not in the training text is encoded as ``<unk>``, which is decoded to
    U+FFFD. ``<unk>`` represents text, so decoding does not skip it when it skips special tokens.

    Attributes:
      characters: The distinct characters in the vocabulary, in the order of their ids.
    """

    kind = "characters"
    joins_bytes = True

    def __init__(self, characters: str) -> None:
        """Creates the tokenizer.

        Args:
          characters: Distinct characters, in the order of their ids.
        """
        self.characters = characters
        self._ids = {c: i for i, c in enumerate(characters, start=_NUM_SPECIAL)}
        self.vocab_size = len(characters) + _NUM_SPECIAL
        self.special_ids = SpecialIds(bos=0, eos=0, unk=1)
        self.fingerprint = hashlib.blake2b(self._json(), digest_size=16).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """Creates a tokenizer for all characters of the texts, in the order of code points."""
        seen: set[str] = set()
        for text in texts:
            seen.update(text)
        # Sort, so that the ids do not depend on the order of the texts.
        return cls("".join(sorted(seen)))

    @classmethod
    def load(cls, file: Path) -> "CharacterTokenizer":
        """Loads the tokenizer from the file that ``save`` wrote.

        Raises:
          DataError: The file is damaged, or its characters are missing or not unique.
        """
        characters = checked(optional_object(file).get("characters"), str, file, "characters")
        problem = f"{file}: 'characters' must be different from each other: restore the file"
        require(len(set(characters)) == len(characters), problem, DataError)
        return cls(characters)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """See ``Tokenizer``; there is no template, so no special tokens are added."""
        return self.encode(text), [(i, i + 1) for i in range(len(text))]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See ``Tokenizer``."""
        return [self._ids.get(c, 1) for c in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        return list(map(self.encode, texts))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        special = ("" if skip_special_tokens else END_OF_TEXT, UNKNOWN_CHARACTER)
        return "".join(
            special[i] if i < _NUM_SPECIAL else self.characters[i - _NUM_SPECIAL] for i in ids
        )

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        if id < _NUM_SPECIAL:
            return (END_OF_TEXT, UNKNOWN)[id]
        return printable(self.characters[id - _NUM_SPECIAL])

    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; writes ``characters.json``."""
        write_file(Path(folder) / "characters.json", self._json())

    def backend(self) -> tokenizers.Tokenizer:
        """See ``ExportedTokenizer``; it is BPE without merges, with the characters as pieces."""
        ids = numbered([END_OF_TEXT, UNKNOWN, *self.characters])
        backend = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=UNKNOWN, fuse_unk=False))
        # Decode the unknown token to U+FFFD, as `decode` does.
        unknown = decoders.Replace(UNKNOWN, UNKNOWN_CHARACTER)
        backend.decoder = decoders.Sequence([unknown, decoders.Fuse()])
        backend.add_special_tokens([AddedToken(END_OF_TEXT)])
        return backend

    def _json(self) -> bytes:
        content = {"kind": self.kind, "characters": self.characters}
        return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
