"""Marian's tokenizers (Junczys-Dowmunt et al. 2018), as the opus-mt models are published.

Each language has a sentencepiece model that splits its text. A JSON vocabulary, one for both
languages or one for each, gives the pieces their ids. Ids and texts are the same as with
transformers' ``MarianTokenizer``, with these differences (neither class calls the punctuation
normalizer of ``sacremoses``, which transformers recommends):

- Text never becomes special tokens, as with ``split_special_tokens`` in transformers.
- The special tokens of the target side are looked up in the target's vocabulary. Transformers
  uses the source's ids for both, which is wrong where the ids of the two vocabularies differ.

A text may begin with the language to translate to, ``>>fr<<``, which is one token.
"""

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from ..common.atomic_io import write_file
from ..common.errors import DataError
from .base import (
    JsonObject,
    SpecialIds,
    Tokenizer,
    check_unicode,
    clean_up,
    printable,
    read_json,
)
from .folder import MOST_IDS
from .frame import Frame, Layout
from .sentencepiece import SPACE, load_processor, widen_bytes

MODELS = ("source.spm", "target.spm")
"""The files that show that a folder has Marian's tokenizer."""

_VOCABULARIES = ("vocab.json", "target_vocab.json")
_CONFIG = "tokenizer_config.json"
_SPECIALS = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_USUAL_NAMES = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


class MarianTokenizer(Tokenizer):
    """The tokenizer of the source language; ``target`` is the tokenizer of the target language.

    The template adds ``</s>`` at the end. No token begins a text: the decoder was trained to start
    with padding, so ``special_ids.bos`` is the padding token.
    """

    kind = "marian"

    def __init__(self, files: Mapping[str, bytes], folder: Path, is_target: bool = False) -> None:
        """Makes the tokenizer of one side; ``from_folder`` reads the files.

        Args:
          files: The bytes of the folder's files by name.
          folder: The folder, for messages.
          is_target: Whether this is the tokenizer of the target language.

        Raises:
          DataError: See ``from_folder``.
        """
        self.files = files
        self.config = config = _read_object(files, _CONFIG, folder)
        if options := config.get("sp_model_kwargs"):
            raise DataError(
                f"{folder / _CONFIG}: sp_model_kwargs {options!r} is not supported: remove it"
            )
        own = is_target and bool(config.get("separate_vocabs"))
        self._processor, self._joiner = (
            load_processor(_present(files, name, folder), folder / name)
            for name in (MODELS[is_target], MODELS[own])
        )
        # With a shared vocabulary transformers decodes both sides with the source's model.
        self._ids = _read_vocabulary(files, _VOCABULARIES[own], folder)
        self._pieces = {id: piece for piece, id in self._ids.items()}
        names = _names_of_specials(files, config, folder)
        self._special = {*names.values(), *_other_specials(files, config, folder)}
        if missing := sorted(self._special - self._ids.keys()):
            raise DataError(
                f"{folder / _VOCABULARIES[own]} has no {' and no '.join(missing)}, which the files "
                "beside it name as special tokens: fetch all of them again"
            )
        _check_added(files, config, folder, self._special)
        self._unknown, self._end = names["unk"], names["eos"]
        self._cleans = bool(config.get("clean_up_tokenization_spaces"))
        roles = {role: self._ids[name] for role, name in names.items()}
        self.special_ids = SpecialIds(**roles, bos=roles["pad"])
        self.vocab_size = max(self._pieces) + 1
        self.fingerprint = _fingerprint(
            files, is_target, own, sorted(self._special), self.special_ids, self._cleans
        )
        # The target tokenizer's target is itself, which ends the recursion.
        self._target = self if is_target else MarianTokenizer(files, folder, is_target=True)

    @classmethod
    def from_folder(cls, folder: Path) -> "MarianTokenizer":
        """Loads ``source.spm``, ``target.spm``, ``vocab.json`` and their configuration.

        ``target_vocab.json`` is read if ``tokenizer_config.json`` sets ``separate_vocabs``.

        Raises:
          DataError: A file is missing or damaged, a special token has no id, or a setting of
            the configuration is not supported.
        """
        names = (*MODELS, *_VOCABULARIES, _CONFIG, _SPECIALS, _ADDED)
        files = {n: (folder / n).read_bytes() for n in names if (folder / n).is_file()}
        return cls(files, folder)

    @property
    def target(self) -> "MarianTokenizer":
        """The tokenizer of the target language."""
        return self._target

    @property
    def frame(self) -> Frame:
        """See ``Tokenizer``; nothing separates two texts."""
        end = self._ids[self._end]
        return Frame(Frame.ending(end).single, Layout(((), (), (end,)), ((), (), (0,)), (0, 0)))

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """See ``Tokenizer``."""
        check_unicode(text)
        code, rest = _language_and_text(text)
        mapping = self._processor.encode(rest, return_type="offset_mapping")
        ids = self._ids_of(code, mapping["pieces"])
        spans = [(a + len(code), b + len(code)) for a, b in widen_bytes(mapping["offsets"])]
        offsets = [(0, len(code)), *spans] if code else spans
        return self.frame.join_offsets(ids, offsets) if add_special_tokens else (ids, offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        codes, rests = zip(*map(_language_and_text, texts), strict=True) if texts else ((), ())
        pieces = self._processor.encode(list(rests), out_type=str, num_threads=-1)
        return [self._ids_of(*parts) for parts in zip(codes, pieces, strict=True)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``; ``<unk>`` is one of the special tokens."""
        # Join runs of ordinary pieces; special tokens are written between the runs.
        text, run = "", []
        for piece in (self._pieces.get(int(id), self._unknown) for id in ids):
            if piece not in self._special:
                run.append(piece)
            elif not skip_special_tokens:
                text += f"{self._joiner.decode_pieces(run)}{piece} "
                run = []
        text = (text + self._joiner.decode_pieces(run)).replace(SPACE, " ").strip()
        return clean_up(text) if self._cleans else text

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        if not 0 <= id < self.vocab_size:
            raise IndexError(f"id {id} is not in a vocabulary of {self.vocab_size}")
        return printable(self._pieces.get(id, self._unknown))

    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; writes the files of both sides as they were."""
        for name, content in self.files.items():
            write_file(Path(folder) / name, content)

    def _ids_of(self, code: str, pieces: Sequence[str]) -> list[int]:
        """Returns the ids of the language code, if there is one, and of the pieces."""
        unknown = self._ids[self._unknown]
        # The model returns unknown pieces as they are in the text, even if they are special names.
        return [
            unknown if piece in self._special else self._ids.get(piece, unknown)
            for piece in ([code, *pieces] if code else pieces)
        ]


def _language_and_text(text: str) -> tuple[str, str]:
    """Separates ``>>fr<<`` from the text after it."""
    end = text.find("<<") + 2 if text.startswith(">>") else 0
    return (text[:end], text[end:]) if end > 1 else ("", text)


def _present(files: Mapping[str, bytes], name: str, folder: Path) -> bytes:
    if name not in files:
        raise DataError(f"{folder / name} is missing from Marian's tokenizer: fetch it, too")
    return files[name]


def _read_object(files: Mapping[str, bytes], name: str, folder: Path) -> JsonObject:
    """Reads a JSON file; returns an empty object if it is missing."""
    content = read_json(folder / name, files[name]) if name in files else {}
    if not isinstance(content, dict):
        raise DataError(f"{folder / name} is not a JSON object: fetch it again")
    return content


def _read_vocabulary(files: Mapping[str, bytes], name: str, folder: Path) -> dict[str, int]:
    _present(files, name, folder)
    ids = _read_object(files, name, folder)
    wrong = [piece for piece, id in ids.items() if type(id) is not int or not 0 <= id < MOST_IDS]
    if wrong or len(set(ids.values())) != len(ids):
        fault = f"{wrong[0]!r} has the id {ids[wrong[0]]!r}" if wrong else "two pieces have one id"
        raise DataError(f"{folder / name} is not a vocabulary: {fault}; fetch it again")
    return ids


def _stated(files: Mapping[str, bytes], config: JsonObject, folder: Path) -> JsonObject:
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_object(files, _SPECIALS, folder)}  # the older of the two files


def _names_of_specials(
    files: Mapping[str, bytes], config: JsonObject, folder: Path
) -> dict[str, str]:
    stated = _stated(files, config, folder)
    return {
        role: _content(stated.get(f"{role}_token") or usual, f"{role}_token", folder)
        for role, usual in _USUAL_NAMES.items()
    }


def _other_specials(files: Mapping[str, bytes], config: JsonObject, folder: Path) -> list[str]:
    """Returns the names of the special tokens that Marian gives no role."""
    stated = _stated(files, config, folder)
    extra = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or []
    if not isinstance(extra, list | dict):
        raise DataError(f"{folder / _CONFIG}: {extra!r} is not a list of tokens: correct it")
    named = [v for k, v in stated.items() if k.endswith("_token") and isinstance(v, str | dict)]
    tokens = [*(extra.values() if isinstance(extra, dict) else extra), *named]
    return [_content(token, "extra_special_tokens", folder) for token in tokens]


def _check_added(
    files: Mapping[str, bytes], config: JsonObject, folder: Path, special: set[str]
) -> None:
    """Checks that all added tokens are special tokens of the vocabulary."""
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise DataError(f"{folder / _CONFIG}: added_tokens_decoder is not an object: fetch it")
    older = {} if "added_tokens_decoder" in config else _read_object(files, _ADDED, folder)
    names = [*older, *(_content(t, "added_tokens_decoder", folder) for t in decoder.values())]
    for name in names:
        if name not in special:
            raise DataError(
                f"{folder}: the added token {name!r} of a Marian is not supported: remove it, or "
                "give it to the vocabulary and to extra_special_tokens"
            )


def _content(token: object, name: str, folder: Path) -> str:
    """Returns the text of a special token, which may be given as an object with properties."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise DataError(f"{folder / _CONFIG}: {name} {token!r} is not a token: correct it")
    return content


def _fingerprint(files: Mapping[str, bytes], *settings: object) -> str:
    models = [files[name] for name in (*MODELS, *_VOCABULARIES) if name in files]
    digests = [hashlib.blake2b(content).hexdigest() for content in models]
    return hashlib.blake2b(repr([digests, settings]).encode(), digest_size=16).hexdigest()
