"""Reads the files in a tokenizer's folder, and checks the types and bounds of their values.

A transformers folder describes a tokenizer in up to eight files. Their precedence is the same as in
transformers 5 (``tokenization_utils_base.py``): ``added_tokens_decoder`` in
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
from ..common.fields import Range, expectation, require
from ..common.files import file_lines
from ..common.json_text import optional_object
from .frame import CONFIG

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object as it was read."""
Token: TypeAlias = str | AddedToken
TOKENIZER_JSON = "tokenizer.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The settings that name special tokens. Transformers adds the tokens in this order."""
MOST_IDS = 2**22
"""The upper bound of ids, which is several times the size of the largest published vocabulary."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The names of an added token's properties."""

_Id = Annotated[int, Range(least=0, below=MOST_IDS)]
_NumTokens = Annotated[int, Range(least=0, below=2**16)]
_ADDED_TOKEN = {"content": str, **dict.fromkeys(FLAGS, bool)}
_OLDER_EXTRA, _EXTRA, _OF_MODEL = (
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)
# For each setting that would change the ids but is not implemented: the values that are supported,
# and what the user can do about other values.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "fast_tokenizer_files": (
        (None, [], [TOKENIZER_JSON]),
        f"rename the file to use {TOKENIZER_JSON}",
    ),
    "fix_mistral_regex": ((None, False), f"correct the pre_tokenizer in {TOKENIZER_JSON}"),
}


def checked(value: Any, hint: object, file: Path, name: str) -> Any:
    """Checks the type of a value from a file, and returns the value; see ``fields.expectation``.

    Raises:
      DataError: The value has a different type, or is out of the type's range.
    """
    if expected := expectation(value, hint):
        raise DataError(f"{file}: {name} must be {expected}, got {value!r}: correct it")
    return value


@dataclass(frozen=True)
class Settings:
    """The settings of ``tokenizer_config.json``, overridden by ``special_tokens_map.json``.

    Attributes:
      file: The path of ``tokenizer_config.json``.
      values: The settings, including the defaults of the tokenizer's class.
      stated: Only the settings that the files state.
    """

    file: Path
    values: Mapping[str, object]
    stated: Mapping[str, object] = field(default_factory=dict)

    def over(self, defaults: Mapping[str, object]) -> "Settings":
        """Returns a copy of the settings, with default values for settings that are missing."""
        return replace(self, values={**defaults, **self.values})

    def changed(self, **values: object) -> "Settings":
        """Returns a copy of the settings with the given values."""
        return replace(self, values={**self.values, **values})

    def get(self, name: str, hint: object, default: Any = None) -> Any:
        """Returns a setting of the given type, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else checked(value, hint, self.file, name)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a Boolean setting, or the default if it is missing or null."""
        return self.get(name, bool, default)

    def number(self, name: str, default: int) -> int:
        """Returns a setting that is a number of tokens, or the default if it is missing or null."""
        return self.get(name, _NumTokens, default)

    def by_role(self) -> dict[str, Token]:
        """Returns the special tokens by role.

        First come the usual roles, then the roles that only some models have, such as
        ``image_token``.
        """
        stated = {name: value for name, value in self.values.items() if name.endswith("_token")}
        every = {**dict.fromkeys(ROLES), **stated, **self.get(_OF_MODEL, Mapping[str, Token], {})}
        return {role: token for role, token in every.items() if isinstance(token, str | AddedToken)}

    def named(self, role: str) -> str:
        """Returns the name of a special token that the tokenizer needs.

        Raises:
          DataError: There is no such token.
        """
        return name_of(checked(self.values.get(role), Token, self.file, role))

    def tokens(self, name: str) -> list[Token]:
        """Returns a setting that is a list of tokens; empty if the setting is missing or null."""
        return list(self.get(name, tuple[Token, ...], ()))


@dataclass(frozen=True)
class Folder:
    """The content of the files in a folder.

    Attributes:
      path: The path of the folder.
      model_type: The family of the model in the folder; "" if no file states it.
      class_name: The class of the tokenizer in transformers, without ``Fast``; "" if no file
        states it.
      keeps_class: Whether the stated class applies even where transformers would otherwise replace
        it, because ``auto_map`` names a different class.
      is_stated: Whether a file states the model or the class, so that transformers' defaults apply.
      settings: The settings.
      added: The added tokens, keyed by the ids that the files state. Only the order of these ids
        matters: the actual id of a token is its id in the vocabulary, or else the next free id.
      content: The content of ``tokenizer.json``; empty if there is none.
    """

    path: Path
    model_type: str
    class_name: str
    keeps_class: bool
    is_stated: bool
    settings: Settings
    added: Mapping[int, AddedToken]
    content: JsonObject

    @property
    def is_byte_level(self) -> bool:
        """Whether a step in ``tokenizer.json`` is byte-level."""
        return '"ByteLevel"' in json.dumps(self.content)


def read_folder(path: Path, content: JsonObject) -> Folder:
    """Reads the files that describe a tokenizer, except vocabularies in older formats.

    Args:
      path: The path of the folder.
      content: The content of ``tokenizer.json``; empty if there is none.

    Raises:
      DataError: A file is damaged, or a value has a wrong type or is out of bounds.
    """
    # Read the files. A missing file counts as empty.
    config_file = path / CONFIG
    values = optional_object(config_file)
    model = optional_object(path / "config.json")
    _check_supported(values, config_file)
    # Read the class and the model, which determine the defaults.
    class_name = values.pop("tokenizer_class", None) or model.get("tokenizer_class") or ""
    class_name = checked(class_name, str, path, "tokenizer_class")
    model_type = checked(model.get("model_type") or "", str, path, "model_type")
    # `auto_map` is an object with the readers of each class; in older files, it is a list of the
    # tokenizer's readers.
    readers = checked(values.get("auto_map") or {}, dict | list, config_file, "auto_map")
    # If there is a tokenizer.json, its template determines which tokens are added.
    if content:
        values.pop("add_bos_token", None)
        values.pop("add_eos_token", None)
    # Read special tokens and added tokens in the newer or the older format.
    _read_special_tokens(values, config_file)
    added = _added_tokens(path, values, content)
    values.pop("added_tokens_decoder", None)
    # An object gives the roles of the tokens; a list contains only tokens.
    if isinstance(values[_EXTRA], dict):
        stated = values.pop(_EXTRA)
        values[_OF_MODEL] = checked(stated, Mapping[str, str | dict], config_file, _EXTRA)
    settings = _with_tokens(values, config_file, CONFIG)
    # If a token with a role is also an added token, use the properties of the added token.
    by_name = {token.content: token for token in added.values()}
    for role in settings.keys() & {*ROLES}:
        token = checked(settings[role], Token | None, config_file, role)
        settings[role] = by_name.get(str(token), token)
    return Folder(
        path=path,
        model_type=model_type,
        class_name=class_name.removesuffix("Fast"),
        keeps_class=isinstance(readers, list) or "AutoTokenizer" in readers,
        is_stated=any((class_name, model_type)),
        settings=Settings(config_file, settings, settings),
        added=dict(sorted(added.items())),
        content=content,
    )


def _read_special_tokens(values: JsonObject, config_file: Path) -> None:
    """Adds the special tokens to the values of ``tokenizer_config.json``."""
    # transformers 5 has a new name for this setting.
    checked(values.get(_OLDER_EXTRA), tuple[str | dict, ...] | None, config_file, _OLDER_EXTRA)
    if not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_OLDER_EXTRA, values.get(_EXTRA))
    if "added_tokens_decoder" in values:
        return
    # Older folders have a separate file of special tokens.
    map_file = config_file.with_name("special_tokens_map.json")
    mapped = optional_object(map_file)
    # transformers joins the two lists of extra special tokens; for any other setting, the value in
    # the second file replaces the value in the first.
    before, more = values[_EXTRA], mapped.get(_EXTRA)
    if isinstance(before, list) and isinstance(more, list):
        mapped[_EXTRA] = [*before, *(token for token in more if token not in before)]
    values |= _with_tokens(mapped, map_file, map_file.name, special=True)


def _check_supported(values: JsonObject, file: Path) -> None:
    for name, (supported, remedy) in _UNSUPPORTED.items():
        value = values.get(name)
        problem = f"{file}: {name} {value!r} is not supported: {remedy}, and remove the setting"
        require(value in supported, problem, DataError)


def _added_tokens(path: Path, values: JsonObject, content: JsonObject) -> dict[int, AddedToken]:
    """Returns the added tokens by id, from files in the newer or the older format."""
    # For each token: the file, the name of the id in messages, the id and the properties.
    described: list[tuple[Path, str, object, object]]
    if "added_tokens_decoder" in values:
        file, name = path / CONFIG, "added_tokens_decoder"
        stated = checked(values[name], dict, file, name)
        described = [
            (file, f"{name}[{id!r}]", int(id) if id.isdecimal() else id, token)
            for id, token in stated.items()
        ]
    else:
        file = path / "added_tokens.json"
        special = {*map(str, map(values.get, ROLES)), *map(str, values.get(_EXTRA) or [])}
        described = [
            (file, name, id, {"content": name, "special": name in special})
            for name, id in optional_object(file).items()
        ]
        file = path / TOKENIZER_JSON
        tokens = checked(content.get("added_tokens", []), tuple[dict, ...], file, "added_tokens")
        described += [
            (file, f"added_tokens[{i}]", token.get("id"), token) for i, token in enumerate(tokens)
        ]
    return {
        checked(id, _Id, file, f"the id of {name}"): _token(token, file, name)
        for file, name, id, token in described
    }


def _with_tokens(value: Any, file: Path, name: str, **flags: bool) -> Any:
    """Converts each object that describes a token in a value of a file to an ``AddedToken``.

    Args:
      value: The value. An object describes a token if its ``content`` is text.
      file: The file, for messages.
      name: The name of the value in the file, for messages.
      flags: Properties that all tokens get.
    """
    if isinstance(value, list):
        return [_with_tokens(item, file, name, **flags) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("content"), str):
        return _token(value | flags, file, name)
    return {key: _with_tokens(item, file, key, **flags) for key, item in value.items()}


def _token(value: object, file: Path, name: str) -> AddedToken:
    fields = {"content": None, **checked(value, dict, file, name)}
    stated = _ADDED_TOKEN.keys() & fields.keys()
    return AddedToken(
        **{key: checked(fields[key], _ADDED_TOKEN[key], file, f"{name}.{key}") for key in stated}
    )


def name_of(token: Token) -> str:
    """Returns the text of a token."""
    return token if isinstance(token, str) else token.content


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Converts an error or a panic of the ``tokenizers`` library to a one-line DataError.

    Args:
      what: A description of what failed, for the message.

    Raises:
      DataError: The library failed.
    """
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        reason = " ".join(str(error).split())
        raise DataError(f"{what} ({reason})") from None


def read_ids(file: Path) -> dict[str, int]:
    """Reads a JSON object that maps pieces to ids.

    Raises:
      DataError: The file is not a vocabulary.
    """
    ids = optional_object(file)
    for piece, id in ids.items():
        # True and 1.0 equal an integer, but are not ids.
        if type(id) is not int or not 0 <= id < MOST_IDS:
            checked(id, _Id, file, f"the id of {piece!r}")
    return ids


def read_merges(file: Path, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Reads the merges of BPE: two pieces per line in rank order, after an optional ``#version``.

    Raises:
      DataError: A line is malformed, or a piece or the result of a merge is not in the vocabulary.
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
        # Both pieces and the merged piece must have an id.
        if not {*pieces, "".join(pieces)} <= ids.keys():
            raise DataError(
                f"{file} line {number} merges {line!r}, but a piece or the merged piece is not in "
                "the vocabulary: fetch both files again"
            )
        merges.append((pieces[0], pieces[1]))
    return merges


def read_pieces(file: Path) -> dict[str, int]:
    """Reads BERT's ``vocab.txt``: one piece per line, whose id is the line number, from 0.

    Raises:
      DataError: A piece occurs twice. Only empty lines may repeat.
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
