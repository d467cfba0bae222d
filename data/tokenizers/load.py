"""Recognizes the files of a tokenizer, and loads them."""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from ..chat_templates.chat_template import find_template
from ..common.errors import DataError
from ..common.fields import require
from ..common.json_text import optional_object
from .base import Tokenizer
from .frame import BatchSettings


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Loads a tokenizer of any kind.

    Args:
      path: A folder written by ``save``, a Hugging Face model folder, which is read as
        transformers 5 reads it, or one file: ``vocab.txt`` (WordPiece), ``tokenizer.json``,
        ``vocab.json`` with ``merges.txt`` or ``encoder.json`` with ``vocab.bpe`` (byte-level BPE;
        a common prefix as in ``gpt2_encoder.json`` is allowed), a sentencepiece ``.model``.
        Marian's ``source.spm``, ``target.spm`` and ``vocab.json`` are loaded only as a folder.

    Returns:
      The tokenizer.

    Raises:
      DataError: The path does not exist, or is not a supported tokenizer.
    """
    path = Path(path).expanduser()
    tokenizer = _load_vocabulary(path)
    folder = path if path.is_dir() else path.parent
    template = find_template(folder)
    # Use the names of special tokens from all files of the folder, not only from
    # tokenizer_config.json.
    if template is not None and tokenizer.named_tokens is not None:
        template = replace(template, tokens=tokenizer.named_tokens)
    tokenizer.own_chat_template = template
    tokenizer.batch_settings = BatchSettings.of_folder(folder)
    return tokenizer


def _load_vocabulary(path: Path) -> Tokenizer:
    if path.is_dir():
        # Import a tokenizer's library only when it is needed.
        from .marian import MODELS, MarianTokenizer

        if any((path / name).is_file() for name in MODELS):
            return MarianTokenizer(path)
        path = _file_in(path)
    elif not path.is_file():
        raise DataError(
            f"no tokenizer at {path}: the file or folder does not exist; check the path, or train "
            "one (flaxzoo tokenizer train)"
        )
    from .sentinels import with_sentinels

    return with_sentinels(_load_file(path), path)


def _load_file(path: Path) -> Tokenizer:
    files = (path,)
    if path.suffix == ".json" and path.name != "tokenizer.json":
        content = optional_object(path)
        if content.get("kind") == "characters":
            from .characters import CharacterTokenizer

            return CharacterTokenizer.from_json(content, path)
        # An object of integers is a vocabulary, and its merges are in another file.
        if isinstance(next(iter(content.values()), None), int):
            files = (path, _partner(path))
        elif not isinstance(content.get("model"), dict):
            raise DataError(f"{path} is JSON but not a supported tokenizer: give {_KNOWN}")
    elif path.suffix == ".bpe" or path.name.endswith("merges.txt"):
        files = (_partner(path), path)
    elif path.suffix not in (".json", ".model", ".spm", ".txt"):
        raise DataError(f"{path} is not a supported tokenizer: give {_KNOWN}")
    # `save` writes this name for plain sentencepiece; transformers does not read it.
    if path.name != "sentencepiece.model":
        from .families.assemble import load_folder

        if (tokenizer := load_folder(path.parent, files)) is not None:
            return tokenizer
    from .sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer.from_file(path)


_KNOWN = (
    "tokenizer.json, vocab.json with merges.txt, encoder.json with vocab.bpe, "
    "a WordPiece vocab.txt, a sentencepiece .model, or a folder with one of them "
    "or with Marian's source.spm, target.spm and vocab.json"
)
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
# The files of each format. The first format whose files exist is loaded: original files come before
# files that were exported from originals.
_IN_A_FOLDER = (
    ("characters.json",),
    ("sentencepiece.model",),
    ("tokenizer.json",),
    *_PAIRS,
    ("vocab.txt",),
)


def _file_in(folder: Path) -> Path:
    for names in _IN_A_FOLDER:
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    # A sentencepiece file may have any name.
    models = sorted([*folder.glob("*.model"), *folder.glob("*.spm")])
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise DataError(f"{folder} contains several sentencepiece models ({names}): name one")
    require(models, f"no tokenizer in the folder {folder}: it should contain {_KNOWN}", DataError)
    return models[0]


def _partner(path: Path) -> Path:
    """Finds the second file of a byte-level BPE tokenizer; both names may have a common prefix."""
    name = path.name
    ends = [*_PAIRS, *((merges, vocabulary) for vocabulary, merges in _PAIRS)]
    names = [name.removesuffix(one) + other for one, other in ends if name.endswith(one)]
    found = [path.with_name(name) for name in names if path.with_name(name).is_file()]
    if not found:
        missing = " or ".join(names or (merges for _, merges in _PAIRS))
        raise DataError(
            f"{path} is half of a byte-level BPE tokenizer: add {missing} to its folder"
        )
    return found[0]
