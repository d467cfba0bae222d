"""Makes the tokenizer of a folder as ``AutoTokenizer`` of transformers 5 does.

The class of a folder (``families.py``) makes a tokenizer from its vocabulary; without a class it is
``tokenizer.json``, or a conversion of ``tokenizer.model``. Then the tokens that the files name are
added, in the order of ``TokenizersBackend.__init__`` (``tokenization_utils_tokenizers.py``), and
the template is set. Two deliberate differences: text never becomes special tokens, and BPE dropout
is off.
"""

import base64
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from ..common.errors import DataError
from .base import END_OF_TEXT, JsonObject, SpecialIds
from .families import BERT, GPT2, T5, Family, Vocabulary, family_of, plain_template
from .folder import (
    ROLES,
    TOKENIZER_JSON,
    Folder,
    Settings,
    Token,
    check_ids,
    checked_id,
    library_errors,
    name_of,
    read_folder,
    read_ids,
    read_merges,
    read_pieces,
)
from .huggingface import HuggingFaceTokenizer
from .sentencepiece import ModelProto, SentencePieceTokenizer, parse_model
from .sentencepiece_model import merges_by_id, transformers_backend

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
_CONTROL, _USER_DEFINED = 3, 4  # types of pieces, as sentencepiece numbers them
_LONGEST_REPLACEMENT, _LARGEST_GROWTH = 256, 64


def load_folder(place: Path, files: tuple[Path, ...]) -> HuggingFaceTokenizer | None:
    """Makes the tokenizer of a folder.

    Args:
      place: The folder.
      files: The vocabulary: ``tokenizer.json``, or the files of an older format.

    Returns:
      The tokenizer; None for a sentencepiece file that transformers would not read there.

    Raises:
      DataError: A file is damaged, or a setting has a value that is not supported.
    """
    is_json = len(files) == 1 and files[0].suffix == ".json"
    folder = read_folder(place, files[0] if is_json else None)
    if not is_json and folder.class_name in _ANY_CLASS:  # these read no older format
        is_stated = folder.model_type is not None
        folder = dataclasses.replace(folder, class_name=None, is_stated=is_stated)
    # Some byte-level vocabularies state LlamaTokenizer, whose class would split them wrongly.
    is_llama = is_json and folder.class_name == "LlamaTokenizer"
    family = family_of(
        folder.model_type,
        folder.class_name,
        is_byte_level=is_llama and '"ByteLevel"' in json.dumps(folder.content),
        keeps_class=folder.keeps_class,
    )
    if is_json:
        # A family takes only the vocabulary from tokenizer.json; without one it is used unchanged.
        backend = _read_json(files[0], folder.content, is_used=family is None)
        if family is None:
            return _assembled(folder, None, Vocabulary(), backend)
        vocabulary = _vocabulary_of_json(files[0], folder.content, family)
        return _assembled(folder, family, vocabulary, backend)
    if files[0].suffix in (".model", ".spm"):
        return _load_sentencepiece(folder, family, files[0])
    # Older formats: vocab.txt, or a JSON vocabulary with merges.
    family = _family_by_form(folder, family, files)
    if len(files) == 1:
        ids = read_pieces(files[0])
        folder = _lowercased_by_form(folder, ids)
        vocabulary = Vocabulary(ids=ids)
    else:
        ids = read_ids(files[0], every_byte=family.every_byte)
        vocabulary = Vocabulary(ids=ids, merges=read_merges(files[1], ids))
    # Without a config, special tokens are found by their usual names.
    if not folder.is_stated:
        family = dataclasses.replace(family, **_usual_tokens(ids))
    if len(files) == 1:
        _check_wordpiece(folder, family, files[0], ids)
    return _assembled(folder, family, vocabulary, None)


def _read_json(file: Path, content: JsonObject, *, is_used: bool) -> tokenizers.Tokenizer:
    """Opens a ``tokenizer.json`` whose ids are in bounds, and its normalizer if that is used."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    # A huge id would size the embedding table, so check the ids before anything is built.
    check_ids(vocabulary if isinstance(vocabulary, dict) else {}, file)
    for token in content.get("added_tokens") or []:
        checked_id(token.get("id") if isinstance(token, dict) else None, file, repr(token))
    if is_used:
        _check_growth(file, content)
    with library_errors(f"{file} is not a tokenizer of the tokenizers library"):
        backend = tokenizers.Tokenizer.from_file(str(file))
    # BPE dropout would give the same text different ids each time.
    if isinstance(backend.model, models.BPE):
        backend.model.dropout = None
    return backend


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
        if not isinstance(text, str) or len(text) > _LONGEST_REPLACEMENT:
            raise DataError(
                f"{file}: a replacement of {len(str(text))} characters in the normalizer is not "
                f"supported: the most is {_LONGEST_REPLACEMENT}"
            )
    # Add one character of each kind: cases, a digit, white space, an accent, an ideograph.
    probe = "".join(dict.fromkeys(map(str, [*written, *read]))) + "Ab 1\té漢.\n "
    text = probe
    for step in steps:
        with library_errors(f"{file}: the step {step.get('type')} of the normalizer fails"):
            text = _one_step(step).normalize_str(text)
        if len(text) > _LARGEST_GROWTH * len(probe):
            raise DataError(
                f"{file}: the normalizer or the decoder makes {len(probe)} characters "
                f"{len(text)}: the most is {_LARGEST_GROWTH} times as many"
            )


# Steps of decoders that join tokens, and hardly change the length of a text.
_OF_TOKENS = ("ByteLevel", "WordPiece", "Metaspace", "BPEDecoder", "CTC", "ByteFallback", "Fuse")
_OF_TOKENS += ("Strip",)


def _steps(part: Any) -> Iterator[JsonObject]:
    """Yields the steps of a normalizer or decoder in order."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        for step in part.get("normalizers") or part.get("decoders") or []:
            yield from _steps(step)
    elif isinstance(part, dict):
        yield part


def _one_step(step: JsonObject) -> tokenizers.normalizers.Normalizer:
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    content = json.dumps({"version": "1.0", "added_tokens": [], "normalizer": step, "model": model})
    return tokenizers.Tokenizer.from_str(content).normalizer


def _vocabulary_of_json(file: Path, content: JsonObject, family: Family) -> Vocabulary:
    model = content["model"]
    pieces = model.get("vocab")
    # Older files state no type, so infer it from the fields.
    untyped = "BPE" if "merges" in model else "WordPiece"
    kind = model.get("type") or ("Unigram" if isinstance(pieces, list) else untyped)
    fits = kind == family.model or (kind, family.model) == ("WordLevel", "WordPiece")
    if not fits:
        raise DataError(
            f"{file}: a {family.classes[0]} has a {family.model} model, not {kind}: correct "
            f"tokenizer_class, for example to PreTrainedTokenizerFast"
        )
    if family.model == "Unigram":
        return Vocabulary(
            scores=[(piece, score) for piece, score in pieces],
            charsmap=next(
                (
                    base64.b64decode(step["precompiled_charsmap"])
                    for step in _steps(content.get("normalizer"))
                    if step.get("type") == "Precompiled" and step.get("precompiled_charsmap")
                ),
                None,
            ),
        )
    # A merge is a string in older files and a pair in newer ones.
    merges = model.get("merges") or []
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    ids = pieces if isinstance(pieces, dict) else {piece: i for i, piece in enumerate(pieces)}
    return Vocabulary(ids=ids, merges=[(left, right) for left, right in pairs])


def _load_sentencepiece(
    folder: Folder, family: Family | None, file: Path
) -> HuggingFaceTokenizer | None:
    # Only T5's settings have extra_ids.
    if family is None and not folder.is_stated and "extra_ids" in folder.settings.values:
        family = T5
    is_stated = folder.is_stated or folder.settings.file.is_file()
    # Without a class transformers reads only tokenizer.model; others are plain sentencepiece.
    if family is None and not (is_stated and file.name == "tokenizer.model"):
        return None
    folder = dataclasses.replace(folder, is_stated=is_stated)
    proto = parse_model(SentencePieceTokenizer.from_file(file).model)
    if family is not None and not family.files[0].endswith(".model"):
        raise DataError(
            f"{folder.place}: a {family.classes[0]} has no {file.name}: give {family.files[0]} or "
            f"{TOKENIZER_JSON}"
        )
    controls = [
        AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL)
        for piece in proto.pieces
        if piece.type in (_CONTROL, _USER_DEFINED)
    ]
    if family is None:
        return _generic(folder, proto, controls)
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    charsmap = proto.normalizer_spec.precompiled_charsmap or None
    vocabulary = Vocabulary(scores=pieces, charsmap=charsmap, controls=controls)
    # A sentencepiece file has no merges; transformers derives them from the ids.
    if family.model == "BPE":
        ids = {piece: id for id, (piece, _) in enumerate(pieces)}
        vocabulary = Vocabulary(ids=ids, merges=merges_by_id(ids), controls=controls)
    settings = folder.settings.over(family.tokens)
    vocabulary = family.rearranged(vocabulary, settings)
    return _assembled(folder, family, vocabulary, None)


def _generic(folder: Folder, proto: ModelProto, controls: list[AddedToken]) -> HuggingFaceTokenizer:
    """Converts a ``tokenizer.model`` without a family as transformers does (Mistral, Phi-3)."""
    own, spec = folder.settings.values, proto.trainer_spec
    ids = {"bos_token": spec.bos_id, "eos_token": spec.eos_id, "unk_token": spec.unk_id}
    names = {"bos_token": spec.bos_piece, "eos_token": spec.eos_piece, "unk_token": spec.unk_piece}
    # A missing `legacy` means true, and null means false.
    legacy = folder.settings.flag("legacy", "legacy" not in own)
    with library_errors(f"{folder.place}: tokenizer.model cannot be converted"):
        backend = transformers_backend(
            proto, {id: token.content for id, token in folder.added.items()}, legacy=legacy
        )
    if proto.normalizer_spec.add_dummy_prefix:
        plain = {id: _with_flags(token, normalized=False) for id, token in folder.added.items()}
        folder = dataclasses.replace(folder, added=plain)
    special = [token for token in controls if token.special]
    family = Family(
        classes=(),
        model="BPE",
        files=("tokenizer.model",),
        tokens={role: name for role, name in names.items() if ids[role] >= 0},
        backend=lambda vocabulary, settings: backend,
        extra=lambda vocabulary, settings: [*special],
    )
    return _assembled(folder, family, Vocabulary(), None)


def _with_flags(token: AddedToken, **flags: bool) -> AddedToken:
    own = {
        name: getattr(token, name)
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return AddedToken(token.content, **{**own, **flags})


def _family_by_form(folder: Folder, family: Family | None, files: tuple[Path, ...]) -> Family:
    """Returns the family of a vocabulary in an older format."""
    names = " and ".join(file.name for file in files)
    if family is None and folder.class_name is not None:
        raise DataError(
            f"{folder.settings.file}: tokenizer_class {folder.class_name!r} is not supported with "
            f"{names}: give {TOKENIZER_JSON}, which save_pretrained of transformers writes"
        )
    family = family or (BERT if len(files) == 1 else GPT2)
    if len(family.files) != len(files) or family.files[0].endswith(".model"):
        raise DataError(
            f"{folder.place}: a {family.classes[0]} has no {names}: give "
            f"{' and '.join(family.files)}, or {TOKENIZER_JSON}"
        )
    return family


def _usual_tokens(ids: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of a family for a vocabulary alone: the usual names that it has."""
    found = {role: [n for n in names if n in ids] for role, names in _USUAL_NAMES.items()}
    every = list(dict.fromkeys(name for names in found.values() for name in names))
    return {
        "tokens": {role: names[0] for role, names in found.items() if names},
        "extra": lambda vocabulary, settings: every,
    }


def _lowercased_by_form(folder: Folder, ids: Mapping[str, int]) -> Folder:
    """States whether text is lowercased, if no file states it and the pieces show it."""
    values = folder.settings.values
    if folder.is_stated or values.get("do_lower_case") is not None:
        return folder
    # Names of special tokens are upper case in every vocabulary.
    words = (p for p in ids if not (p.startswith("[") and p.endswith("]")))
    values = {**values, "do_lower_case": all(p == p.lower() for p in words)}
    return dataclasses.replace(folder, settings=dataclasses.replace(folder.settings, values=values))


def _check_wordpiece(folder: Folder, family: Family, file: Path, ids: Mapping[str, int]) -> None:
    settings = folder.settings.over({**BERT.tokens, **family.tokens})
    names = [settings.named(role) for role in ("unk_token", "cls_token", "sep_token")]
    added = {token.content for token in folder.added.values()}
    missing = [name for name in names if name not in ids and name not in added]
    if missing:
        raise DataError(
            f"{file} is not a WordPiece vocabulary: it has no line {' and no line '.join(missing)}"
        )


def _assembled(
    folder: Folder,
    family: Family | None,
    vocabulary: Vocabulary,
    source: tokenizers.Tokenizer | None,
) -> HuggingFaceTokenizer:
    """Adds tokens and a template to the tokenizer of a family.

    Args:
      folder: The files.
      family: The family; None for the tokenizer of ``tokenizer.json`` as it is.
      vocabulary: The family's vocabulary.
      source: The tokenizer of ``tokenizer.json``; None if there is none.
    """
    settings = folder.settings.over(family.tokens if family else {})
    # A mask given as a plain string strips the space before it if the class's mask does.
    mask, default = settings.values.get("mask_token"), (family.tokens if family else {})
    usual_mask = default.get("mask_token")
    if isinstance(mask, str) and isinstance(usual_mask, AddedToken):
        token = AddedToken(mask, lstrip=usual_mask.lstrip)
        settings = dataclasses.replace(settings, values={**settings.values, "mask_token": token})
    # tokenizer.json may name the padding token in its padding section only.
    padding = source.padding if source else None
    if padding:
        settings = settings.over({"pad_token": padding["pad_token"]})
    # The library may fail or panic on the vocabulary of a damaged file.
    with library_errors(f"{folder.place}: no tokenizer can be made of the vocabulary"):
        if family is None:
            assert source is not None
            backend = source
        else:
            backend = family.backend(vocabulary, settings)
            if source is not None and source.post_processor is not None:
                backend.post_processor = source.post_processor
        # Add tokens in the order of transformers, since the order decides the ids of new tokens.
        named = _named_tokens(folder)
        named = {**{r: settings.token(r) for r in ROLES}, **named}
        extra = _extra_tokens(settings, family, vocabulary)
        named = {role: token for role, token in named.items() if token is not None}
        _add_tokens(backend, folder, named, extra)
        if family is not None and family.plain_specials:
            every = dict.fromkeys(map(name_of, [*named.values(), *extra]))
            backend.add_tokens([AddedToken(name, special=True) for name in every])
        # The template refers to special tokens by id, so all of them must exist by now.
        if family is not None and family.template is not None:
            backend.post_processor = family.template(backend, settings)
        elif {"add_bos_token", "add_eos_token"} & settings.values.keys():
            backend.post_processor = plain_template(backend, settings)
    if not backend.get_vocab_size(with_added_tokens=True):
        raise DataError(f"{folder.place}: the vocabulary of the tokenizer is empty: fetch it again")
    ids = {role: backend.token_to_id(name_of(t)) for role, t in named.items() if role in ROLES}
    # Without a config, further roles are found by the usual names of tokens.
    if not folder.is_stated:
        for role, names in _USUAL_NAMES.items():
            found = [id for id in map(backend.token_to_id, names) if id is not None]
            if found and role not in settings.stated:
                ids.setdefault(role, found[0])
    if ids.get("pad_token") == ids.get("eos_token"):
        ids.pop("pad_token", None)  # padding must not mask the end of a text
    special = SpecialIds(**{role.removesuffix("_token"): id for role, id in ids.items()})
    # transformers ignores the clean-up setting for BPE unless it is forced.
    forced = settings.flag(
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
    )
    cleans = settings.flag("clean_up_tokenization_spaces", False)
    cleans = cleans and (forced or not isinstance(backend.model, models.BPE))
    tokenizer = HuggingFaceTokenizer(backend, special, cleans=cleans)
    tokenizer.named_tokens = {role: name_of(token) for role, token in named.items()}
    return tokenizer


def _extra_tokens(settings: Settings, family: Family | None, vocabulary: Vocabulary) -> list[Token]:
    """Returns the special tokens without a role."""
    stated = settings.values.get("extra_special_tokens", {})
    if not isinstance(stated, dict):  # an object names roles
        return settings.tokens("extra_special_tokens") or []
    if family is not None:
        return family.extra(vocabulary, settings)
    return settings.tokens("additional_special_tokens") or []


def _named_tokens(folder: Folder) -> dict[str, Token]:
    """Returns the special tokens of roles that only some models have, as ``image_token``."""
    values = folder.settings.values
    stated = {n: v for n, v in values.items() if n.endswith("_token") and n not in ROLES}
    tokens = {n: v for n, v in stated.items() if isinstance(v, AddedToken)}
    strings = {n: v for n, v in stated.items() if isinstance(v, str)}
    extra = values.get("extra_special_tokens")
    # An object names further roles; a list names only tokens.
    others = extra if isinstance(extra, dict) else {}
    more = values.get("model_specific_special_tokens")
    if not strings and not others and isinstance(more, dict):
        others = more
    return {**tokens, **strings, **others}


def _add_tokens(
    backend: tokenizers.Tokenizer,
    folder: Folder,
    named: Mapping[str, Token],
    extra: list[Token],
) -> None:
    # A token that a file describes with properties is not added again by its name.
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens: list[Token] = list(folder.added.values())
    known |= {name_of(token) for token in tokens}
    for token in [*named.values(), *extra]:
        if name_of(token) not in known and token not in tokens:
            tokens.append(token)
    # A token with a role is special, even if its file does not mark it.
    names = {name_of(token) for token in named.values()}
    backend.add_tokens(
        [
            AddedToken(token, special=True)
            if isinstance(token, str)
            else _with_flags(token, special=token.special or token.content in names)
            for token in tokens
        ]
    )
