"""Creates the tokenizer of a folder in the same way as ``AutoTokenizer`` of transformers 5.

If a folder states a class (``table.py``), the class creates the tokenizer from the folder's
vocabulary. Otherwise the tokenizer is read from ``tokenizer.json``, or converted from
``tokenizer.model``. Then the tokens that the files name are added, in the order of
``TokenizersBackend.__init__`` (``tokenization_utils_tokenizers.py``), and the template is set.
There are two deliberate differences: text is never encoded as special tokens, and BPE dropout is
off.
"""

import base64
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from ...common.errors import DataError
from ...common.fields import require
from ...common.json_text import optional_object
from ..base import END_OF_TEXT, SpecialIds
from ..folder import (
    ROLES,
    TOKENIZER_JSON,
    Folder,
    JsonObject,
    Token,
    library_errors,
    name_of,
    read_folder,
    read_ids,
    read_merges,
    read_pieces,
)
from ..huggingface import HuggingFaceTokenizer
from ..sentencepiece import SentencePieceTokenizer
from ..sentencepiece_model import (
    CONTROL,
    USER_DEFINED,
    ModelProto,
    merges_by_rank,
    parse_model,
    transformers_backend,
)
from .table import BERT, GPT2, Family, family_of
from .vocabulary import Vocabulary

# The usual names of special tokens, which are used if the files state neither a class nor a model.
_USUAL_NAMES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "bos_token": ("<s>", END_OF_TEXT),
    "eos_token": ("</s>", END_OF_TEXT),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}


# The maximum length of a text that a step inserts, and the maximum growth of a text in all steps.
_LONGEST_REPLACEMENT, _LARGEST_GROWTH = 256, 64


def load_folder(path: Path, files: tuple[Path, ...]) -> HuggingFaceTokenizer | None:
    """Creates the tokenizer of a folder.

    Args:
      path: The path of the folder.
      files: The files of the vocabulary: ``tokenizer.json``, or the files of an older format.

    Returns:
      The tokenizer, or None for a sentencepiece file that transformers would not read in this
      folder.

    Raises:
      DataError: A file is damaged, or a setting has a value that is not supported.
    """
    if files[0].name.endswith(TOKENIZER_JSON):
        return _load_json(read_folder(path, optional_object(files[0])), files[0])
    folder = read_folder(path, {})
    if files[0].suffix in (".model", ".spm"):
        return _load_sentencepiece(folder, files[0])
    return _load_older(folder, files)


def _load_json(folder: Folder, file: Path) -> HuggingFaceTokenizer:
    """Loads a ``tokenizer.json``. A family uses only its vocabulary and its template."""
    with library_errors(f"{file} is not a tokenizer of the tokenizers library"):
        source = tokenizers.Tokenizer.from_file(str(file))
    # With BPE dropout, a text would have different ids each time it is encoded.
    if isinstance(source.model, models.BPE):
        source.model.dropout = None
    family, vocabulary = family_of(folder), Vocabulary()
    if family is None:
        _check_growth(file, folder.content)
        family = Family(backend=lambda *_: source)
    else:
        vocabulary = _vocabulary_of_json(file, folder.content, source, family)
    # tokenizer.json may name the padding token only in its padding section.
    padding = {"pad_token": source.padding["pad_token"]} if source.padding else {}
    family = _usually_named(folder, family, source.get_vocab(with_added_tokens=True))
    family = dataclasses.replace(family, tokens={**padding, **family.tokens})
    return _assembled(folder, family, vocabulary, source.post_processor)


def _check_growth(file: Path, content: JsonObject) -> None:
    """Checks that the normalizer and the decoder do not make a text much longer.

    Otherwise, with a folder from an untrusted source, even a short text could fill the memory.

    The output of a step may be the input of another step. Therefore the check applies all steps in
    order to a short text that contains everything that they match or insert.
    """
    steps = [*_steps(content.get("normalizer")), *_steps(content.get("decoder"))]
    steps = [step for step in steps if step.get("type") not in _OF_TOKENS]
    written = [str(step.get(name, "")) for step in steps for name in ("content", "prepend")]
    read = [str(text) for step in steps for text in (step.get("pattern") or {}).values()]
    for text in written:
        require(
            len(text) <= _LONGEST_REPLACEMENT,
            f"{file}: a replacement of {len(text)} characters in the normalizer or the decoder is "
            f"not supported: the limit is {_LONGEST_REPLACEMENT}",
            DataError,
        )
    # Add characters of each kind: both cases, a digit, white space, an accent, an ideograph.
    probe = "".join(dict.fromkeys([*written, *read])) + "Ab 1\té漢.\n "
    text = probe
    for step in steps:
        with library_errors(f"{file}: the step {step.get('type')} of the normalizer fails"):
            text = _one_step(step).normalize_str(text)
        require(
            len(text) <= _LARGEST_GROWTH * len(probe),
            f"{file}: the normalizer or the decoder turns {len(probe)} characters into "
            f"{len(text)}: the limit is {_LARGEST_GROWTH} times as many",
            DataError,
        )


# The decoder steps that join tokens and hardly change the length of a text.
_OF_TOKENS = ("ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "CTC", "ByteFallback", "Fuse")
_OF_TOKENS += ("Strip",)


def _steps(part: Any) -> Iterator[JsonObject]:
    """Yields the steps of a normalizer or decoder in order."""
    match part:
        case {"type": "Sequence"}:
            for step in part.get("normalizers") or part.get("decoders") or []:
                yield from _steps(step)
        case dict():
            yield part


def _one_step(step: JsonObject) -> tokenizers.normalizers.Normalizer:
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    content = json.dumps({"version": "1.0", "added_tokens": [], "normalizer": step, "model": model})
    return tokenizers.Tokenizer.from_str(content).normalizer


def _vocabulary_of_json(
    file: Path, content: JsonObject, source: tokenizers.Tokenizer, family: Family
) -> Vocabulary:
    # Older files do not state the type of the model; the library infers it from the fields.
    kind = type(source.model).__name__
    require(
        kind.replace("WordLevel", "WordPiece") == family.model,
        f"{file}: a {family.classes[0]} has a {family.model} model, not {kind}: correct "
        f"tokenizer_class, for example to PreTrainedTokenizerFast",
        DataError,
    )
    if family.model == "Unigram":
        steps = _steps(content.get("normalizer"))
        charsmaps = (step.get("precompiled_charsmap", "") for step in steps)
        return Vocabulary(
            scores=list(map(tuple, content["model"]["vocab"])),
            charsmap=base64.b64decode(next(filter(None, charsmaps), "")),
        )
    # The library writes each merge as a pair, whereas older files contain a string.
    model = json.loads(source.to_str())["model"]
    return Vocabulary(ids=model["vocab"], merges=list(map(tuple, model.get("merges", []))))


def _load_sentencepiece(folder: Folder, file: Path) -> HuggingFaceTokenizer | None:
    family = family_of(folder)
    is_stated = folder.is_stated or folder.settings.file.is_file()
    # If no class is stated, transformers reads only tokenizer.model, and flaxzoo uses any other
    # sentencepiece file without converting it.
    if family is None and not (is_stated and file.name == "tokenizer.model"):
        return None
    folder = dataclasses.replace(folder, is_stated=is_stated)
    proto = parse_model(SentencePieceTokenizer.from_file(file).model)
    controls = [
        AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL)
        for piece in proto.pieces
        if piece.type in (CONTROL, USER_DEFINED)
    ]
    if family is None:
        return _generic(folder, proto, controls)
    _check_files(folder, family, (file,))
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    vocabulary = Vocabulary(
        scores=pieces,
        charsmap=proto.normalizer_spec.precompiled_charsmap,
        controls=controls,
        unknown=proto.trainer_spec.unk_id,
    )
    # A sentencepiece file contains no merges; transformers derives them from the ids.
    if family.model == "BPE":
        ids = {piece: id for id, (piece, _) in enumerate(pieces)}
        vocabulary = Vocabulary(
            ids=ids,
            merges=merges_by_rank({piece: (id,) for piece, id in ids.items()}),
            controls=controls,
        )
    settings = folder.settings.over(family.tokens)
    return _assembled(folder, family, family.rearranged(vocabulary, settings))


def _generic(folder: Folder, proto: ModelProto, controls: list[AddedToken]) -> HuggingFaceTokenizer:
    """Converts a ``tokenizer.model`` without a family as transformers does (Mistral, Phi-3)."""
    spec = proto.trainer_spec
    roles = (
        ("bos_token", spec.bos_id, spec.bos_piece),
        ("eos_token", spec.eos_id, spec.eos_piece),
        ("unk_token", spec.unk_id, spec.unk_piece),
    )
    # If `legacy` is missing, it is true; if it is null, it is false.
    legacy = folder.settings.flag("legacy", "legacy" not in folder.settings.values)
    with library_errors(f"{folder.path}: tokenizer.model cannot be converted"):
        backend = transformers_backend(
            proto, {id: token.content for id, token in folder.added.items()}, legacy=legacy
        )
    if proto.normalizer_spec.add_dummy_prefix:
        # Find added tokens in the text before the normalizer puts a space in front of it.
        plain = {id: _changed(token, normalized=False) for id, token in folder.added.items()}
        folder = dataclasses.replace(folder, added=plain)
    special = [token for token in controls if token.special]
    family = Family(
        tokens={role: name for role, id, name in roles if id >= 0},
        backend=lambda *_: backend,
        extra=lambda *_: [*special],
    )
    return _assembled(folder, family, Vocabulary())


def _changed(token: AddedToken, **flags: bool) -> AddedToken:
    properties: JsonObject = {**token.__getstate__(), **flags}
    return AddedToken(**properties)


def _load_older(folder: Folder, files: tuple[Path, ...]) -> HuggingFaceTokenizer:
    """Loads a vocabulary in an older format: ``vocab.txt``, or a JSON file with merges."""
    family = family_of(folder)
    names = " and ".join(file.name for file in files)
    require(
        family is not None or not folder.class_name,
        f"{folder.settings.file}: tokenizer_class {folder.class_name!r} is not supported with "
        f"{names}: give {TOKENIZER_JSON}, which save_pretrained of transformers writes",
        DataError,
    )
    # If no class is stated, the number of files decides between BERT and GPT-2.
    is_wordpiece = len(files) == 1
    family = family or (BERT if is_wordpiece else GPT2)
    _check_files(folder, family, files)
    if is_wordpiece:
        ids = read_pieces(files[0])
        settings = folder.settings.over(family.tokens)
        needed = {settings.named(role) for role in ("unk_token", "cls_token", "sep_token")}
        missing = sorted(needed - ids.keys() - set(map(str, folder.added.values())))
        problem = f"{files[0]} is not a WordPiece vocabulary: it has no line"
        require(not missing, f"{problem} {' and no line '.join(missing)}", DataError)
        # Ignore the names of special tokens, which are upper case in every vocabulary.
        words = re.sub(r"(?m)^\[.*\]$", "", "\n".join(ids))
        is_lowercase = folder.is_stated or words == words.lower()
        lowercase = folder.settings.flag("do_lower_case", is_lowercase)
        folder = dataclasses.replace(
            folder, settings=folder.settings.changed(do_lower_case=lowercase)
        )
        vocabulary = Vocabulary(ids=ids)
    else:
        ids = read_ids(files[0])
        # Check that every byte has a piece, because the library would silently drop other bytes.
        missing = family.alphabet - ids.keys()
        require(
            not missing,
            f"{files[0]} is not a vocabulary for byte-level BPE: {len(missing)} of the 256 "
            "bytes have no piece",
            DataError,
        )
        vocabulary = Vocabulary(ids=ids, merges=read_merges(files[1], ids))
    return _assembled(folder, _usually_named(folder, family, ids), vocabulary)


def _check_files(folder: Folder, family: Family, files: tuple[Path, ...]) -> None:
    """Checks that the files contain the kind of vocabulary that the family requires."""
    given, read = " and ".join(file.name for file in files), " and ".join(family.files)
    problem = f"{folder.path}: a {family.classes[0]} has no {given}: give {read}, or"
    is_read = files[0].suffix == Path(family.files[0]).suffix
    require(is_read, f"{problem} {TOKENIZER_JSON}", DataError)


def _usually_named(folder: Folder, family: Family, ids: Mapping[str, int]) -> Family:
    """Sets the usual names of a family's special tokens if the folder states no class or model."""
    if folder.is_stated:
        return family
    usual = {role: [*filter(ids.__contains__, names)] for role, names in _USUAL_NAMES.items()}
    tokens = {role: names[0] for role, names in usual.items() if names}
    return dataclasses.replace(family, tokens=tokens)


def _assembled(
    folder: Folder,
    family: Family,
    vocabulary: Vocabulary,
    post_processor: processors.PostProcessor | None = None,
) -> HuggingFaceTokenizer:
    """Creates the tokenizer of a family, and adds its tokens and its template.

    Args:
      folder: The folder.
      family: The family.
      vocabulary: The vocabulary.
      post_processor: The template of ``tokenizer.json``.
    """
    settings = folder.settings.over(family.tokens)
    # If the mask token is given as a plain string, it includes the space before it if the default
    # mask token of the class does.
    mask, usual_mask = settings.values.get("mask_token"), family.tokens.get("mask_token")
    if isinstance(mask, str) and isinstance(usual_mask, AddedToken):
        settings = settings.changed(mask_token=AddedToken(mask, lstrip=usual_mask.lstrip))
    # The library may fail or panic on the vocabulary of a damaged file.
    with library_errors(f"{folder.path}: no tokenizer can be made of the vocabulary"):
        backend = family.backend(vocabulary, settings)
        backend.post_processor = post_processor
        # Add tokens in the same order as transformers, because the order determines their ids.
        named = settings.by_role()
        extra = settings.values.get("extra_special_tokens")
        others = (
            family.extra(vocabulary, settings)
            if extra is None
            else settings.tokens("extra_special_tokens")
        )
        _add_tokens(backend, folder, named, others)
        if family.plain_specials:
            every = dict.fromkeys(map(name_of, [*named.values(), *others]))
            backend.add_tokens([AddedToken(name, special=True) for name in every])
        # The template refers to special tokens by their ids, so add it after all special tokens.
        backend.post_processor = family.template(backend, settings)
    problem = f"{folder.path}: the vocabulary of the tokenizer is empty: fetch it again"
    require(backend.get_vocab_size(with_added_tokens=True), problem, DataError)
    # For BPE, transformers ignores the clean-up setting unless another setting forces it.
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    applies = settings.flag(forced, False) or not isinstance(backend.model, models.BPE)
    cleans = applies and settings.flag("clean_up_tokenization_spaces", False)
    names = {role: name_of(token) for role, token in named.items()}
    tokenizer = HuggingFaceTokenizer(backend, _special_ids(backend, names), cleans=cleans)
    tokenizer.named_tokens = names
    return tokenizer


def _special_ids(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> SpecialIds:
    roles = names.keys() & {*ROLES}
    ids = {role.removesuffix("_token"): backend.token_to_id(names[role]) for role in roles}
    # Do not pad with the end token, because the end of a text would then be masked as padding.
    if ids.get("pad") == ids.get("eos"):
        ids["pad"] = None
    return SpecialIds(**ids)


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Folder,
    named: Mapping[str, Token],
    extra: list[Token],
) -> None:
    # If a file describes a token with its properties, do not add the token by its name alone.
    described = [*backend.get_added_tokens_decoder().values(), *folder.added.values()]
    known = set(map(name_of, described))
    others = [token for token in (*named.values(), *extra) if name_of(token) not in known]
    # A token with a role is special, even if its file does not mark it as special.
    names = set(map(name_of, named.values()))
    backend.add_tokens(
        [
            AddedToken(token, special=True)
            if isinstance(token, str)
            else _changed(token, special=token.special or token.content in names)
            for token in (*folder.added.values(), *others)
        ]
    )
