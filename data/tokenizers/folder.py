"""The files of a tokenizer's folder: read once, with their types and bounds checked.

A transformers folder describes a tokenizer in up to eight files. The precedence of these files
follows transformers 5 (``tokenization_utils_base.py``): ``added_tokens_decoder`` in
``tokenizer_config.json`` replaces ``special_tokens_map.json`` and ``added_tokens.json``; if it is
missing, ``special_tokens_map.json`` overrides ``tokenizer_config.json``, and the added tokens of
``tokenizer.json`` override ``added_tokens.json``.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from tokenizers import AddedToken

from ..common.errors import DataError
from ..common.fields import Range, expectation, require, without_none
from ..common.files import file_lines
from ..common.json_text import optional_object
from .frame import CONFIG

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object as it was read."""
Token: TypeAlias = str | AddedToken
TOKENIZER_JSON = "tokenizer.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The settings that name special tokens. transformers adds the tokens in this order."""
MOST_IDS = 2**22
"""Upper bound of ids: several times the largest published vocabulary."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The properties of an added token."""

_Id = Annotated[int, Range(least=0, below=MOST_IDS)]
_NumTokens = Annotated[int, Range(least=0, below=2**16)]
_ADDED_TOKEN = {"content": str, **dict.fromkeys(FLAGS, bool | None)}
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
# Settings that would change the ids and are not implemented: the supported values, and a remedy.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "fast_tokenizer_files": (
        (None, [], [TOKENIZER_JSON]),
        f"rename the file to use {TOKENIZER_JSON}",
    ),
    "fix_mistral_regex": ((None, False), f"correct the pre_tokenizer in {TOKENIZER_JSON}"),
}


def checked(value: Any, hint: object, file: Path, name: str) -> Any:
    """Returns a value of a file after checking it against a type; see ``fields.expectation``.

    Raises:
      DataError: The value has another type, or is out of the type's range.
    """
    if expected := expectation(value, hint):
        raise DataError(f"{file}: {name} must be {expected}, got {value!r}: correct it")
    return value


@dataclass(frozen=True)
class Settings:
    """The settings of ``tokenizer_config.json``, overridden by ``special_tokens_map.json``.

    Attributes:
      file: ``tokenizer_config.json``.
      values: The settings, with the defaults of the tokenizer's class.
      stated: The settings that the files state.
    """

    file: Path
    values: Mapping[str, object]
    stated: Mapping[str, object] = field(default_factory=dict)

    def over(self, defaults: Mapping[str, object]) -> "Settings":
        """Returns the settings with default values for settings that are missing."""
        return replace(self, values={**defaults, **self.values})

    def changed(self, **values: object) -> "Settings":
        """Returns a copy of the settings with the given values."""
        return replace(self, values={**self.values, **values})

    def get(self, name: str, hint: object, default: Any = None) -> Any:
        """Returns a setting of a type; the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else checked(value, hint, self.file, name)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a Boolean setting; the default if it is missing or null."""
        return self.get(name, bool, default)

    def number(self, name: str, default: int) -> int:
        """Returns a number of tokens of the vocabulary; the default if it is missing or null."""
        return self.get(name, _NumTokens, default)

    def token(self, role: str) -> Token | None:
        """Returns a special token, or None."""
        return self.get(role, Token)

    def named(self, role: str) -> str:
        """Returns the name of a special token that the tokenizer needs.

        Raises:
          DataError: There is no such token.
        """
        return name_of(checked(self.values.get(role), Token, self.file, role))

    def tokens(self, name: str) -> list[Token]:
        """Returns a list of tokens; an empty list if the setting is missing or null."""
        return list(self.get(name, tuple[Token, ...], ()))


@dataclass(frozen=True)
class Folder:
    """The content of the files of a folder.

    Attributes:
      path: The folder.
      model_type: The family of the model in the folder; None if no file states it.
      class_name: The class of the tokenizer in transformers, without ``Fast``; None if no file
        states it.
      keeps_class: Whether the stated class applies even where transformers otherwise replaces it,
        because ``auto_map`` names another reader.
      is_stated: Whether a model or class is stated, so that the defaults of transformers apply.
      settings: The settings.
      added: The added tokens, keyed by the id that the files state. Only the order of these ids
        matters: a token gets its id in the vocabulary, or the next free id.
      content: The content of ``tokenizer.json``; empty if there is none.
    """

    path: Path
    model_type: str | None
    class_name: str | None
    keeps_class: bool
    is_stated: bool
    settings: Settings
    added: Mapping[int, AddedToken]
    content: JsonObject

    @property
    def is_byte_level(self) -> bool:
        """Whether a step of ``tokenizer.json`` has an alphabet of bytes."""
        return '"ByteLevel"' in json.dumps(self.content)


def read_folder(path: Path, file: Path | None) -> Folder:
    """Reads the files that state a tokenizer, except for vocabularies in older formats.

    Args:
      path: The folder.
      file: The ``tokenizer.json`` to read; None if there is none.

    Raises:
      DataError: A file is damaged, or a value has a wrong type or is out of bounds.
    """
    # Read the files; a missing file is empty.
    config_file = path / CONFIG
    values = optional_object(config_file)
    model = optional_object(path / "config.json")
    content = {} if file is None else optional_object(file)
    _check_supported(values, config_file)
    # The class and the model, which decide the defaults.
    class_name = values.pop("tokenizer_class", None) or model.get("tokenizer_class")
    class_name = checked(class_name, str | None, path, "tokenizer_class")
    model_type = checked(model.get("model_type"), str | None, path, "model_type")
    readers = values.get("auto_map")
    readers = readers.get("AutoTokenizer") if isinstance(readers, dict) else readers
    # The template of a tokenizer.json decides which tokens are added.
    if content:
        values.pop("add_bos_token", None)
        values.pop("add_eos_token", None)
    # Special tokens and added tokens of the newer and the older formats.
    _check_extra(values, config_file)
    # transformers 5 renamed this setting.
    if _EXTRA[0] in values and not values.get(_EXTRA[1]):
        values[_EXTRA[1]] = values.pop(_EXTRA[0])
    if "added_tokens_decoder" not in values:
        _merge_special_tokens_map(values, path / "special_tokens_map.json")
    added = {
        checked(id, _Id, source, f"the id of {name}"): token
        for source, name, id, token in _added_tokens(path, values, content)
    }
    # Settings that describe tokens become tokens.
    values.pop("added_tokens_decoder", None)
    settings = {
        name: _with_tokens(value, config_file, name, is_token=name.endswith("_token"))
        for name, value in values.items()
    }
    # If a token with a role is also an added token, it has the properties that are stated there.
    by_name = {token.content: token for token in added.values()}
    for role in ROLES:
        token = settings.get(role)
        if isinstance(token, str | AddedToken):
            settings[role] = by_name.get(name_of(token), token)
    return Folder(
        path=path,
        model_type=model_type,
        class_name=class_name and class_name.removesuffix("Fast"),
        keeps_class=readers is not None,
        is_stated=class_name is not None or model_type is not None,
        settings=Settings(config_file, settings, settings),
        added=dict(sorted(added.items())),
        content=content,
    )


def _check_supported(values: JsonObject, file: Path) -> None:
    for name, (supported, remedy) in _UNSUPPORTED.items():
        value = values.get(name)
        problem = f"{file}: {name} {value!r} is not supported: {remedy}, and remove the setting"
        require(value in supported, problem, DataError)


def _check_extra(values: JsonObject, file: Path) -> None:
    """Checks that extra special tokens are a list, or an object of role names and tokens."""
    for name in _EXTRA:
        extra = values.get(name) or []
        tokens = [*extra.values()] if isinstance(extra, dict) else extra
        checked(tokens, tuple[str | dict, ...], file, name)


def _merge_special_tokens_map(values: JsonObject, file: Path) -> None:
    """Overrides settings by the settings in ``special_tokens_map.json``, the older format."""
    for name, value in optional_object(file).items():
        if name == "extra_special_tokens" and isinstance(value, list):
            before = values.get(name) or []
            values[name] = [*before, *(token for token in value if token not in before)]
        else:
            is_token = isinstance(value, dict)
            values[name] = _with_tokens(value, file, name, is_token=is_token, special=True)
    _check_extra(values, file)


def _added_tokens(
    path: Path, values: JsonObject, content: JsonObject
) -> Iterator[tuple[Path, str, object, AddedToken]]:
    """Yields the file, the token's name in it, the id and the token, for each added token.

    Later items override earlier items.
    """
    # The newer format states all added tokens and replaces the older files.
    if "added_tokens_decoder" in values:
        file = path / CONFIG
        stated = checked(values["added_tokens_decoder"], dict, file, "added_tokens_decoder")
        for id, token in stated.items():
            name = f"added_tokens_decoder[{id!r}]"
            number = int(id) if id.isdecimal() and len(id) < 20 else id
            yield file, name, number, _token(token, file, name)
        return
    names = {str(values[role]) for role in ROLES if values.get(role)}
    names |= set(map(str, values.get("extra_special_tokens") or []))
    file = path / "added_tokens.json"
    for name, id in optional_object(file).items():
        special = name in names
        yield file, name, id, AddedToken(name, normalized=not special, special=special)
    file = path / TOKENIZER_JSON
    tokens = checked(content.get("added_tokens") or [], list, file, "added_tokens")
    for number, token in enumerate(tokens):
        name = f"added_tokens[{number}]"
        added = _token(token, file, name)
        yield file, name, token.get("id"), added


def _with_tokens(
    value: object, file: Path, name: str, *, is_token: bool = False, special: bool | None = None
) -> object:
    """Returns a setting with objects that describe tokens replaced by ``AddedToken``."""
    if isinstance(value, dict) and (is_token or value.get("__type") == "AddedToken"):
        return _token(value, file, name, special=special)
    if isinstance(value, dict):
        return {key: _with_tokens(item, file, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        is_token = name.endswith("special_tokens")
        return [_with_tokens(x, file, name, is_token=is_token, special=special) for x in value]
    return value


def _token(value: Any, file: Path, name: str, *, special: bool | None = None) -> AddedToken:
    fields = checked(value, dict, file, name)
    for key, hint in _ADDED_TOKEN.items():
        checked(fields.get(key), hint, file, f"{name}.{key}")
    flags = {flag: fields.get(flag) for flag in FLAGS}
    flags |= {} if special is None else {"special": special}
    return AddedToken(fields["content"], **without_none(flags))


def name_of(token: Token) -> str:
    """Returns the text of a token."""
    return token if isinstance(token, str) else token.content


def check_ids(ids: Mapping[str, object], file: Path) -> None:
    """Checks the ids of a vocabulary.

    Raises:
      DataError: An id is not a whole number in ``[0, MOST_IDS)``.
    """
    for piece, id in ids.items():
        if type(id) is not int or not 0 <= id < MOST_IDS:
            checked(id, _Id, file, f"the id of {piece!r}")


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns an error or a panic of the ``tokenizers`` library into a one-line DataError.

    Args:
      what: What failed, for the message.

    Raises:
      DataError: The library failed.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:  # a panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"{what} ({reason})") from None


def read_ids(file: Path) -> dict[str, int]:
    """Reads a JSON object from piece to id.

    Raises:
      DataError: The file is not a vocabulary.
    """
    ids = optional_object(file)
    check_ids(ids, file)
    return ids


def read_merges(file: Path, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Reads two pieces per line in rank order, after an optional ``#version`` line.

    Raises:
      DataError: A line is malformed, or the result of a merge is not in the vocabulary.
    """
    merges: list[tuple[str, str]] = []
    for _, number, line in file_lines(file):
        if not line or line.startswith("#version"):
            continue
        pieces = line.split(" ")
        if len(pieces) != 2:
            raise DataError(
                f"{file} line {number} is not two pieces separated by a space: {line!r}"
            )
        # Both pieces and the merged piece need an id.
        if not {*pieces, "".join(pieces)} <= ids.keys():
            raise DataError(
                f"{file} line {number} merges {line!r}, but a piece or the merged piece is "
                f"not in the vocabulary: fetch both files again"
            )
        merges.append((pieces[0], pieces[1]))
    return merges


def read_pieces(file: Path) -> dict[str, int]:
    """Reads BERT's ``vocab.txt``: one piece per line; the id is the number of the line from 0.

    Raises:
      DataError: A piece occurs twice. Empty lines may repeat.
    """
    ids: dict[str, int] = {}
    for _, number, line in file_lines(file):
        piece = line.rstrip()
        if piece and piece in ids:
            raise DataError(
                f"{file} line {number} repeats the piece {piece!r} of line {ids[piece] + 1}: "
                "fetch it again"
            )
        ids[piece] = number - 1
    return ids
