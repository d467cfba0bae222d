"""Export to transformers: its ``AutoTokenizer`` loads an equal tokenizer from the files.

Differences between the libraries are stated in ``tokenizer_config.json`` where possible:

- A tokenizer from a folder keeps the folder's batch settings: ``padding_side``,
  ``truncation_side``, ``split_special_tokens`` and whether there are token types. So transformers
  reads and pads texts in the same way before an import and after the export. The rest of this list
  concerns vocabularies trained here.
- ``<|endoftext|>`` in a text is ordinary text (``split_special_tokens``), as in the run. A program
  that appends the end token as text gets it split into pieces: append its id instead. With a chat
  template, which writes special tokens by name, ``[MASK]`` or sentinels, names in a text are read
  as these tokens, as users of transformers expect.
- Batches are padded with the padding token, or with the end token if the vocabulary has no padding
  token. Padding is on the left for language models, which continue texts on the right, and
  otherwise on the right.
- ``tokenizer(texts)`` returns a model's inputs: token types only if the frame of two texts has
  several (BERT).
"""

import json
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.json_text import optional_object
from .base import END_OF_TEXT, Tokenizer
from .characters import UNKNOWN, UNKNOWN_CHARACTER, CharacterTokenizer
from .families import FIXED_TYPES
from .frame import CONFIG, BatchSettings, Frame, Side
from .huggingface import HuggingFaceTokenizer, frame_of
from .marian import MarianTokenizer
from .sentencepiece import SentencePieceTokenizer
from .sentencepiece_model import obstacle, sentencepiece_backend
from .sentinels import SentinelTokenizer

# Files that `save` writes; `tokenizer.json` is made from them.
_KEPT = ("characters.json", "sentencepiece.model", "vocab.txt")


def export_tokenizer(
    tokenizer: Tokenizer,
    folder: str | PathLike[str],
    *,
    closing: bool = False,
    padding_side: Side | None = None,
    max_length: int | None = None,
) -> str:
    """Writes a tokenizer for transformers; ``load_tokenizer`` loads an equal one from the files.

    Args:
      tokenizer: The tokenizer.
      folder: The folder of the files; created if it is missing.
      closing: Whether texts are the input of an encoder-decoder, see ``Tokenizer.source_frame``.
      padding_side: The side to pad, unless the tokenizer's folder states it. If None, it depends on
        the vocabulary.
      max_length: The model's maximum number of tokens. If None, it is unlimited.

    Returns:
      A line for the log that names the files and the differences between the two libraries.

    Raises:
      DataError: The end token is requested and the vocabulary has none, or the folder cannot be
        written.
    """
    folder = Path(folder)
    frame = tokenizer.source_frame if closing else tokenizer.frame
    limit = {} if max_length is None else {"model_max_length": max_length}
    # transformers reads Marian's and T5's sentencepiece files with separate classes.
    if isinstance(tokenizer, MarianTokenizer):
        return _export_marian(tokenizer, folder, limit)
    tokenizer.save(folder)
    # Write no tokenizer.json rather than one that encodes differently.
    if isinstance(tokenizer, SentencePieceTokenizer) and (reason := obstacle(tokenizer.model)):
        return (
            "tokenizer: sentencepiece.model unchanged, and no tokenizer.json for transformers: "
            f"{reason}, which the tokenizers library cannot express exactly"
        )
    base = tokenizer.base if isinstance(tokenizer, SentinelTokenizer) else None
    if isinstance(base, SentencePieceTokenizer) and obstacle(base.model):
        return _export_t5(tokenizer, base.model, folder, limit)
    backend = _backend(tokenizer)
    _set_template(backend, frame)
    files = {"tokenizer.json": backend.to_str(pretty=True), **_older_files(tokenizer, backend)}
    config = _config(tokenizer, closing=closing, padding_side=padding_side) | limit
    if optional_object(folder / "config.json").get("model_type") in FIXED_TYPES:
        # Otherwise transformers would read the vocabulary with the model's class of tokenizer.
        config["auto_map"] = {"AutoTokenizer": [None, None]}
    for name, content in (files | {CONFIG: json.dumps(config, indent=2) + "\n"}).items():
        write_file(folder / name, content.encode())
    kept = [name for name in _KEPT if (folder / name).is_file()]
    line = _exactness(tokenizer, splits=bool(config.get("split_special_tokens")))
    return f"tokenizer: {', '.join([*kept, *files])}; {line}"


def _backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.backend()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return sentencepiece_backend(tokenizer.model)
    if isinstance(tokenizer, CharacterTokenizer):
        return _characters(tokenizer)
    if isinstance(tokenizer, SentinelTokenizer):
        backend = _backend(tokenizer.base)
        # Added tokens get ascending ids, and sentinels count down from the last id.
        for id in reversed(tokenizer.sentinels):
            name, takes_blanks = tokenizer.token(id), not tokenizer.adds_end
            token = AddedToken(name, normalized=False, lstrip=takes_blanks)
            backend.add_special_tokens([token])
        return backend
    raise DataError(f"a {tokenizer.kind} tokenizer cannot be written for transformers")


def _characters(tokenizer: CharacterTokenizer) -> tokenizers.Tokenizer:
    """Makes a BPE model without merges, whose pieces are the single characters."""
    pieces = [END_OF_TEXT, UNKNOWN, *tokenizer.characters]
    ids = {piece: id for id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [], unk_token=UNKNOWN, fuse_unk=False))
    # Decode the unknown token to U+FFFD, as `CharacterTokenizer` does.
    backend.decoder = decoders.Sequence(
        [decoders.Replace(UNKNOWN, UNKNOWN_CHARACTER), decoders.Fuse()]
    )
    backend.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT)])
    return backend


def _set_template(backend: tokenizers.Tokenizer, frame: Frame) -> None:
    """Gives a tokenizer the template of a frame, unless it already has it."""
    own = frame_of(backend)
    wanted = frame.single, frame.pair
    if [layout.marks for layout in wanted] == [own.single.marks, own.pair.marks]:
        return
    # Write each layout as a template: its special tokens around $A and $B.
    single, pair = (
        [
            part
            for text, marks in zip(("", "$A", "$B"), layout.marks, strict=False)
            for part in ([text] if text else []) + [backend.id_to_token(id) for id in marks]
        ]
        for layout in wanted
    )
    used = {id for layout in wanted for marks in layout.marks for id in marks}
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(backend.id_to_token(id), id) for id in sorted(used)],
    )


def _older_files(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Returns ``vocab.json`` and ``merges.txt``, the older format of a byte-level vocabulary."""
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


def _config(tokenizer: Tokenizer, *, closing: bool, padding_side: Side | None) -> dict[str, object]:
    special = tokenizer.special_ids
    named: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer, HuggingFaceTokenizer):
        named |= tokenizer.transformers_config()
    else:
        # The unknown token represents text, so it must not be skipped with the special tokens.
        roles = {"bos": special.bos, "eos": special.eos, "pad": special.pad}
        roles |= {"cls": special.cls, "sep": special.sep, "mask": special.mask}
        named |= {f"{r}_token": tokenizer.token(id) for r, id in roles.items() if id is not None}
    if "eos_token" in named:
        named.setdefault("pad_token", named["eos_token"])
    settings = tokenizer.batch_settings or _usual_settings(tokenizer, closing, padding_side)
    return named | settings.fields()


def _usual_settings(
    tokenizer: Tokenizer, closing: bool, padding_side: Side | None
) -> BatchSettings:
    """Returns the settings of a vocabulary that was trained here."""
    special, pair = tokenizer.special_ids, tokenizer.frame.pair
    # Encoders have a mask or [CLS]; the other vocabularies belong to models that continue text.
    continues_text = not closing and special.mask is None and special.cls is None
    return BatchSettings(
        padding_side=padding_side or ("left" if continues_text else "right"),
        # A chat template writes the names of special tokens, and a user writes the names of
        # sentinels. Both must become these tokens.
        split_special_tokens=special.mask is None
        and tokenizer.own_chat_template is None
        and not tokenizer.sentinels,
        token_types=any(map(any, pair.mark_types)),
    )


def _export_marian(tokenizer: MarianTokenizer, folder: Path, limit: dict[str, int]) -> str:
    tokenizer.save(folder)
    settings = tokenizer.batch_settings or BatchSettings(split_special_tokens=True)
    config = tokenizer.config | {"tokenizer_class": "MarianTokenizer"} | settings.fields()
    write_file(folder / CONFIG, (json.dumps(config | limit, indent=2) + "\n").encode())
    files = ", ".join(sorted(name for name in tokenizer.files if name != CONFIG))
    if tokenizer.special_ids == tokenizer.target.special_ids:
        return f"tokenizer: {files}; transformers gives the same ids and texts"
    return (
        f"tokenizer: {files}; transformers gives the same ids and texts for sources; for "
        "targets it uses the special tokens of sources, which differ"
    )


def _export_t5(tokenizer: Tokenizer, model: bytes, folder: Path, limit: dict[str, int]) -> str:
    """Writes the files of a T5, whose class makes the rest of its vocabulary itself."""
    settings = tokenizer.batch_settings or BatchSettings()
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": len(tokenizer.sentinels), **limit}
    config |= settings.fields()
    write_file(folder / "spiece.model", model)
    write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    return "tokenizer: spiece.model; transformers' T5Tokenizer gives the same ids and texts"


def _exactness(tokenizer: Tokenizer, *, splits: bool) -> str:
    differences: list[str] = []
    if not splits:
        differences.append("names of special tokens in a text are these tokens (text in flaxzoo)")
    if tokenizer.kind == "sentencepiece-unigram":
        differences.append(
            "of two ways to split a text whose scores agree in seven digits (as in 'hahaha', or in "
            "lines of more than about 16,000 characters) it may choose the other"
        )
    exceptions = f", except that {', and '.join(differences)}" if differences else ""
    return f"transformers gives the same ids and texts{exceptions}"
