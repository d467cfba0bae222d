"""Adds sentinels to a vocabulary: the tokens that mark gaps in a text and the spans that fill them.

T5 introduced sentinels (Raffel et al. 2020, "Exploring the limits of transfer learning", section
3.1.4). Sentinel number i is named ``<extra_id_i>`` and has the id V - 1 - i, so sentinels are
counted from the end of the vocabulary. As in transformers, the name of a sentinel in a text is read
as the sentinel, so that users can mark gaps.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.fields import require, require_type
from ..common.json_text import optional_object
from .base import SPACE, Encoded, SpecialIds, Tokenizer, encode_around
from .export import Export, ExportedTokenizer
from .folder import Settings
from .frame import Frame
from .sentencepiece_model import UNIGRAM, parse_model

FILE = "sentinels.json"
"""The file that states how many sentinels a folder's vocabulary has."""
NUMBER = 100
"""The number of sentinels in every published T5 vocabulary."""
NAME = re.compile(r"<extra_id_([0-9]{1,9})>")


class SentinelTokenizer(ExportedTokenizer):
    """A tokenizer with additional sentinels, which follow its last token.

    If the vocabulary has no token that starts a text, targets start with the padding token. The
    blanks before a sentinel are part of the gap.

    Attributes:
      base: The tokenizer for the text between sentinels.
      number: The number of sentinels.
    """

    def __init__(self, base: Tokenizer, number: int = NUMBER) -> None:
        """Creates the tokenizer.

        Args:
          base: The tokenizer for the text between sentinels.
          number: The number of sentinels.

        Raises:
          DataError: The number is below 1.
        """
        require(number >= 1, f"the number of sentinels must be at least 1, got {number}", DataError)
        self.base, self.number = base, number
        self.kind = base.kind
        self.vocab_size = base.vocab_size + number
        self.sentinels = tuple(range(self.vocab_size - 1, base.vocab_size - 1, -1))
        # If the number in a name is too large or has leading zeros, the name is ordinary text.
        self._ids = {f"<extra_id_{i}>": id for i, id in enumerate(self.sentinels)}
        self.special_ids = started_by_padding(base.special_ids)
        content = f"{base.fingerprint} {number} sentinels"
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def frame(self) -> Frame:
        """See ``Tokenizer``."""
        return self.base.frame

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """See ``Tokenizer``."""
        encoded = encode_around(text, self._find(text), self._encode_between)
        return self.frame.join_offsets(*encoded) if add_special_tokens else encoded

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        # A text with sentinels is encoded part by part, and the other texts in one call.
        has_sentinels = [bool(self._find(text)) for text in texts]
        plain = [text for text, found in zip(texts, has_sentinels, strict=True) if not found]
        rows = iter(self.base.encode_batch(plain))
        return [
            self.encode(text, False) if found else next(rows)
            for text, found in zip(texts, has_sentinels, strict=True)
        ]

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """Returns the start, the end and the id of each sentinel in a text."""
        matches = [match for match in NAME.finditer(text) if match[0] in self._ids]
        # The tokens of a word include the blank before it, so the blank belongs to the gap.
        return [(len(text[: m.start()].rstrip()), m.end(), self._ids[m[0]]) for m in matches]

    def _encode_between(self, text: str) -> Encoded:
        return self.base.encode_with_offsets(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``; sentinels count as special tokens."""
        ids = list(map(int, ids))
        if skip_special_tokens:
            return self.base.decode(list(itertools.filterfalse(self.sentinels.__contains__, ids)))
        parts: list[str] = []
        for is_sentinel, group in itertools.groupby(ids, self.sentinels.__contains__):
            between = list(group)
            if is_sentinel:
                parts += map(self.token, between)
                continue
            text = self.base.decode(between, skip_special_tokens=False)
            # sentencepiece drops the space before the first word that it decodes.
            starts_word = self.base.token(between[0]).startswith(SPACE)
            parts.append(f" {text}" if parts and starts_word and text[:1] != " " else text)
        return "".join(parts)

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        first = self.base.vocab_size
        return self.base.token(id) if id < first else f"<extra_id_{self.vocab_size - 1 - id}>"

    @property
    def _exported(self) -> ExportedTokenizer:
        problem = f"a {self.kind} tokenizer cannot be written for transformers"
        return require_type(self.base, ExportedTokenizer, problem, DataError)

    def backend(self) -> tokenizers.Tokenizer:
        """See ``ExportedTokenizer``."""
        backend = self._exported.backend()
        # Added tokens get ascending ids, but sentinel numbers descend, so reverse the order.
        names = map(self.token, reversed(self.sentinels))
        options = {"normalized": False, "lstrip": True}
        backend.add_special_tokens([AddedToken(name, **options) for name in names])
        return backend

    def export_without_backend(self) -> Export | None:
        """See ``ExportedTokenizer``; transformers' class for T5 adds the sentinels itself."""
        base = self._exported.export_without_backend()
        if base is None:
            return None
        (model,) = base.files.values()
        # transformers' class requires a unigram model that puts a space before each text and merges
        # repeated spaces.
        proto = parse_model(model)
        rules = proto.normalizer_spec
        settings = (rules.add_dummy_prefix, rules.remove_extra_whitespaces)
        require(
            settings == (True, True) and proto.trainer_spec.model_type == UNIGRAM,
            "this sentencepiece model with sentinels cannot be written for transformers, whose "
            "class needs unigrams, a space before each text and single spaces: train a vocabulary "
            "with flaxzoo",
            DataError,
        )
        return Export(
            "spiece.model; transformers' T5Tokenizer gives the same ids and texts",
            {"spiece.model": model},
            {"tokenizer_class": "T5Tokenizer", "extra_ids": self.number},
        )

    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; writes the files of the base and ``sentinels.json``."""
        self.base.save_vocabulary(folder)
        write_file(Path(folder) / FILE, json.dumps({"number": self.number}).encode())


def started_by_padding(special: SpecialIds) -> SpecialIds:
    """Returns the special tokens; without a begin token, uses the padding token as such."""
    return special if special.bos is not None else dataclasses.replace(special, bos=special.pad)


def sentinels_among(names: Iterable[tuple[int, str]]) -> tuple[int, ...]:
    """Returns the ids of all sentinels among some tokens, in the order of the sentinel numbers."""
    numbered = {int(match[1]): id for id, name in names if (match := NAME.fullmatch(name))}
    return tuple(numbered[number] for number in sorted(numbered))


def with_sentinels(tokenizer: Tokenizer, file: Path) -> Tokenizer:
    """Adds sentinels to a tokenizer if its folder has ``sentinels.json``.

    Args:
      tokenizer: The tokenizer without sentinels, which a file of the folder defines.
      file: The path of this file. ``sentinels.json`` may be in the same folder.

    Raises:
      DataError: ``sentinels.json`` is damaged.
    """
    if tokenizer.sentinels:
        return tokenizer
    path = file.with_name(FILE)
    if not path.is_file():
        return tokenizer
    number = Settings(path, optional_object(path)).number("number", 0)
    return SentinelTokenizer(tokenizer, number)
