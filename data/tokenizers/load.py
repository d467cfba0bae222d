"""Recognizes the format of a tokenizer's files, and loads the tokenizer."""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from ..chat_templates.chat_template import find_template
from ..common.errors import DataError
from ..common.fields import require
from .base import Tokenizer
from .frame import BatchSettings


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Loads a tokenizer of any kind.

    Args:
      path: A folder that ``save`` wrote; a Hugging Face model folder, which is read in the same way
        as in transformers 5; or one file. The file can be ``vocab.txt`` (WordPiece),
        ``tokenizer.json``, ``vocab.json`` together with ``merges.txt`` or ``encoder.json`` together
        with ``vocab.bpe`` (byte-level BPE; both names may have the same prefix, as in
        ``gpt2_encoder.json``), or a sentencepiece ``.model``. Marian's ``source.spm``,
        ``target.spm`` and ``vocab.json`` can be loaded only as a folder.

    Returns:
      The tokenizer.

    Raises:
      DataError: The path does not exist, or is not a supported tokenizer.
    """
    path = Path(path).expanduser()
    problem = (
        f"no tokenizer at {path}: the file or folder does not exist; check the path, or train "
        "one (flaxzoo tokenizer train)"
    )
    require(path.exists(), problem, DataError)
    folder = path if path.is_dir() else path.parent
    tokenizer = _load_folder(path) if path.is_dir() else _load_file(path)
    template = find_template(folder)
    # The chat template uses the names of special tokens from all files of the folder, not only from
    # tokenizer_config.json.
    if template is not None and tokenizer.named_tokens is not None:
        template = replace(template, tokens=tokenizer.named_tokens)
    tokenizer.own_chat_template = template
    tokenizer.batch_settings = BatchSettings.of_folder(folder)
    return tokenizer


def _load_folder(folder: Path) -> Tokenizer:
    from .marian import MODELS, MarianTokenizer

    if any((folder / name).is_file() for name in MODELS):
        return MarianTokenizer(folder)
    known = [names[0] for names in _FORMATS if all((folder / n).is_file() for n in names)]
    # A sentencepiece file may have any name.
    models = sorted([*folder.glob("*.model"), *folder.glob("*.spm")])
    names = known[:1] or [model.name for model in models]
    require(names, f"no tokenizer in the folder {folder}: it should contain {_KNOWN}", DataError)
    problem = f"{folder} contains several sentencepiece models ({', '.join(names)}): name one"
    require(len(names) == 1, problem, DataError)
    return _load_file(folder / names[0])


def _load_file(path: Path) -> Tokenizer:
    from .sentinels import with_sentinels

    # Import the library of a tokenizer only if it is needed.
    files = _files_of(path)
    if path.name.endswith(_CHARACTERS):
        from .characters import CharacterTokenizer

        return with_sentinels(CharacterTokenizer.load(path), path)
    # A file with this name was written by `save`; transformers does not read it.
    if path.name != _SENTENCEPIECE:
        from .families.assemble import load_folder

        if (tokenizer := load_folder(path.parent, files)) is not None:
            return with_sentinels(tokenizer, path)
    from .sentencepiece import SentencePieceTokenizer

    return with_sentinels(SentencePieceTokenizer.from_file(path), path)


_KNOWN = (
    "tokenizer.json, vocab.json with merges.txt, encoder.json with vocab.bpe, "
    "a WordPiece vocab.txt, a sentencepiece .model, or a folder with one of them "
    "or with Marian's source.spm, target.spm and vocab.json"
)
_CHARACTERS, _SENTENCEPIECE = "characters.json", "sentencepiece.model"
# The files of each format. The first format whose files exist is loaded, so original files precede
# files that were exported from them.
_FORMATS = (
    (_CHARACTERS,),
    (_SENTENCEPIECE,),
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("vocab.txt",),
)
_MODELS = (".model", ".spm")


def _files_of(path: Path) -> tuple[Path, ...]:
    """Returns all files of the format that a file belongs to. Their names may have a prefix."""
    for names in (*_FORMATS, *zip(_MODELS)):
        for name in filter(path.name.endswith, names):
            prefix = path.name.removesuffix(name)
            files = tuple(path.with_name(prefix + other) for other in names)
            missing = " and ".join(file.name for file in files if not file.is_file())
            problem = f"{path} is half of a byte-level BPE tokenizer: add {missing} to its folder"
            require(not missing, problem, DataError)
            return files
    raise DataError(f"{path} is not a supported tokenizer: give {_KNOWN}")
