"""Tokenizers of the ``tokenizers`` library: byte-level BPE, WordPiece, words, any tokenizer.json.

Byte-level BPE is GPT-2's (Radford 2019, section 2.2; splitting pattern and byte alphabet of
openai/gpt-2 ``encoder.py``). WordPiece is BERT's (google-research/bert ``tokenization.py``)
as implemented by the library, with these differences from the original: a word has at most 100
characters, not 200; a final capital sigma becomes σ, not ς; the ideographs U+2B820 to U+2B91F
are not split; and marks and punctuation are classified by Unicode 8, not by later versions.

A deliberate difference from the usual wrappers: ``[CLS]`` or ``[SEP]`` in a text is plain text and
cannot inject special tokens. Only the code that adds special tokens to an example writes their ids.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ..errors import DataError
from ..io.atomic_io import write_file
from ..io.files import file_lines
from .base import (
    END_OF_TEXT,
    JsonObject,
    SpecialIds,
    Tokenizer,
    check_unicode,
    printable,
    read_json,
)
from .frame import Frame, Layout
from .sentinels import sentinels_among, started_by_padding

# The names of special tokens, used if no file states them.
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "bos": ("<s>", END_OF_TEXT),
    "eos": ("</s>", END_OF_TEXT),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}

_BERT = "BertTokenizer"
_LONGEST_WORD = 100
_NO_ID = 2**32 - 1

WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of WordPiece vocabularies trained here, in the order of their ids."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: SpecialIds) -> None:
        """Wraps a tokenizer, which must not be changed afterwards.

        Args:
          backend: The library's tokenizer. Its padding and truncation are turned off.
          special_ids: The ids of the special tokens.
        """
        added = backend.get_added_tokens_decoder()
        self.sentinels = sentinels_among((id, token.content) for id, token in added.items())
        backend = _marked(backend, self.sentinels, special=False)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "<|endoftext|>" in a text is just text
        self._backend = backend
        self.special_ids = started_by_padding(special_ids) if self.sentinels else special_ids
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        content = backend.to_str()
        self.kind = _kind(json.loads(content))
        specials = repr(sorted(asdict(self.special_ids).items()))
        self.fingerprint = hashlib.blake2b(
            (content + specials).encode(), digest_size=16
        ).hexdigest()

    @property
    def frame(self) -> Frame:
        """See ``Tokenizer``."""
        return self._frame

    @cached_property
    def _frame(self) -> Frame:
        """What the library's post-processor does to one text and to two.

        Raises:
          DataError: The post-processor puts its texts in another order, or repeats one.
        """
        # The ids of these texts are those of no special token.
        texts = {"a": _NO_ID - 1, "b": _NO_ID}
        probe = tokenizers.Tokenizer(models.WordLevel(texts, unk_token="a"))
        if self._backend.post_processor is not None:
            probe.post_processor = self._backend.post_processor
        one, two = probe.encode("a"), probe.encode("a", "b")
        ids = list(texts.values())
        single = Layout.read(one.ids, one.type_ids, ids[:1])
        return Frame(single, Layout.read(two.ids, two.type_ids, ids))

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """See ``Tokenizer``."""
        check_unicode(text)
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.offsets

    def control_tokens(self) -> dict[str, bool]:
        """See ``Tokenizer``; every added token that is not white space is one."""
        added = self._backend.get_added_tokens_decoder().values()
        return {token.content: token.special for token in added if not token.content.isspace()}

    def control_ids(self) -> dict[str, int]:
        """See ``Tokenizer``."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: id for id, token in added if not token.content.isspace()}

    def find_controls(self, text: str) -> list[tuple[int, int, int]]:
        """See ``Tokenizer``; the library finds them, before and after normalization."""
        check_unicode(text)
        finder, ids = self._finder
        found = finder.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [(*span, ids[id]) for id, span in pairs if id in ids]

    @cached_property
    def _finder(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer with the same added tokens, for which all else is one unknown token.

        And from its ids of control tokens to those of this one.
        """
        backend, unknown = self.backend(), "\0"
        finder = tokenizers.Tokenizer(models.WordLevel({unknown: 0}, unk_token=unknown))
        if backend.normalizer is not None:
            finder.normalizer = backend.normalizer
        for _, token in sorted(backend.get_added_tokens_decoder().items()):
            (finder.add_special_tokens if token.special else finder.add_tokens)([token])
        found = finder.get_added_tokens_decoder().items()
        known = self.control_ids()
        return finder, {id: known[t.content] for id, t in found if t.content in known}

    def _encode_typed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        check_unicode(text)
        return _after_line_feed(self._without_added_tokens, text)

    @cached_property
    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        """The same tokenizer, for which every text is ordinary, even the name of a token."""
        content = json.loads(self._backend.to_str())
        content |= {"added_tokens": [], "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def _encode_written(
        self, text: str, *, is_first: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        check_unicode(text)
        if not is_first:
            return _after_line_feed(self._recognizing, text)
        encoding = self._recognizing.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _recognizing(self) -> tokenizers.Tokenizer:
        """The same tokenizer, for which the name of a special token in a text is that token."""
        backend = self.backend()
        backend.encode_special_tokens = False
        return backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        if skip_special_tokens and self.sentinels:
            ids = [id for id in ids if id not in self.sentinels]
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        piece = self._backend.id_to_token(id)
        if piece is None:
            raise IndexError(f"id {id} is not in a vocabulary of {self.vocab_size}")
        return printable(piece)

    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; transformers reads the files too."""
        config = self.transformers_config()
        if config["tokenizer_class"] == _BERT:
            pieces = [self._backend.id_to_token(id) or "" for id in range(self.vocab_size)]
            write_file(Path(folder) / "vocab.txt", "\n".join([*pieces, ""]).encode())
        write_file(Path(folder) / "tokenizer.json", self.backend().to_str(pretty=True).encode())
        write_file(
            Path(folder) / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode()
        )

    def backend(self) -> tokenizers.Tokenizer:
        """Returns a copy of the library's tokenizer, whose sentinels are special tokens."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        return _marked(copy, self.sentinels, special=True)

    def transformers_config(self) -> dict[str, object]:
        """Returns the settings for transformers: the class of the tokenizer, and special tokens."""
        names = {
            f"{role}_token": self._backend.id_to_token(id)
            for role, id in asdict(self.special_ids).items()
            if id is not None
        }
        content = json.loads(self._backend.to_str())
        if not _is_bert(content):
            return {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        normalizer = content["normalizer"]
        return {
            "tokenizer_class": _BERT,
            **names,
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }


def _marked(
    backend: tokenizers.Tokenizer, sentinels: Sequence[int], *, special: bool
) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose sentinels are special tokens or not.

    The library finds the names of special tokens in a text only together with all others; of these
    it is to find none.
    """
    if not sentinels:
        return backend
    content: JsonObject = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        if token["id"] in sentinels:
            token["special"] = special
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _after_line_feed(
    backend: tokenizers.Tokenizer, text: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes a text as after a line feed: some vocabularies put a space before a text."""
    if not text:
        return [], []
    alone = backend.encode("\n", add_special_tokens=False).ids
    feed = len(alone)
    found = backend.encode("\n" + text, add_special_tokens=False)
    if len(found.ids) > feed and found.ids[:feed] == alone and found.offsets[feed][0] >= 1:
        return found.ids[feed:], [(a - 1, b - 1) for a, b in found.offsets[feed:]]
    found = backend.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


def byte_level_backend(model: models.BPE) -> tokenizers.Tokenizer:
    """Makes a tokenizer of a BPE model with GPT-2's splitting and byte alphabet."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def load_byte_bpe(vocabulary: Path, merges: Path) -> HuggingFaceTokenizer:
    """Loads the two files of a GPT-2 vocabulary.

    Args:
      vocabulary: JSON object from piece to id.
      merges: Two pieces per line in rank order, after an optional ``#version`` line.

    Returns:
      The tokenizer. If the vocabulary has ``<|endoftext|>``, it is BOS and EOS.

    Raises:
      DataError: A file is malformed, or the result of a merge is not in the vocabulary.
    """
    ids = _read_byte_vocabulary(vocabulary)
    backend = byte_level_backend(models.BPE(vocab=ids, merges=_read_merges(merges, ids)))
    _add_specials(backend, ids)
    return HuggingFaceTokenizer(backend, _usual_ids(backend))


def load_wordpiece(path: Path) -> HuggingFaceTokenizer:
    """Loads BERT's ``vocab.txt``.

    A ``tokenizer_config.json`` beside the file says whether text is lowercased (and accents are
    removed). Without one, text is lowercased if no piece of the vocabulary has an uppercase letter.

    Args:
      path: A file with one piece per line; the id is the number of the line from 0.

    Returns:
      The tokenizer, with BERT's template ``[CLS] … [SEP]``.

    Raises:
      DataError: The file has no ``[UNK]``, ``[CLS]`` or ``[SEP]``, or contains a piece twice.
    """
    ids = _read_vocabulary(path)
    return wordpiece(list(ids), _is_lowercase(path, ids))


def wordpiece(pieces: list[str], lowercase: bool) -> HuggingFaceTokenizer:
    """Makes a WordPiece tokenizer.

    Args:
      pieces: Distinct pieces in the order of their ids, including ``WORDPIECE_SPECIALS``.
      lowercase: Whether text is lowercased and accents are removed.

    Returns:
      The tokenizer, with BERT's template ``[CLS] … [SEP]``.
    """
    ids = {piece: id for id, piece in enumerate(pieces)}
    backend = wordpiece_backend(
        models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD),
        lowercase,
    )
    return _with_template(backend, ids)


def words(pieces: list[str], lowercase: bool) -> HuggingFaceTokenizer:
    """Makes a tokenizer of whole words and punctuation marks; other words become ``[UNK]``.

    Args:
      pieces: Distinct words in the order of their ids, including ``WORDPIECE_SPECIALS``.
      lowercase: Whether text is lowercased and accents are removed.

    Returns:
      The tokenizer, with BERT's normalization, splitting and template ``[CLS] … [SEP]``.
    """
    ids = {piece: id for id, piece in enumerate(pieces)}
    backend = wordpiece_backend(models.WordLevel(vocab=ids, unk_token="[UNK]"), lowercase)
    return _with_template(backend, ids)


def _with_template(backend: tokenizers.Tokenizer, ids: dict[str, int]) -> HuggingFaceTokenizer:
    """Adds BERT's special tokens, and a decoder that puts no space before punctuation."""
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    _add_specials(backend, ids)
    return HuggingFaceTokenizer(backend, _usual_ids(backend))


def wordpiece_backend(
    model: models.WordPiece | models.WordLevel, lowercase: bool
) -> tokenizers.Tokenizer:
    """Makes a tokenizer of a model with BERT's normalization and splitting into words."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def load_tokenizer_json(path: Path) -> HuggingFaceTokenizer:
    """Loads a ``tokenizer.json``; a ``tokenizer_config.json`` beside it names special tokens.

    Args:
      path: The file.

    Returns:
      The tokenizer.

    Raises:
      DataError: The library cannot read the file.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer of the tokenizers library ({error})") from None
    names = _read_config(path)
    ids = asdict(_usual_ids(backend))
    for role in ids:
        name = names.get(f"{role}_token")
        name = name.get("content") if isinstance(name, dict) else name  # an AddedToken
        if isinstance(name, str) and backend.token_to_id(name) is not None:
            ids[role] = backend.token_to_id(name)
    if ids["pad"] == ids["eos"]:
        ids["pad"] = None  # transformers pads with the end token if there is no padding token
    return HuggingFaceTokenizer(backend, SpecialIds(**ids))


def _add_specials(backend: tokenizers.Tokenizer, ids: dict[str, int]) -> None:
    names = dict.fromkeys(name for usual in _USUAL_NAMES.values() for name in usual if name in ids)
    backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])


def _usual_ids(backend: tokenizers.Tokenizer) -> SpecialIds:
    found = {
        role: next((i for i in map(backend.token_to_id, names) if i is not None), None)
        for role, names in _USUAL_NAMES.items()
    }
    return SpecialIds(**found)


def _read_config(path: Path) -> dict[str, object]:
    config = path.with_name("tokenizer_config.json")
    content = read_json(config) if config.is_file() else {}
    return content if isinstance(content, dict) else {}


def _read_byte_vocabulary(path: Path) -> dict[str, int]:
    ids = read_json(path)
    if not isinstance(ids, dict) or not all(isinstance(i, int) for i in ids.values()):
        raise DataError(f"{path} is not a vocabulary: expected a JSON object of piece to id")
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(ids)
    if missing:  # the library would silently drop such bytes
        raise DataError(
            f"{path} is not a vocabulary for byte-level BPE: {len(missing)} of the 256 bytes "
            "have no piece"
        )
    return ids


def _read_merges(path: Path, ids: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for _, number, line in file_lines(path):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pieces = line.split(" ")
        if len(pieces) != 2:
            raise DataError(
                f"{path} line {number} is not two pieces separated by a space: {line!r}"
            )
        if not {*pieces, "".join(pieces)} <= ids.keys():
            raise DataError(
                f"{path} line {number} merges {line!r}, which is not in the vocabulary beside it: "
                "fetch both files again"
            )
        merges.append((pieces[0], pieces[1]))
    return merges


def _read_vocabulary(path: Path) -> dict[str, int]:
    pieces = [line for _, _, line in file_lines(path)]
    ids = {piece: i for i, piece in enumerate(pieces)}
    missing = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in ids]
    if missing:
        raise DataError(
            f"{path} is not a WordPiece vocabulary: it has no line {' and no line '.join(missing)}"
        )
    if len(ids) != len(pieces):
        twice = next(p for i, p in enumerate(pieces) if ids[p] != i)
        raise DataError(f"{path} has the piece {twice!r} twice: fetch it again")
    return ids


def _is_lowercase(path: Path, ids: dict[str, int]) -> bool:
    stated = _read_config(path).get("do_lower_case")
    if isinstance(stated, bool):
        return stated
    return not any(p != p.lower() for p in ids if not (p.startswith("[") and p.endswith("]")))


def _is_bert(content: JsonObject) -> bool:
    """Returns whether transformers' class for BERT makes this tokenizer from its pieces alone."""
    model, normalizer = content["model"], content["normalizer"] or {}
    return (
        (_kind(content), normalizer.get("type")) == ("wordpiece", "BertNormalizer")
        and normalizer["clean_text"]
        and (content["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
        and content["post_processor"] is not None
        and (model["unk_token"], model["continuing_subword_prefix"]) == ("[UNK]", "##")
        and model["max_input_chars_per_word"] == _LONGEST_WORD
    )


def _kind(content: JsonObject) -> str:
    model = content["model"]
    name = str(model.get("type")) if isinstance(model, dict) else "unknown"
    if name == "BPE" and '"ByteLevel"' in json.dumps(content.get("pre_tokenizer")):
        return "byte-bpe"
    return "words" if name == "WordLevel" else name.lower()
