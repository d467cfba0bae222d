"""Defines the interface of all tokenizers, and helper functions that several of them use."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ..chat_templates.chat_template import (
    LECTURES,
    TEMPLATE_FILE,
    WITH_TOOLS_FILE,
    ChatTemplate,
)
from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.fields import without_none
from ..common.json_text import optional_object
from .frame import CONFIG, BatchSettings, Frame

END_OF_TEXT = "<|endoftext|>"
"""The only special token in most vocabularies that flaxzoo trains. It begins and ends a document.
"""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that represents a space in the pieces of a vocabulary."""


Encoded: TypeAlias = tuple[list[int], list[tuple[int, int]]]
"""The ids of a text and, for each id, the half-open range of characters that it encodes."""


@dataclass(frozen=True)
class SpecialIds:
    """The ids of a vocabulary's special tokens. An id is None if the vocabulary lacks the token."""

    pad: int | None = None
    unk: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None

    @property
    def present(self) -> dict[str, int]:
        """The ids of the special tokens that the vocabulary has, by the role of the token."""
        return without_none(asdict(self))

    @property
    def before(self) -> tuple[int, ...]:
        """The token that begins a document; empty if the vocabulary has none."""
        return () if self.bos is None else (self.bos,)

    @property
    def after(self) -> tuple[int, ...]:
        """The token that ends a document; empty if the vocabulary has none."""
        return () if self.eos is None else (self.eos,)


class ControlToken(NamedTuple):
    """A token that a chat template may write by name.

    Attributes:
      id: The id of the token.
      is_special: Whether the token is special. If False, as for ``<think>`` in some vocabularies,
        the token is part of the text that the model writes and users read.
    """

    id: int
    is_special: bool


class Tokenizer(ABC):
    """Converts text to ids and back.

    Text is never encoded as special tokens: if a text contains ``<|endoftext|>`` or ``[MASK]``,
    these strings are encoded as ordinary characters.

    Attributes:
      kind: The kind of tokenizer, for example ``byte-bpe``, ``wordpiece`` or ``characters``.
      vocab_size: The number of ids; ids are in ``[0, vocab_size)``.
      special_ids: The ids of the special tokens.
      fingerprint: A stable hash of everything that determines the ids.
      own_chat_template: The chat template in the tokenizer's folder, or None.
      named_tokens: The special tokens by role, such as ``eos_token``, as the tokenizer's folder
        names them. None if the tokenizer has no folder or the folder names none.
      batch_settings: How transformers pads and truncates texts with the tokenizer's folder, or None
        if the tokenizer has no folder.
      joins_bytes: Whether decoding concatenates the bytes of the single tokens. In this case,
        additional tokens after a complete character do not change the text up to this character.
      sentinels: The ids of ``<extra_id_0>``, ``<extra_id_1>``, … (T5), if the vocabulary has any.
    """

    kind: str
    vocab_size: int
    special_ids: SpecialIds
    fingerprint: str
    own_chat_template: ChatTemplate | None = None
    named_tokens: Mapping[str, str] | None = None
    batch_settings: BatchSettings | None = None
    joins_bytes: bool = False
    sentinels: tuple[int, ...] = ()

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of the target language; ``self`` if both languages share a tokenizer."""
        return self

    @property
    def frame(self) -> Frame:
        """The special tokens around one or two texts, as the tokenizer's template defines them."""
        return Frame()

    @property
    def source_frame(self) -> Frame:
        """The frame of an encoder-decoder's input.

        This is the same as ``frame`` if the tokenizer's folder states how texts end. Otherwise, an
        end token is added if ``frame`` has none.

        Raises:
          DataError: The vocabulary has no end token.
        """
        if self.batch_settings is not None:
            return self.frame
        return self.frame if self.end in self.frame.after else Frame.ending(self.end)

    @property
    def end(self) -> int:
        """The id of the token that ends a text.

        Raises:
          DataError: The vocabulary has no such token.
        """
        end = self.special_ids.eos
        if end is None:
            raise DataError(f"this {self.kind} tokenizer has no token that ends a text")
        return end

    def truncated(self, ids: list[int], length: int) -> list[int]:
        """Returns the first ``length`` tokens, or the last if the settings truncate on the left."""
        settings = self.batch_settings
        if settings is None or settings.truncation_side == "right":
            return ids[:length]
        return ids[max(0, len(ids) - length) :]

    @property
    def begins_document(self) -> tuple[int, ...]:
        """The tokens that precede the first token of a document.

        These are the tokens that the frame puts before a text. If the frame has no such tokens, the
        result is the BOS token, which also separates the documents of a corpus. If the vocabulary
        has no BOS token, the result is empty.
        """
        return self.frame.before or self.special_ids.before

    @abstractmethod
    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Encodes one text and returns the characters that each token comes from.

        Args:
          text: The text.
          add_special_tokens: Whether to add the special tokens of ``frame``, for example
            ``[CLS] … [SEP]`` for BERT. The vocabularies that flaxzoo trains for language models add
            none.

        Returns:
          The ids and, for each id, a half-open range of characters in ``text``. If several tokens
          encode one character, the ranges of all these tokens contain it. The range of a token that
          the template added is ``(0, 0)``.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts without special tokens; uses threads if the library supports them."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Converts ids to text.

        Args:
          ids: Ids in ``[0, vocab_size)``.
          skip_special_tokens: Whether to omit special tokens from the text.

        Returns:
          The text. Bytes that are not valid UTF-8 are replaced with U+FFFD.
        """

    @abstractmethod
    def token(self, id: int) -> str:
        """Returns the piece of an id for tables and plots, with unprintable characters escaped."""

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes files that ``load_tokenizer(folder)`` loads as an equal tokenizer.

        The files include the batch settings and, unless it is the default template, the chat
        template.
        """
        self.save_vocabulary(folder)
        if self.batch_settings is not None:
            file = Path(folder) / CONFIG
            content = optional_object(file) | self.batch_settings.fields()
            write_file(file, (json.dumps(content, indent=2) + "\n").encode())
        template = self.own_chat_template
        if template is not None:
            write_file(Path(folder) / TEMPLATE_FILE, template.source.encode())
            if template.with_tools is not None:
                write_file(Path(folder) / WITH_TOOLS_FILE, template.with_tools.encode())

    @abstractmethod
    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """Writes the files that determine the ids."""

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the folder; by default ``user: …`` and ``bot: …`` alternate."""
        template = self.own_chat_template or ChatTemplate(LECTURES)
        # A template may use any special token, even if no file of the folder gives its role.
        roles = self.special_ids.present.items()
        named = {f"{role}_token": self.token(id) for role, id in roles}
        return replace(template, tokens={**named, **template.tokens})

    def control_tokens(self) -> dict[str, ControlToken]:
        """Returns the tokens that a chat template may write by name, keyed by their names."""
        roles = self.special_ids.present
        roles.pop("unk", None)
        return {self.token(id): ControlToken(id, True) for id in roles.values()}

    @property
    def all_special_ids(self) -> frozenset[int]:
        """The ids of all special tokens, with or without a role, and of sentinels."""
        others = {token.id for token in self.control_tokens().values() if token.is_special}
        return frozenset({*self.special_ids.present.values(), *others, *self.sentinels})

    def find_controls(self, text: str) -> list[tuple[int, int, int]]:
        """Returns the start, the end and the id of each control token that a text names."""
        known = self.control_tokens()
        # Try longer names first, so that a name is not mistaken for a shorter name that begins it.
        names = sorted(known, key=len, reverse=True)
        matches = re.finditer("|".join(map(re.escape, names)) or "(?!)", text)
        return [(*match.span(), known[match[0]].id) for match in matches]

    def encode_with_controls(self, text: str, literal: Iterable[tuple[int, int]] = ()) -> Encoded:
        """Encodes a text, and reads the names of control tokens in it as these tokens.

        Args:
          text: The text.
          literal: Half-open ranges of characters, in order, that are encoded separately as ordinary
            text, such as names of control tokens that a user typed.

        Returns:
          The ids and their ranges of characters; see ``encode_with_offsets``.
        """
        edges = [0, *(edge for span in literal for edge in span), len(text)]
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        # Ordinary parts and literal ranges of the text alternate.
        for number, (start, end) in enumerate(pairwise(edges)):
            part = text[start:end]
            encoded = (
                self._encode_typed(part)
                if number % 2
                else self._encode_written(part, is_first=start == 0)
            )
            ids += encoded[0]
            offsets += ((a + start, b + start) for a, b in encoded[1])
        return ids, offsets

    def _encode_typed(self, text: str) -> Encoded:
        """Encodes a part of a text as ordinary text."""
        return self.encode_with_offsets(text, add_special_tokens=False)

    def _encode_written(self, text: str, *, is_first: bool = True) -> Encoded:
        """Encodes a part of a text, and reads the names of control tokens in it as these tokens.

        Args:
          text: A part of a text.
          is_first: Whether the part is at the beginning of the text.
        """
        # Vocabularies that flaxzoo trained do not put a space before a text.
        del is_first
        return encode_around(text, self.find_controls(text), self._encode_typed)

    def export(
        self,
        folder: str | PathLike[str],
        *,
        closing: bool = False,
        padding_side: Literal["left", "right"] | None = None,
        max_length: int | None = None,
    ) -> str:
        """Writes files for transformers. ``load_tokenizer`` loads an equal tokenizer from them.

        Args:
          folder: The folder for the files. It is created if it does not exist.
          closing: Whether texts are the input of an encoder-decoder; see ``source_frame``.
          padding_side: Whether transformers pads on the left or on the right, if the tokenizer's
            folder does not state it. If None, the side depends on the vocabulary.
          max_length: The model's maximum number of tokens. If None, the number is unlimited.

        Returns:
          A line for the log that names the files and the differences between the two libraries.

        Raises:
          DataError: transformers has no equal tokenizer, ``closing`` is True but the vocabulary has
            no end token, or the folder cannot be written.
        """
        raise DataError(f"a {self.kind} tokenizer cannot be written for transformers")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes one text; see ``encode_with_offsets``."""
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_mask(self, text: str) -> list[int]:
        """Encodes a text with its frame, and reads the string ``[MASK]`` as the mask token.

        Use this method to predict the words at blanks in a text. In contrast, ``encode`` treats
        ``[MASK]`` as ordinary characters. The tokenizer's Hugging Face folder states whether the
        mask includes the spaces before and after it. Without a folder, the mask includes only
        the spaces before it.

        Args:
          text: A text such as ``The [MASK] pulled into the station.``

        Returns:
          The ids.

        Raises:
          DataError: The vocabulary has no mask token.
        """
        mask = self.special_ids.mask
        if mask is None:
            raise DataError(
                f"this {self.kind} tokenizer has no mask token: use a model that was trained on "
                "masked tokens"
            )
        # Without a folder, the mask includes the spaces before it.
        if self.batch_settings is None:
            text = re.sub(f" +(?={re.escape(self.token(mask))})", "", text)
        # Encode the names of other special tokens as ordinary text.
        others = {t.id for t in self.control_tokens().values() if t.is_special and t.id != mask}
        typed = [(start, end) for start, end, id in self.find_controls(text) if id in others]
        ids, _ = self.encode_with_controls(text, typed)
        return self.frame.join(ids).ids


def encode_around(
    text: str,
    tokens: Iterable[tuple[int, int, int]],
    encode: Callable[[str], Encoded],
) -> Encoded:
    """Encodes a text, given some tokens that have already been found in the text.

    Args:
      text: The text.
      tokens: The start, the end and the id of each of these tokens, in order.
      encode: A function that encodes the text between these tokens.

    Returns:
      The ids and their ranges of characters.
    """
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    end = 0
    for start, after, id in [*tokens, (len(text), len(text), None)]:
        if start > end:
            more, ranges = encode(text[end:start])
            ids += more
            offsets += ((a + end, b + end) for a, b in ranges)
        if id is not None:
            ids.append(id)
            offsets.append((start, after))
        end = after
    return ids, offsets


def printable(piece: str) -> str:
    r"""Escapes characters that are not printable; for example, a line feed becomes ``\n``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)


# The replacements that remove spaces. They are applied in this order.
_CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't"}
_CLEANED |= {f" '{end}": f"'{end}" for end in ("m", "s", "ve", "re")}


def clean_up(text: str) -> str:
    """Removes spaces from a decoded text as transformers' ``clean_up_tokenization_spaces`` does."""
    for before, after in _CLEANED.items():
        text = text.replace(before, after)
    return text


def check_unicode(text: str) -> None:
    """Checks that a text can be encoded as UTF-8, which the libraries require.

    Raises:
      DataError: The text contains half of a surrogate pair, for example because it is from a
        command line that is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid Unicode: lone surrogate {text[error.start]!r} at character "
            f"{error.start}; pass it as UTF-8"
        ) from None
