"""Implements tokenizers with sentencepiece vocabularies, unigram and BPE (Kudo & Richardson 2018).

The vocabularies that flaxzoo trains do not change text: there is no normalization and no prefix,
all spaces are kept, a line feed is a separate piece, and a character that is not in the vocabulary
is encoded as bytes. Decoding restores the text exactly, except U+2581, which sentencepiece uses to
represent a space.
"""

import hashlib
import itertools
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import sentencepiece
import tokenizers

from ..common.atomic_io import write_file
from ..common.errors import DataError, reported
from ..common.fields import require
from .base import END_OF_TEXT, SPACE, ControlToken, Encoded, SpecialIds, check_unicode, printable
from .export import Export, ExportedTokenizer
from .sentencepiece_model import (
    CONTROL,
    USER_DEFINED,
    is_trained_here,
    parse_model,
    sentencepiece_backend,
)

# Texts with more characters than this are split at line feeds. For shorter texts, float32 scores
# are exact enough.
_LONG = 4096
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_CONTROL_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


class SentencePieceTokenizer(ExportedTokenizer):
    """A tokenizer that uses a sentencepiece model.

    A model file has no template, so ``add_special_tokens`` adds nothing. For T5, append
    ``special_ids.eos``.

    Attributes:
      model: The bytes of the ``.model`` file.
    """

    def __init__(self, model: bytes, source: str | Path = "this") -> None:
        """Creates the tokenizer.

        Args:
          model: The bytes of a ``.model`` file.
          source: The location of the file, for messages.

        Raises:
          DataError: The bytes are not a sentencepiece model.
        """
        self.model = model
        self._processor = load_processor(model, source)
        self.vocab_size = self._processor.get_piece_size()
        self.special_ids = _special_ids(self._processor)
        proto = parse_model(model)
        self.kind = f"sentencepiece-{_MODEL_TYPES.get(proto.trainer_spec.model_type, 'unknown')}"
        self._is_trained_here = is_trained_here(proto)
        # The names of all control and user-defined pieces, except white space.
        self._named = {
            piece.piece: ControlToken(id, piece.type == CONTROL)
            for id, piece in enumerate(proto.pieces)
            if piece.type in (CONTROL, USER_DEFINED) and piece.piece.strip(f"{SPACE} \n\t\r")
        }
        self.fingerprint = hashlib.blake2b(model, digest_size=16).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> "SentencePieceTokenizer":
        """Loads a ``.model`` file.

        Raises:
          DataError: The file is not a sentencepiece model.
        """
        return cls(path.read_bytes(), path)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """See ``Tokenizer``."""
        check_unicode(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        # The number of characters in the text before the current part.
        start = 0
        for part in self._parts(text):
            mapping = self._processor.encode(part, return_type="offset_mapping")
            ids += mapping["ids"]
            offsets += ((a + start, b + start) for a, b in widen_bytes(mapping["offsets"]))
            start += len(part)
        return ids, offsets

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See ``Tokenizer``."""
        check_unicode(text)
        return [id for part in self._parts(text) for id in self._processor.encode(part)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        parts = list(map(self._parts, texts))
        # Encode all parts in one call, so that the library can use several threads.
        flat = list(itertools.chain.from_iterable(parts))
        encoded = iter(self._processor.encode(flat, num_threads=-1))
        return [
            list(itertools.chain.from_iterable(itertools.islice(encoded, len(of_text))))
            for of_text in parts
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        if skip_special_tokens:  # control pieces decode to nothing
            return self._processor.decode(list(ids))
        # The library drops control pieces, so insert their names between the decoded runs.
        groups = itertools.groupby(ids, self._processor.is_control)
        return "".join(
            "".join(map(self._processor.id_to_piece, group))
            if control
            else self._processor.decode(list(group))
            for control, group in groups
        )

    def control_tokens(self) -> dict[str, ControlToken]:
        """See ``Tokenizer``; user-defined pieces are not special."""
        return {**super().control_tokens(), **self._named}

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        return printable(self.piece(id))

    def piece(self, id: int) -> str:
        """Returns the piece of an id exactly as the model contains it."""
        return self._processor.id_to_piece(id)

    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; writes ``sentencepiece.model``."""
        write_file(Path(folder) / "sentencepiece.model", self.model)

    def backend(self) -> tokenizers.Tokenizer:
        """See ``ExportedTokenizer``."""
        return sentencepiece_backend(parse_model(self.model))

    def export_without_backend(self) -> Export | None:
        """See ``ExportedTokenizer``."""
        if self._is_trained_here:
            return None
        return Export(
            "sentencepiece.model unchanged, and no tokenizer.json for transformers: the tokenizers "
            "library expresses exactly only the models that flaxzoo trains",
            {"sentencepiece.model": self.model},
        )

    def _parts(self, text: str) -> list[str]:
        """Splits a long text after its line feeds, where the model would split it in any case.

        The library sums the scores of a text in float32. In a long text, the rounding error could
        change how a word is split, depending on the length of the text before the word.
        """
        if len(text) <= _LONG or not self._is_trained_here:
            return [text]
        return re.split(r"(?<=\n)", text)


def load_processor(model: bytes, source: str | Path) -> sentencepiece.SentencePieceProcessor:
    """Loads a model from the bytes of a ``.model`` file; see ``SentencePieceTokenizer``."""
    problem = f"{source} is not a sentencepiece model"
    # Check for an empty file, because the library would accept it as a model.
    require(model, f"{problem}: fetch it again", DataError)
    processor = sentencepiece.SentencePieceProcessor()
    with reported(problem, "fetch it again", RuntimeError):
        processor.load_from_serialized_proto(model)
    return processor


def _special_ids(processor: sentencepiece.SentencePieceProcessor) -> SpecialIds:
    ids = {role: getattr(processor, f"{role}_id")() for role in ("pad", "unk", "bos", "eos")}
    # A piece of a sentencepiece model can have only one role, so use the begin token also as the
    # end token.
    if ids["eos"] < 0 and processor.piece_to_id(END_OF_TEXT) == ids["bos"]:
        ids["eos"] = ids["bos"]
    ids |= {
        role: id
        for role, name in _CONTROL_NAMES.items()
        if processor.is_control(id := processor.piece_to_id(name))
    }
    return SpecialIds(**{role: id for role, id in ids.items() if id >= 0})


def widen_bytes(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sets the range of each byte piece to its character; the library does so for the last byte."""
    widened = list(offsets)
    # Go backwards, so that the range of the last byte is copied to all bytes before it.
    for i in reversed(range(len(widened) - 1)):
        begin, end = widened[i]
        if begin == end:
            widened[i] = (begin, widened[i + 1][1])
    return widened
