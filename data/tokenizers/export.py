"""Tokenizers for transformers: the files from which its ``AutoTokenizer`` makes the same.

What differs between the libraries is said in ``tokenizer_config.json`` where it can be:

- A text that spells ``<|endoftext|>`` is ordinary text (``split_special_tokens``). Only where
  there is a mask, users write ``[MASK]`` into their texts, so there it is the mask.
- Texts in a batch are filled up with the padding token, or with the closing one where there
  is none: on the left for language models, which write on at the right, else on the right.
- ``tokenizer(texts)`` gives what models take: token types only of WordPiece, which is BERT's.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, processors

from ..errors import DataError
from ..io.atomic_io import write_file
from .base import END_OF_TEXT, Tokenizer
from .characters import UNKNOWN, UNKNOWN_CHARACTER, CharacterTokenizer
from .huggingface import HuggingFaceTokenizer
from .marian import MarianTokenizer
from .sentencepiece import SentencePieceTokenizer
from .sentencepiece_export import obstacle, sentencepiece_backend

_CONFIG = "tokenizer_config.json"
# What `save` writes besides, of which `tokenizer.json` is made.
_KEPT = ("characters.json", "sentencepiece.model", "vocab.txt")


def export_tokenizer(
    tokenizer: Tokenizer,
    folder: str | PathLike[str],
    *,
    closing: bool = False,
    max_length: int | None = None,
) -> str:
    """Writes a tokenizer for transformers, and so that ``load_tokenizer`` reads the same.

    Args:
        tokenizer: Any of ours.
        folder: Where its files go; made if it is missing.
        closing: Whether a text is closed by the end token, as what translates reads it.
        max_length: The most tokens that the model takes; without it there is no limit.

    Returns:
        One line that says what was written, and when it is not exact.

    Raises:
        DataError: A text is to be closed and the vocabulary has no end token, or the place
            cannot be written.
    """
    folder = Path(folder)
    if closing and tokenizer.special_ids.eos is None:
        raise DataError(f"this {tokenizer.kind} tokenizer has no token that ends a text")
    limit = {} if max_length is None else {"model_max_length": max_length}
    if isinstance(tokenizer, MarianTokenizer):
        return _export_marian(tokenizer, folder, limit)
    tokenizer.save(folder)
    if isinstance(tokenizer, SentencePieceTokenizer) and (reason := obstacle(tokenizer.model)):
        return (
            "tokenizer: sentencepiece.model as it is, and no tokenizer.json for transformers: "
            f"{reason}, which the tokenizers library cannot say exactly"
        )
    backend = _backend(tokenizer)
    if closing:
        _close(backend, tokenizer)
    files = {"tokenizer.json": backend.to_str(pretty=True), **_older_files(tokenizer, backend)}
    config = _config(tokenizer, closing) | limit
    for name, content in (files | {_CONFIG: json.dumps(config, indent=2) + "\n"}).items():
        write_file(folder / name, content.encode())
    kept = [name for name in _KEPT if (folder / name).is_file()]
    return f"tokenizer: {', '.join([*kept, *files])}; {_exactness(tokenizer)}"


def _backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.backend()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return sentencepiece_backend(tokenizer.model)
    if isinstance(tokenizer, CharacterTokenizer):
        return _characters(tokenizer)
    raise DataError(f"a {tokenizer.kind} tokenizer cannot be written for transformers")


def _characters(tokenizer: CharacterTokenizer) -> tokenizers.Tokenizer:
    """Byte pairs without a merge are the characters they start from."""
    pieces = [END_OF_TEXT, UNKNOWN, *tokenizer.characters]
    ids = {piece: id for id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Sequence(
        [decoders.Replace(UNKNOWN, UNKNOWN_CHARACTER), decoders.Fuse()]
    )
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT)])
    return backend


def _close(backend: tokenizers.Tokenizer, tokenizer: Tokenizer) -> None:
    id = tokenizer.special_ids.eos
    assert id is not None
    end = backend.id_to_token(id)
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, id)]
    )


def _older_files(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """The pair of files by which byte-level vocabularies were known before ``tokenizer.json``."""
    if tokenizer.kind != "byte-bpe":
        return {}
    ids = backend.get_vocab(with_added_tokens=True)
    merges = json.loads(backend.to_str())["model"]["merges"]
    lines = ["#version: 0.2", *map(" ".join, merges), ""]
    ordered = dict(sorted(ids.items(), key=lambda item: item[1]))
    return {
        "vocab.json": json.dumps(ordered, ensure_ascii=False),
        "merges.txt": "\n".join(lines),
    }


def _config(tokenizer: Tokenizer, closing: bool) -> dict[str, Any]:
    special = tokenizer.special_ids
    writes_on = not closing and special.mask is None and special.cls is None
    named: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": special.mask is None,
        "padding_side": "left" if writes_on else "right",
    }
    if isinstance(tokenizer, HuggingFaceTokenizer):
        named |= tokenizer.transformers_config()
    else:
        # The unknown one stands for text, which is not skipped with special tokens.
        roles = {"bos": special.bos, "eos": special.eos, "pad": special.pad}
        roles |= {"cls": special.cls, "sep": special.sep, "mask": special.mask}
        named |= {f"{r}_token": tokenizer.token(id) for r, id in roles.items() if id is not None}
    if "eos_token" in named:
        named.setdefault("pad_token", named["eos_token"])
    if tokenizer.kind != "wordpiece":
        named["model_input_names"] = ["input_ids", "attention_mask"]
    return named


def _export_marian(tokenizer: MarianTokenizer, folder: Path, limit: dict[str, int]) -> str:
    tokenizer.save(folder)
    config = tokenizer.config | {"tokenizer_class": "MarianTokenizer", "split_special_tokens": True}
    write_file(folder / _CONFIG, (json.dumps(config | limit, indent=2) + "\n").encode())
    files = ", ".join(sorted(name for name in tokenizer.files if name != _CONFIG))
    if tokenizer.special_ids == tokenizer.target.special_ids:
        return f"tokenizer: {files}; transformers gives the same ids and texts"
    return (
        f"tokenizer: {files}; transformers gives the same ids and texts of sources; of targets it "
        "takes the special tokens for those of sources, which are others"
    )


def _exactness(tokenizer: Tokenizer) -> str:
    same = "transformers gives the same ids and texts"
    if tokenizer.special_ids.mask is not None:
        mask = tokenizer.token(tokenizer.special_ids.mask)
        return f"{same}; only {mask} in a text is the mask to it, and letters to flaxzoo"
    if tokenizer.kind == "sentencepiece-unigram":
        return (
            f"{same}, but that of two ways to cut that are equal to the seventh digit (in lines "
            "of more than some 16,000 characters, in 'hahaha') it may choose the other"
        )
    return same
