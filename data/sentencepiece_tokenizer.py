"""Sentencepiece vocabularies, unigram and BPE (Kudo & Richardson 2018).

The ones we train keep text as it is: no normalisation, no prefix, every space kept, a
line feed as its own piece, and bytes for characters that are not in the vocabulary. What
comes back is what went in, but for U+2581, which sentencepiece itself uses for a space.
"""

import hashlib
import importlib
import itertools
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import sentencepiece

from .atomic import write_file
from .errors import DataError
from .tokenizer import END_OF_TEXT, SpecialIds, Tokenizer, check_unicode, printable

_CONTROL_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model behind our interface.

    A model file has no template, so ``add_special_tokens`` adds nothing; who needs T5's
    closing ``</s>`` appends ``special_ids.eos``.
    """

    def __init__(self, model: bytes, source: str | Path = "this") -> None:
        """Makes the tokenizer.

        Args:
            model: The bytes of a ``.model`` file.
            source: Where they are from, for messages.

        Raises:
            DataError: They are not a sentencepiece model.
        """
        self._model = model
        self._processor = load_processor(model, source)
        self.vocab_size = self._processor.get_piece_size()
        self.special_ids = _special_ids(self._processor)
        self.kind = f"sentencepiece-{_model_type(model)}"
        self.fingerprint = hashlib.blake2b(model, digest_size=16).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> "SentencePieceTokenizer":
        """Loads a ``.model`` file.

        Raises:
            DataError: The file is not a sentencepiece model.
        """
        return cls(path.read_bytes(), path)

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """See ``Tokenizer``."""
        check_unicode(text)
        mapping = self._processor.encode(text, return_type="offset_mapping")
        return mapping["ids"], widen_bytes(mapping["offsets"])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See ``Tokenizer``."""
        check_unicode(text)
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        return self._processor.encode(list(texts), num_threads=-1)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        if skip_special_tokens:  # control pieces decode to nothing
            return self._processor.decode(list(ids))
        groups = itertools.groupby(ids, self._processor.is_control)
        return "".join(
            "".join(map(self._processor.id_to_piece, group))
            if control
            else self._processor.decode(list(group))
            for control, group in groups
        )

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        return printable(self._processor.id_to_piece(id))

    def save(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; writes ``sentencepiece.model``."""
        write_file(Path(folder) / "sentencepiece.model", self._model)


def load_processor(model: bytes, source: str | Path) -> sentencepiece.SentencePieceProcessor:
    """Opens the bytes of a ``.model`` file; see ``SentencePieceTokenizer``."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if model:  # the library takes an empty file for a model
            processor.load_from_serialized_proto(model)
            return processor
    except RuntimeError:
        pass
    raise DataError(f"{source} is not a sentencepiece model: fetch it again")


def _special_ids(processor: sentencepiece.SentencePieceProcessor) -> SpecialIds:
    def present(id: int) -> int | None:
        return id if id >= 0 else None

    def control(name: str) -> int | None:
        id = processor.piece_to_id(name)
        return id if processor.is_control(id) else None

    bos, eos = present(processor.bos_id()), present(processor.eos_id())
    if bos is not None and eos is None and processor.id_to_piece(bos) == END_OF_TEXT:
        eos = bos  # the library cannot give one piece two roles, we do
    return SpecialIds(
        pad=present(processor.pad_id()),
        unk=present(processor.unk_id()),
        bos=bos,
        eos=eos,
        **{role: control(name) for role, name in _CONTROL_NAMES.items()},
    )


def _model_type(model: bytes) -> str:
    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = messages.ModelProto()
    proto.ParseFromString(model)
    spec = proto.trainer_spec
    return spec.ModelType.Name(spec.model_type).lower()


def widen_bytes(offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Gives every byte piece the range of its character, which the library gives the last."""
    widened = list(offsets)
    for i in reversed(range(len(widened) - 1)):
        begin, end = widened[i]
        if begin == end:
            widened[i] = (begin, widened[i + 1][1])
    return widened
