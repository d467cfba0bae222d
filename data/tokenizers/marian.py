"""Implements the tokenizers of Marian (Junczys-Dowmunt et al. 2018), as used by opus-mt models.

Each language has a sentencepiece model that splits its text into pieces. A JSON vocabulary maps
pieces to ids; the two languages either share one vocabulary or have one each. The ids and texts are
the same as with transformers' ``MarianTokenizer``, with two differences:

- Text is never encoded as special tokens, as with ``split_special_tokens`` in transformers.
- The ids of special tokens in targets are from the target vocabulary. Transformers uses the ids
  from the source vocabulary for both, which is wrong if the two vocabularies have different ids.

Neither class calls the punctuation normalizer of ``sacremoses``, which transformers recommends.

A text may begin with the language to translate to, such as ``>>fr<<``, which is one token.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import filterfalse
from os import PathLike
from pathlib import Path

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.fields import require
from ..common.json_text import optional_object
from .base import SPACE, Encoded, SpecialIds, check_unicode, clean_up, printable
from .export import Export, ExportedTokenizer
from .folder import CONFIG, Folder, JsonObject, name_of, read_folder, read_ids
from .frame import BatchSettings, Frame, Layout
from .sentencepiece import load_processor, widen_bytes

MODELS = ("source.spm", "target.spm")
"""If a folder has these files, it contains Marian's tokenizer."""

_VOCABULARIES = ("vocab.json", "target_vocab.json")
_FILES = (*MODELS, *_VOCABULARIES, CONFIG, "special_tokens_map.json", "added_tokens.json")
_DIFFERENCE_OF_TARGETS = (
    " for sources. For targets it would use the special tokens of the sources, which differ"
)
_USUAL_NAMES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class MarianTokenizer(ExportedTokenizer):
    """The tokenizer of the source language; ``target`` is the tokenizer of the target language.

    The template adds ``</s>`` at the end of a text, and nothing at the beginning. The decoder was
    trained to start with the padding token, so ``special_ids.bos`` is the padding token.
    """

    kind = "marian"

    def __init__(self, folder: Path, is_target: bool = False) -> None:
        """Loads ``source.spm``, ``target.spm``, ``vocab.json`` and their configuration.

        ``target_vocab.json`` is read if ``tokenizer_config.json`` sets ``separate_vocabs``.

        Args:
          folder: The folder of the files.
          is_target: Whether this is the tokenizer of the target language.

        Raises:
          DataError: A file is missing or damaged, a special token has no id, or a setting of
            the configuration is not supported.
        """
        # Read the settings, and the files of the source or the target language.
        content = read_folder(folder, {})
        settings = content.settings.over(_USUAL_NAMES)
        options = settings.values.get("sp_model_kwargs")
        problem = f"{folder / CONFIG}: sp_model_kwargs {options!r} is not supported: remove it"
        require(not options, problem, DataError)
        own = is_target and settings.flag("separate_vocabs", False)
        vocabulary = folder / _VOCABULARIES[own]
        needed = (*map(folder.joinpath, MODELS), vocabulary)
        missing = " and ".join(map(str, filterfalse(Path.is_file, needed)))
        problem = f"{missing} is missing from Marian's tokenizer: download it as well"
        require(not missing, problem, DataError)
        self._files = {n: (folder / n).read_bytes() for n in _FILES if (folder / n).is_file()}
        self._config: JsonObject = optional_object(folder / CONFIG)
        # If the vocabulary is shared, transformers decodes sources and targets with the
        # sentencepiece model of the source.
        self._processor, self._joiner = (
            load_processor(self._files[name], folder / name)
            for name in (MODELS[is_target], MODELS[own])
        )
        self._ids = read_ids(vocabulary)
        self._pieces = {id: piece for piece, id in self._ids.items()}
        problem = f"{vocabulary} gives one id to two pieces: fetch it again"
        require(len(self._pieces) == len(self._ids), problem, DataError)
        names = {role: settings.named(role) for role in _USUAL_NAMES}
        extra = (*settings.by_role().values(), *settings.tokens("extra_special_tokens"))
        self._special = {*map(name_of, extra)}
        self._check_special(vocabulary, content)
        self._unknown, self._end = names["unk_token"], names["eos_token"]
        # The model returns unknown pieces unchanged, even if they are names of special tokens, so
        # map these names to the unknown token.
        unknown = self._ids[self._unknown]
        self._ids_in_text = self._ids | dict.fromkeys(self._special, unknown)
        self._cleans = settings.flag("clean_up_tokenization_spaces", False)
        ids = {role.removesuffix("_token"): self._ids[name] for role, name in names.items()}
        self.special_ids = SpecialIds(**ids, bos=ids["pad"])
        self.vocab_size = max(self._pieces) + 1
        self.fingerprint = _fingerprint(
            self._files, is_target, own, sorted(self._special), self.special_ids, self._cleans
        )
        # The `target` of the target tokenizer is this tokenizer itself, which ends the recursion.
        self._target = self if is_target else MarianTokenizer(folder, is_target=True)

    def _check_special(self, vocabulary: Path, content: Folder) -> None:
        """Checks that the vocabulary has all special tokens, and that no other tokens are added."""
        missing = " and no ".join(sorted(self._special - self._ids.keys()))
        require(
            not missing,
            f"{vocabulary} has no {missing}, which other files of the folder name as special "
            "tokens: fetch all of them again",
            DataError,
        )
        # Marian's vocabulary contains all tokens, so an added token must be a special token.
        others = [*filterfalse(self._special.__contains__, map(name_of, content.added.values()))]
        require(
            not others,
            f"{content.path}: the added tokens {others} are not supported by Marian: remove them, "
            "or add them to the vocabulary and to extra_special_tokens",
            DataError,
        )

    @property
    def target(self) -> "MarianTokenizer":
        """The tokenizer of the target language."""
        return self._target

    @property
    def frame(self) -> Frame:
        """See ``Tokenizer``; there is no token between two texts."""
        end = self._ids[self._end]
        return Frame(Frame.ending(end).single, Layout(((), (), (end,)), ((), (), (0,)), (0, 0)))

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """See ``Tokenizer``."""
        check_unicode(text)
        code, source = _language_and_text(text)
        mapping = self._processor.encode(source, return_type="offset_mapping")
        ids = self._ids_of(code, mapping["pieces"])
        start = len(text) - len(source)
        spans = ((a + start, b + start) for a, b in widen_bytes(mapping["offsets"]))
        offsets = [*((0, len(name)) for name in code), *spans]
        return self.frame.join_offsets(ids, offsets) if add_special_tokens else (ids, offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        parts = list(map(_language_and_text, texts))
        pieces = self._processor.encode(
            [source for _, source in parts], out_type=str, num_threads=-1
        )
        return [self._ids_of(code, row) for (code, _), row in zip(parts, pieces, strict=True)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``; ``<unk>`` is one of the special tokens."""
        # Decode each run of ordinary pieces together, and write special tokens between the runs.
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
        """See ``Tokenizer``; writes the files of both languages without changes."""
        for name, content in self._files.items():
            write_file(Path(folder) / name, content)

    def export_without_backend(self) -> Export:
        """See ``ExportedTokenizer``; transformers' class reads the same files."""
        files = ", ".join(sorted(self._files.keys() - {CONFIG}))
        differs = self.special_ids != self.target.special_ids
        return Export(
            f"{files}; transformers gives the same ids and texts"
            + differs * _DIFFERENCE_OF_TARGETS,
            config={**self._config, "tokenizer_class": "MarianTokenizer"},
            settings=BatchSettings(split_special_tokens=True),
        )

    def _ids_of(self, code: Sequence[str], pieces: Sequence[str]) -> list[int]:
        """Returns the id of the language code, if there is one, and the ids of the pieces."""
        unknown = self._ids[self._unknown]
        return [self._ids_in_text.get(piece, unknown) for piece in (*code, *pieces)]


def _language_and_text(text: str) -> tuple[list[str], str]:
    """Separates a code such as ``>>fr<<`` from the text; the list is empty if there is none."""
    code = re.findall(r"(?s)\A>>.*?<<", text)
    return code, text.removeprefix("".join(code))


def _fingerprint(files: Mapping[str, bytes], *settings: object) -> str:
    models = [files[name] for name in (*MODELS, *_VOCABULARIES) if name in files]
    digests = [hashlib.blake2b(content).hexdigest() for content in models]
    return hashlib.blake2b(repr([digests, settings]).encode(), digest_size=16).hexdigest()
