"""One interface over every tokenizer of the zoo, and the loader that knows their files."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..errors import DataError

END_OF_TEXT = "<|endoftext|>"
"""The one special token of the vocabularies we train: it opens and closes a document."""


@dataclass(frozen=True)
class SpecialIds:
    """The ids a vocabulary gives to its special tokens; None where it has none."""

    pad: int | None = None
    unk: int | None = None
    bos: int | None = None
    eos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None


class Tokenizer(ABC):
    """Text to ids and back.

    Special tokens never come out of text: a text that spells ``<|endoftext|>`` or
    ``[MASK]`` is encoded as the ordinary characters it is made of.

    Attributes:
        kind: The family, for example ``byte-bpe``, ``wordpiece`` or ``characters``.
        vocab_size: The number of ids; ids are in ``[0, vocab_size)``.
        special_ids: The ids of the special tokens.
        fingerprint: A stable hash of everything that decides the ids.
    """

    kind: str
    vocab_size: int
    special_ids: SpecialIds
    fingerprint: str

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of what a translation model writes; itself unless it has two sides."""
        return self

    @abstractmethod
    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes one text and says where each token comes from.

        Args:
            text: Any text.
            add_special_tokens: Whether to add what the vocabulary's own template adds:
                ``[CLS] … [SEP]`` for BERT, nothing for language-model vocabularies.

        Returns:
            The ids, and for each a half-open range of characters of ``text``. A character
            that takes several tokens is in the range of each. ``(0, 0)`` for a token that
            the template added.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts, without special tokens; in threads where the library can."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns ids back to text.

        Args:
            ids: Ids in ``[0, vocab_size)``.
            skip_special_tokens: Whether special tokens leave no trace in the text.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD.
        """

    @abstractmethod
    def token(self, id: int) -> str:
        """Returns the piece of an id as it may be printed in a table or a plot."""

    @abstractmethod
    def save(self, folder: str | PathLike[str]) -> None:
        """Writes the files from which ``load_tokenizer(folder)`` makes an equal tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes one text; see ``encode_with_offsets``."""
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_mask(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text in which the mask token's spelling stands for that token.

        This is for a person's own text with blanks to fill; ``encode`` takes ``[MASK]`` for
        characters like any others. Spaces before a mask belong to it.

        Args:
            text: For example ``The [MASK] pulled into the station.``
            add_special_tokens: See ``encode_with_offsets``.

        Returns:
            The ids.

        Raises:
            DataError: The vocabulary has no mask token.
        """
        mask = self.special_ids.mask
        if mask is None:
            raise DataError(
                f"this {self.kind} tokenizer has no mask token: use a model that was trained with "
                "masked words"
            )
        *before, last = text.split(self.token(mask))
        ids: list[int] = []
        for part in before:
            ids += [*self.encode(part.rstrip(" "), add_special_tokens=False), mask]
        ids += self.encode(last, add_special_tokens=False)
        return self._framed(ids) if add_special_tokens else ids

    def _framed(self, ids: list[int]) -> list[int]:
        """Puts around ids what the vocabulary's template puts around a text."""
        bare, framed = (self.encode("a", add_special_tokens=added) for added in (False, True))
        front = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return framed[:front] + ids + framed[front + len(bare) :]


def printable(piece: str) -> str:
    r"""Escapes what would not show in print: a line feed becomes ``\n``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)


def check_unicode(text: str) -> None:
    """Checks that a text can be written as UTF-8, which the libraries take for granted.

    Raises:
        DataError: It holds half of a surrogate pair: a command line that is not UTF-8, say.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid Unicode: lone surrogate {text[error.start]!r} at character "
            f"{error.start}; pass it as UTF-8"
        ) from None


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Loads a tokenizer of any kind we have.

    Args:
        path: A folder written by ``save``, a Hugging Face model folder, or one file:
            ``vocab.txt`` (WordPiece), ``tokenizer.json``, ``vocab.json`` beside
            ``merges.txt`` or ``encoder.json`` beside ``vocab.bpe`` (byte-level BPE; a
            common prefix as in ``gpt2_encoder.json`` is fine), a sentencepiece ``.model``.
            Marian's ``source.spm``, ``target.spm`` and ``vocab.json`` only as a folder.

    Returns:
        The tokenizer.

    Raises:
        DataError: Nothing is there, or nothing that is understood.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        from .marian import MODELS, MarianTokenizer

        if any((path / name).is_file() for name in MODELS):
            return MarianTokenizer.from_folder(path)
        path = _file_in(path)
    elif not path.is_file():
        raise DataError(f"no tokenizer at {path}: there is no such file or folder")
    if path.suffix == ".json":
        return _load_json(path)
    if path.suffix == ".bpe" or path.name.endswith("merges.txt"):
        return _load_vocabulary_and_merges(_vocabulary_of(path), path)
    if path.suffix in (".model", ".spm"):
        from .sentencepiece import SentencePieceTokenizer

        return SentencePieceTokenizer.from_file(path)
    if path.suffix == ".txt":
        from .huggingface import load_wordpiece

        return load_wordpiece(path)
    raise DataError(f"{path} is not a tokenizer we know: give {_KNOWN}")


_KNOWN = (
    "tokenizer.json, vocab.json with merges.txt, encoder.json with vocab.bpe, "
    "a WordPiece vocab.txt, a sentencepiece .model, or a folder with one of them "
    "or with Marian's source.spm, target.spm and vocab.json"
)
# The first that is there counts: what ours were made with, before what was made of them.
_IN_A_FOLDER = (
    "characters.json",
    "sentencepiece.model",
    "tokenizer.json",
    "vocab.json",
    "encoder.json",
    "vocab.txt",
)
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def _file_in(folder: Path) -> Path:
    for name in _IN_A_FOLDER:
        merges = dict(_PAIRS).get(name)
        if (folder / name).is_file() and (merges is None or (folder / merges).is_file()):
            return folder / name
    models = sorted([*folder.glob("*.model"), *folder.glob("*.spm")])
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(model.name for model in models)
        raise DataError(f"{folder} holds several sentencepiece models ({names}): name one")
    raise DataError(f"no tokenizer in the folder {folder}: it should hold {_KNOWN}")


def _load_json(path: Path) -> Tokenizer:
    content = read_json(path)
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        from .huggingface import load_tokenizer_json

        return load_tokenizer_json(path)
    if isinstance(content, dict) and content.get("kind") == "characters":
        from .characters import CharacterTokenizer

        return CharacterTokenizer.from_json(content, path)
    if isinstance(content, dict) and content and isinstance(next(iter(content.values())), int):
        return _load_vocabulary_and_merges(path, _merges_of(path))
    raise DataError(f"{path} is JSON but not a tokenizer we know: give {_KNOWN}")


def _load_vocabulary_and_merges(vocabulary: Path, merges: Path) -> Tokenizer:
    from .huggingface import load_byte_bpe

    return load_byte_bpe(vocabulary, merges)


def _merges_of(vocabulary: Path) -> Path:
    return _partner(vocabulary, _PAIRS)


def _vocabulary_of(merges: Path) -> Path:
    return _partner(merges, tuple((second, first) for first, second in _PAIRS))


def _partner(path: Path, pairs: tuple[tuple[str, str], ...]) -> Path:
    names = [path.name.removesuffix(one) + other for one, other in pairs if path.name.endswith(one)]
    for name in names:
        if path.with_name(name).is_file():
            return path.with_name(name)
    missing = names[0] if names else " or ".join(other for _, other in pairs)
    raise DataError(f"{path} is half of a byte-level BPE tokenizer: {missing} must lie beside it")


def read_json(path: Path, content: bytes | None = None) -> object:
    """Reads a JSON file of a tokenizer, or what was read of it.

    Raises:
        DataError: The file is not UTF-8 or not JSON.
    """
    try:
        return json.loads((path.read_bytes() if content is None else content).decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}): fetch it again") from None
