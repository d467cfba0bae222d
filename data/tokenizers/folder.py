"""The files of a tokenizer's folder: read once, with their types and bounds checked.

A transformers folder describes a tokenizer in up to eight files. Their precedence follows
transformers 5 (``tokenization_utils_base.py``): ``added_tokens_decoder`` in
``tokenizer_config.json`` replaces ``special_tokens_map.json`` and ``added_tokens.json``; without it
``special_tokens_map.json`` overrides ``tokenizer_config.json``, and the added tokens of
``tokenizer.json`` override ``added_tokens.json``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from tokenizers import AddedToken, pre_tokenizers

from ..common.errors import DataError
from ..common.files import file_lines
from ..common.json_text import optional_object
from .base import JsonObject, read_json

CONFIG = "tokenizer_config.json"
TOKENIZER_JSON = "tokenizer.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The settings that name special tokens. transformers adds the tokens in this order."""
Token: TypeAlias = str | AddedToken
MOST_IDS = 2**22
"""Upper bound of ids: several times the largest published vocabulary."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Settings:
    """The settings of ``tokenizer_config.json``, and of ``special_tokens_map.json`` over them.

    Attributes:
      file: ``tokenizer_config.json``.
      values: The settings, with the defaults of the tokenizer's class.
      stated: The settings that the files state.
    """

    file: Path
    values: Mapping[str, object]
    stated: Mapping[str, object]

    def over(self, tokens: Mapping[str, Token | None]) -> "Settings":
        """Returns the settings with default tokens for roles that the files do not state."""
        return Settings(self.file, {**tokens, **self.values}, self.stated)

    def flag(self, name: str, default: bool) -> bool:
        """Returns a Boolean setting; null means the default."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def number(self, name: str, default: int) -> int:
        """Returns a number of tokens of the vocabulary."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**16:
            raise self._wrong(name, "a number of tokens below 65536")
        return value

    def text(self, name: str, default: str) -> str:
        """Returns a string setting; null means the default."""
        value = self.values.get(name)
        if not isinstance(value, str | None):
            raise self._wrong(name, "a string")
        return default if value is None else value

    def token(self, name: str) -> Token | None:
        """Returns a special token, or None."""
        value = self.values.get(name)
        if not isinstance(value, str | AddedToken | None):
            raise self._wrong(name, "a token")
        return value

    def named(self, role: str) -> str:
        """Returns the name of a special token that the tokenizer needs.

        Raises:
          DataError: There is no such token.
        """
        token = self.token(role)
        if token is None:
            raise self._wrong(role, "a token, which this class of tokenizer needs")
        return name_of(token)

    def tokens(self, name: str) -> list[Token] | None:
        """Returns a list of tokens; None if the setting is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(t, str | AddedToken) for t in value):
            raise self._wrong(name, "a list of tokens")
        return list(value)

    def _wrong(self, name: str, expected: str) -> DataError:
        value = self.values.get(name)
        return DataError(f"{self.file}: {name} {value!r} is not {expected}: correct this setting")


@dataclass(frozen=True)
class Folder:
    """The content of the files of a folder.

    Attributes:
      place: The folder.
      model_type: The family of the model in the folder; None if no file states it.
      class_name: The class of the tokenizer in transformers, without ``Fast``; None if no file
        states it.
      keeps_class: Whether the stated class applies even where transformers otherwise replaces it,
        because ``auto_map`` names another reader.
      is_stated: Whether a model or class is stated, so that the defaults of transformers apply.
      settings: The settings.
      added: The added tokens by number. Only their order counts: each gets the id that it has in
        the vocabulary, or the next free one.
      content: The content of ``tokenizer.json``; empty if there is none.
    """

    place: Path
    model_type: str | None
    class_name: str | None
    keeps_class: bool
    is_stated: bool
    settings: Settings
    added: Mapping[int, AddedToken]
    content: JsonObject


def read_folder(place: Path, file: Path | None) -> Folder:
    """Reads the files that state a tokenizer, except for vocabularies in older formats.

    Args:
      place: The folder.
      file: The ``tokenizer.json`` to read; None if there is none.

    Raises:
      DataError: A file is damaged, or a value has a wrong type or is out of bounds.
    """
    config_file = place / CONFIG
    values = optional_object(config_file)
    model = optional_object(place / "config.json")
    content = {} if file is None else optional_object(file)
    # Refuse settings that would change the ids and are not implemented.
    versions = values.get("fast_tokenizer_files")
    if versions not in (None, [], [TOKENIZER_JSON]):
        raise DataError(
            f"{config_file}: fast_tokenizer_files {versions!r} is not supported: rename the file "
            f"to use {TOKENIZER_JSON}, and remove the setting"
        )
    if values.get("fix_mistral_regex") is True:
        raise DataError(
            f"{config_file}: fix_mistral_regex True is not supported: correct the pre_tokenizer "
            f"in {TOKENIZER_JSON}, and remove the setting"
        )
    class_name = values.pop("tokenizer_class", None) or model.get("tokenizer_class")
    model_type = model.get("model_type")
    for name, value in (("tokenizer_class", class_name), ("model_type", model_type)):
        if not isinstance(value, str | None):
            raise DataError(f"{place}: {name} {value!r} is not a string: correct this setting")
    readers = values.get("auto_map")
    readers = readers.get("AutoTokenizer") if isinstance(readers, dict) else readers
    if file is not None:  # then the template of this file decides
        values = {k: v for k, v in values.items() if k not in ("add_bos_token", "add_eos_token")}
    _check_extra(values, config_file)
    # transformers 5 renamed this setting.
    if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    added = _added_tokens(place, values, content)
    settings = {
        name: _settled(value, config_file, name, is_token=name.endswith("_token"))
        for name, value in values.items()
        if name != "added_tokens_decoder"
    }
    # A role takes over the properties that the added tokens state for its token.
    by_name = {token.content: token for token in added.values()}
    for role in ROLES:
        token = settings.get(role)
        if isinstance(token, str | AddedToken):
            settings[role] = by_name.get(name_of(token), token)
    return Folder(
        place=place,
        model_type=cast("str | None", model_type),
        class_name=None if class_name is None else str(class_name).removesuffix("Fast"),
        keeps_class=readers is not None,
        is_stated=class_name is not None or model_type is not None,
        settings=Settings(config_file, settings, settings),
        added=dict(sorted(added.items())),
        content=content,
    )


def _check_extra(values: JsonObject, file: Path) -> None:
    """Checks that special tokens without a role are a list, or an object of names and tokens."""
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = values.get(name) or []
        tokens = [*extra.values()] if isinstance(extra, dict) else extra
        if not isinstance(tokens, list) or not all(isinstance(t, str | dict) for t in tokens):
            raise DataError(
                f"{file}: {name} {extra!r} is not a list of tokens: correct this setting"
            )


def _added_tokens(place: Path, values: JsonObject, content: JsonObject) -> dict[int, AddedToken]:
    """Returns the added tokens; merges an older ``special_tokens_map.json`` into ``values``."""
    added: dict[int, AddedToken] = {}
    config = place / CONFIG
    # The newer format states all added tokens and replaces the older files.
    if "added_tokens_decoder" in values:
        stated = values["added_tokens_decoder"]
        if not isinstance(stated, dict):
            raise DataError(f"{config}: added_tokens_decoder is not an object: fetch it again")
        for id, token in stated.items():
            name = f"added_tokens_decoder[{id!r}]"
            number = int(id) if id.isdecimal() and len(id) < 20 else id
            added[checked_id(number, config, name)] = _token(token, config, name)
        return added
    # Older format: each file overrides the files that are read before it.
    special = place / "special_tokens_map.json"
    for name, value in optional_object(special).items():
        is_list = name == "extra_special_tokens" and isinstance(value, list)
        before = values.get(name) if is_list else None
        values[name] = (
            [*(before or []), *(token for token in value if token not in (before or []))]
            if is_list
            else _settled(value, special, name, is_token=isinstance(value, dict), special=True)
        )
    _check_extra(values, special)
    names = {str(values[role]) for role in ROLES if values.get(role)}
    names |= {str(token) for token in values.get("extra_special_tokens") or []}
    file = place / "added_tokens.json"
    for name, id in optional_object(file).items():
        is_special = name in names
        added[checked_id(id, file, name)] = AddedToken(
            name, normalized=not is_special, special=is_special
        )
    tokens = content.get("added_tokens") or []
    if not isinstance(tokens, list):
        raise DataError(f"{place / TOKENIZER_JSON}: added_tokens is not a list: fetch it again")
    for number, token in enumerate(tokens):
        name = f"added_tokens[{number}]"
        read = _token(token, place / TOKENIZER_JSON, name)
        added[checked_id(token.get("id"), place / TOKENIZER_JSON, name)] = read
    return added


def _settled(
    value: object, file: Path, name: str, *, is_token: bool = False, special: bool | None = None
) -> object:
    """Returns a setting with objects that describe tokens replaced by ``AddedToken``."""
    if isinstance(value, dict) and (is_token or value.get("__type") == "AddedToken"):
        return _token(value, file, name, special=special)
    if isinstance(value, dict):
        return {key: _settled(item, file, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        is_token = name.endswith("special_tokens")
        return [_settled(item, file, name, is_token=is_token, special=special) for item in value]
    return value


def _token(value: object, file: Path, name: str, *, special: bool | None = None) -> AddedToken:
    flags = {f: value.get(f) for f in _FLAGS} if isinstance(value, dict) else {}
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str) or not all(isinstance(v, bool | None) for v in flags.values()):
        raise DataError(f"{file}: {name} {value!r} is not an added token: correct this setting")
    if special is not None:
        flags["special"] = special
    return AddedToken(content, **{k: v for k, v in flags.items() if v is not None})


def name_of(token: Token) -> str:
    """Returns the text of a token."""
    return token if isinstance(token, str) else token.content


def checked_id(id: object, file: Path, name: str) -> int:
    """Checks an id.

    Raises:
      DataError: It is not a whole number in ``[0, MOST_IDS)``.
    """
    if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < MOST_IDS:
        raise DataError(
            f"{file}: the id {id!r} of {name} is not a number below {MOST_IDS}: fetch it again"
        )
    return id


def check_ids(ids: Mapping[str, object], file: Path) -> None:
    """Checks the ids of a vocabulary; see ``checked_id``."""
    for piece, id in ids.items():
        if type(id) is not int or not 0 <= id < MOST_IDS:
            checked_id(id, file, repr(piece))


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


def read_ids(file: Path, *, every_byte: bool) -> dict[str, int]:
    """Reads a JSON object from piece to id.

    Args:
      file: The file.
      every_byte: Whether each of the 256 bytes must have a piece.

    Raises:
      DataError: The file is not a vocabulary.
    """
    ids = read_json(file)
    if not isinstance(ids, dict):
        raise DataError(f"{file} is not a vocabulary: expected a JSON object of piece to id")
    check_ids(ids, file)
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(ids)
    if every_byte and missing:  # the library would silently drop such bytes
        raise DataError(
            f"{file} is not a vocabulary for byte-level BPE: {len(missing)} of the 256 bytes "
            "have no piece"
        )
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
        if not {*pieces, "".join(pieces)} <= ids.keys():
            raise DataError(
                f"{file} line {number} merges {line!r}, which is not in the vocabulary with it: "
                "fetch both files again"
            )
        merges.append((pieces[0], pieces[1]))
    return merges


def read_pieces(file: Path) -> dict[str, int]:
    """Reads BERT's ``vocab.txt``: one piece per line; the id is the number of the line from 0.

    Raises:
      DataError: A piece occurs twice.
    """
    pieces = [line.rstrip() for _, _, line in file_lines(file)]
    ids = {piece: id for id, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        twice = next(piece for id, piece in enumerate(pieces) if ids[piece] != id)
        # Empty lines may repeat.
        if twice:
            raise DataError(f"{file} has the piece {twice!r} twice: fetch it again")
    return ids
