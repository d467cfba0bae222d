"""Makes the tokenizer of a folder as ``AutoTokenizer`` of transformers 5 does.

If a folder states a class (``table.py``), the class makes the tokenizer from the folder's
vocabulary. Otherwise the tokenizer is ``tokenizer.json`` itself, or a conversion of
``tokenizer.model``. Then the tokens that the files name are added, in the order of
``TokenizersBackend.__init__`` (``tokenization_utils_tokenizers.py``), and the template is set. Two
deliberate differences: text never becomes special tokens, and BPE dropout is off.
"""

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from ...common.errors import DataError
from ...common.fields import require
from ..base import END_OF_TEXT, SpecialIds
from ..folder import (
    FLAGS,
    ROLES,
    TOKENIZER_JSON,
    Folder,
    JsonObject,
    Settings,
    Token,
    check_ids,
    checked,
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
from .table import BERT, GPT2, T5, Family, family_of
from .vocabulary import Vocabulary

# The names of special tokens, used if the files state neither a class nor a model.
_USUAL_NAMES = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "bos_token": ("<s>", END_OF_TEXT),
    "eos_token": ("</s>", END_OF_TEXT),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}
_ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
_LONGEST_REPLACEMENT, _LARGEST_GROWTH = 256, 64


def load_folder(path: Path, files: tuple[Path, ...]) -> HuggingFaceTokenizer | None:
    """Makes the tokenizer of a folder.

    Args:
      path: The folder.
      files: The vocabulary: ``tokenizer.json``, or the files of an older format.

    Returns:
      The tokenizer; None for a sentencepiece file that transformers would not read there.

    Raises:
      DataError: A file is damaged, or a setting has a value that is not supported.
    """
    if len(files) == 1 and files[0].suffix == ".json":
        return _load_json(read_folder(path, files[0]), files[0])
    folder = read_folder(path, None)
    # The classes in `_ANY_CLASS` read only `tokenizer.json`, and no older format.
    if folder.class_name in _ANY_CLASS:
        is_stated = folder.model_type is not None
        folder = dataclasses.replace(folder, class_name=None, is_stated=is_stated)
    if files[0].suffix in (".model", ".spm"):
        return _load_sentencepiece(folder, files[0])
    return _load_older(folder, files)


def _load_json(folder: Folder, file: Path) -> HuggingFaceTokenizer:
    """Loads a ``tokenizer.json``; a family takes only its vocabulary and its template."""
    family, content = family_of(folder), folder.content
    _check_ids(file, content)
    if family is None:
        _check_growth(file, content)
    with library_errors(f"{file} is not a tokenizer of the tokenizers library"):
        source = tokenizers.Tokenizer.from_file(str(file))
    # BPE dropout would give the same text different ids each time.
    if isinstance(source.model, models.BPE):
        source.model.dropout = None
    vocabulary = Vocabulary() if family is None else _vocabulary_of_json(file, content, family)
    family = family or Family(backend=lambda *_: source)
    make = family.backend

    def with_template(vocabulary: Vocabulary, settings: Settings) -> tokenizers.Tokenizer:
        backend = make(vocabulary, settings)
        backend.post_processor = source.post_processor
        return backend

    # tokenizer.json may name the padding token in its padding section only.
    padding = {"pad_token": source.padding["pad_token"]} if source.padding else {}
    tokens = {**padding, **family.tokens}
    family = dataclasses.replace(family, backend=with_template, tokens=tokens)
    return _assembled(folder, family, vocabulary)


def _check_ids(file: Path, content: JsonObject) -> None:
    """Checks the ids of a ``tokenizer.json``: a huge id would give a huge embedding table."""
    match content:
        case {"model": {"vocab": dict(pieces)}}:
            check_ids(pieces, file)
    added = checked(content.get("added_tokens") or [], tuple[dict, ...], file, "added_tokens")
    check_ids({f"added_tokens[{i}]": token.get("id") for i, token in enumerate(added)}, file)


def _check_growth(file: Path, content: JsonObject) -> None:
    """Checks that neither the normalizer nor the decoder multiplies text.

    One step's output may be another step's input, so the steps run in order on a short probe of
    everything that they match or insert.
    """
    steps = [*_steps(content.get("normalizer")), *_steps(content.get("decoder"))]
    steps = [step for step in steps if step.get("type") not in _OF_TOKENS]
    written = [step.get("content") or step.get("prepend") or "" for step in steps]
    read = [next(iter((step.get("pattern") or {"": ""}).values()), "") for step in steps]
    for text in written:
        require(
            isinstance(text, str) and len(text) <= _LONGEST_REPLACEMENT,
            f"{file}: a replacement of {len(str(text))} characters in the normalizer or the "
            f"decoder is not supported: the limit is {_LONGEST_REPLACEMENT}",
            DataError,
        )
    # Add one character of each kind: cases, a digit, white space, an accent, an ideograph.
    probe = "".join(dict.fromkeys(map(str, [*written, *read]))) + "Ab 1\té漢.\n "
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


# Decoder steps that join tokens and hardly change the length of a text.
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


def _vocabulary_of_json(file: Path, content: JsonObject, family: Family) -> Vocabulary:
    model = content["model"]
    pieces = model.get("vocab")
    # Older files state no type of model, so infer the type from the fields.
    untyped = "BPE" if "merges" in model else "WordPiece"
    kind = model.get("type") or ("Unigram" if isinstance(pieces, list) else untyped)
    require(
        ("WordPiece" if kind == "WordLevel" else kind) == family.model,
        f"{file}: a {family.classes[0]} has a {family.model} model, not {kind}: correct "
        f"tokenizer_class, for example to PreTrainedTokenizerFast",
        DataError,
    )
    if family.model == "Unigram":
        charsmaps = (s.get("precompiled_charsmap") for s in _steps(content.get("normalizer")))
        charsmap = next(filter(None, charsmaps), "")
        return Vocabulary(scores=list(map(tuple, pieces)), charsmap=base64.b64decode(charsmap))
    # A merge is a string in older files and a pair in newer files.
    merges = (m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or [])
    ids = pieces if isinstance(pieces, dict) else {piece: i for i, piece in enumerate(pieces)}
    return Vocabulary(ids=ids, merges=[(left, right) for left, right in merges])


def _load_sentencepiece(folder: Folder, file: Path) -> HuggingFaceTokenizer | None:
    family = family_of(folder)
    # Only T5's settings have extra_ids.
    if family is None and not folder.is_stated and "extra_ids" in folder.settings.values:
        family = T5
    is_stated = folder.is_stated or folder.settings.file.is_file()
    # If no class is stated, transformers reads only tokenizer.model, and other sentencepiece files
    # are used without a conversion.
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
    # A sentencepiece file has no merges; transformers derives them from the ids.
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
    # A missing `legacy` means true, and null means false.
    legacy = folder.settings.flag("legacy", "legacy" not in folder.settings.values)
    with library_errors(f"{folder.path}: tokenizer.model cannot be converted"):
        backend = transformers_backend(
            proto, {id: token.content for id, token in folder.added.items()}, legacy=legacy
        )
    if proto.normalizer_spec.add_dummy_prefix:
        # Find added tokens in a text before the normalizer puts a space in front of the text.
        plain = {id: _with_flags(token, normalized=False) for id, token in folder.added.items()}
        folder = dataclasses.replace(folder, added=plain)
    special = [token for token in controls if token.special]
    family = Family(
        tokens={role: name for role, id, name in roles if id >= 0},
        backend=lambda *_: backend,
        extra=lambda *_: [*special],
    )
    return _assembled(folder, family, Vocabulary())


def _with_flags(token: AddedToken, **flags: bool) -> AddedToken:
    return AddedToken(token.content, **{name: getattr(token, name) for name in FLAGS} | flags)


def _load_older(folder: Folder, files: tuple[Path, ...]) -> HuggingFaceTokenizer:
    """Loads an older format: ``vocab.txt``, or a JSON vocabulary with merges."""
    family = family_of(folder)
    names = " and ".join(file.name for file in files)
    require(
        family is not None or folder.class_name is None,
        f"{folder.settings.file}: tokenizer_class {folder.class_name!r} is not supported with "
        f"{names}: give {TOKENIZER_JSON}, which save_pretrained of transformers writes",
        DataError,
    )
    # Without a class, the number of files decides between BERT and GPT-2.
    is_wordpiece = len(files) == 1
    family = family or (BERT if is_wordpiece else GPT2)
    _check_files(folder, family, files)
    if is_wordpiece:
        ids = read_pieces(files[0])
        folder = _lowercased_by_form(folder, ids)
        vocabulary = Vocabulary(ids=ids)
    else:
        ids = read_ids(files[0])
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(ids)
        # The library would silently drop bytes that have no piece.
        require(
            not family.every_byte or not missing,
            f"{files[0]} is not a vocabulary for byte-level BPE: {len(missing)} of the 256 "
            "bytes have no piece",
            DataError,
        )
        vocabulary = Vocabulary(ids=ids, merges=read_merges(files[1], ids))
    # Without a config, special tokens are found by their usual names.
    if not folder.is_stated:
        usual = _usual_names(ids)
        tokens = {role: names[0] for role, names in usual.items()}
        every = list(dict.fromkeys(itertools.chain(*usual.values())))
        family = dataclasses.replace(family, tokens=tokens, extra=lambda *_: every)
    if is_wordpiece:
        _check_wordpiece(folder, family, files[0], ids)
    return _assembled(folder, family, vocabulary)


def _check_files(folder: Folder, family: Family, files: tuple[Path, ...]) -> None:
    """Checks that the files contain the kind of vocabulary that a family needs."""
    kinds = [[Path(file).suffix in (".model", ".spm") for file in x] for x in (files, family.files)]
    given, read = " and ".join(file.name for file in files), " and ".join(family.files)
    problem = f"{folder.path}: a {family.classes[0]} has no {given}: give {read}, or"
    require(kinds[0] == kinds[1], f"{problem} {TOKENIZER_JSON}", DataError)


def _usual_names(ids: Mapping[str, int]) -> dict[str, list[str]]:
    """Returns the usual names of special tokens that a vocabulary has, by role."""
    found = {role: list(filter(ids.__contains__, names)) for role, names in _USUAL_NAMES.items()}
    return {role: names for role, names in found.items() if names}


def _lowercased_by_form(folder: Folder, ids: Mapping[str, int]) -> Folder:
    """Infers ``do_lower_case`` from the pieces, unless the files state it, a class or a model."""
    if folder.is_stated:
        return folder
    # Names of special tokens are upper case in every vocabulary.
    words = (p for p in ids if not (p.startswith("[") and p.endswith("]")))
    lowercase = folder.settings.flag("do_lower_case", all(p == p.lower() for p in words))
    return dataclasses.replace(folder, settings=folder.settings.changed(do_lower_case=lowercase))


def _check_wordpiece(folder: Folder, family: Family, file: Path, ids: Mapping[str, int]) -> None:
    settings = folder.settings.over({**BERT.tokens, **family.tokens})
    known = {*ids, *(token.content for token in folder.added.values())}
    names = list(map(settings.named, ("unk_token", "cls_token", "sep_token")))
    missing = " and no line ".join(name for name in names if name not in known)
    problem = f"{file} is not a WordPiece vocabulary: it has no line {missing}"
    require(not missing, problem, DataError)


def _assembled(folder: Folder, family: Family, vocabulary: Vocabulary) -> HuggingFaceTokenizer:
    """Adds tokens and a template to the tokenizer of a family."""
    settings = folder.settings.over(family.tokens)
    # A mask token given as a plain string strips the space before it if the class's mask token
    # does.
    mask, usual_mask = settings.token("mask_token"), family.tokens.get("mask_token")
    if isinstance(mask, str) and isinstance(usual_mask, AddedToken):
        token = AddedToken(mask, lstrip=usual_mask.lstrip)
        settings = settings.changed(mask_token=token)
    # The library may fail or panic on the vocabulary of a damaged file.
    with library_errors(f"{folder.path}: no tokenizer can be made of the vocabulary"):
        backend = family.backend(vocabulary, settings)
        # Add tokens in the order of transformers, since the order decides the ids of new tokens.
        roles = {role: token for role in ROLES if (token := settings.token(role)) is not None}
        named = {**roles, **_named_tokens(settings.stated)}
        extra = _extra_tokens(settings, family, vocabulary)
        _add_tokens(backend, folder, named, extra)
        if family.plain_specials:
            every = dict.fromkeys(map(name_of, [*named.values(), *extra]))
            backend.add_tokens([AddedToken(name, special=True) for name in every])
        # The template refers to special tokens by id, so all of them must exist by now.
        backend.post_processor = family.template(backend, settings)
    problem = f"{folder.path}: the vocabulary of the tokenizer is empty: fetch it again"
    require(backend.get_vocab_size(with_added_tokens=True), problem, DataError)
    # transformers ignores the clean-up setting for BPE unless it is forced.
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    applies = settings.flag(forced, False) or not isinstance(backend.model, models.BPE)
    cleans = applies and settings.flag("clean_up_tokenization_spaces", False)
    names = {role: name_of(token) for role, token in named.items()}
    special = _special_ids(backend, folder, names)
    tokenizer = HuggingFaceTokenizer(backend, special, cleans=cleans)
    tokenizer.named_tokens = names
    return tokenizer


def _special_ids(
    backend: tokenizers.Tokenizer, folder: Folder, names: Mapping[str, str]
) -> SpecialIds:
    roles = {role: names[role] for role in ROLES if role in names}
    # Without a config, find the tokens of the remaining roles by their usual names.
    if not folder.is_stated:
        usual = _usual_names(backend.get_vocab(with_added_tokens=True))
        unstated = usual.keys() - folder.settings.stated.keys()
        roles = {role: usual[role][0] for role in unstated} | roles
    ids = {role: backend.token_to_id(name) for role, name in roles.items()}
    if ids.get("pad_token") == ids.get("eos_token"):
        # Padding must not mask the end of a text.
        ids.pop("pad_token", None)
    return SpecialIds(**{role.removesuffix("_token"): id for role, id in ids.items()})


def _extra_tokens(settings: Settings, family: Family, vocabulary: Vocabulary) -> list[Token]:
    """Returns the special tokens without a role."""
    stated = settings.values.get("extra_special_tokens", {})
    if isinstance(stated, dict):  # an object names roles
        return family.extra(vocabulary, settings)
    return settings.tokens("extra_special_tokens")


def _named_tokens(values: Mapping[str, Any]) -> dict[str, Token]:
    """Returns the special tokens of roles that only some models have, such as ``image_token``."""
    stated = {n: v for n, v in values.items() if n.endswith("_token") and n not in ROLES}
    tokens, strings = (
        {name: value for name, value in stated.items() if isinstance(value, kind)}
        for kind in (AddedToken, str)
    )
    # An object names roles with their tokens; a list names only tokens.
    objects = ("extra_special_tokens", "model_specific_special_tokens")
    others, more = (x if isinstance(x := values.get(name), dict) else {} for name in objects)
    return {**tokens, **strings, **(others if strings or others else more)}


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Folder,
    named: Mapping[str, Token],
    extra: list[Token],
) -> None:
    # Do not add a token by its name alone if a file describes it with properties.
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {token.content for token in folder.added.values()}
    others = [token for token in (*named.values(), *extra) if name_of(token) not in known]
    # A token with a role is special, even if its file does not mark it.
    names = set(map(name_of, named.values()))
    backend.add_tokens(
        [
            AddedToken(token, special=True)
            if isinstance(token, str)
            else _with_flags(token, special=token.special or token.content in names)
            for token in (*folder.added.values(), *others)
        ]
    )
