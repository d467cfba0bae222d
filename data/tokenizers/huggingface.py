"""Wraps tokenizers of the ``tokenizers`` library: byte-level BPE, WordPiece, words, and others.

Byte-level BPE is the same as in GPT-2 (Radford 2019, section 2.2; the splitting pattern and the
byte alphabet are from openai/gpt-2 ``encoder.py``). WordPiece is the library's implementation of
BERT's tokenizer (google-research/bert ``tokenization.py``). It differs from the original as
follows: a word has at most 100 characters, not 200; a final capital sigma becomes σ, not ς; the
ideographs U+2B820 to U+2B91F are not split; and marks and punctuation are classified by Unicode 8,
not by later versions.

Unlike in other wrappers of the library, ``[CLS]`` or ``[SEP]`` in a text is plain text, so a text
cannot inject special tokens. Only the code that adds special tokens to an example writes their ids.
"""

import hashlib
import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, astuple
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ..common.atomic_io import write_file
from ..common.errors import DataError
from ..common.fields import require
from ..common.numbering import numbered
from .base import ControlToken, Encoded, SpecialIds, check_unicode, clean_up, printable
from .export import ExportedTokenizer, frame_of
from .folder import MOST_IDS, JsonObject, library_errors
from .frame import Frame
from .sentinels import sentinels_among, started_by_padding

_BERT = "BertTokenizer"
_LONGEST_WORD = 100
_FAILED = "this tokenizer fails on the text: shorten the text, or correct tokenizer.json"

_CLEANING = {
    "clean_up_tokenization_spaces": True,
    # If this field is not set, transformers ignores the clean-up setting for BPE.
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
}

WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens in WordPiece vocabularies that flaxzoo trains, in the order of their ids."""


class HuggingFaceTokenizer(ExportedTokenizer):
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_ids: SpecialIds, *, cleans: bool = False
    ) -> None:
        """Wraps a tokenizer of the library. It must not be changed afterwards.

        Args:
          backend: The library's tokenizer. This method turns off its padding and truncation.
          special_ids: The ids of the special tokens.
          cleans: Whether ``decode`` removes spaces before punctuation; see ``clean_up``.
        """
        self._cleans = cleans
        added = backend.get_added_tokens_decoder()
        self.sentinels = sentinels_among((id, token.content) for id, token in added.items())
        # With `encode_special_tokens`, the library does not find special tokens in a text. Users
        # write sentinels in texts, so sentinels must not be marked as special.
        backend = _marked(backend, self.sentinels, special=False)
        backend.no_padding()
        backend.no_truncation()
        # Encode a name such as "<|endoftext|>" in a text as ordinary text.
        backend.encode_special_tokens = True
        self._backend = backend
        self.joins_bytes = not cleans and isinstance(backend.decoder, decoders.ByteLevel)
        self.special_ids = started_by_padding(special_ids) if self.sentinels else special_ids
        # Ids may have gaps, so the size can be larger than the number of pieces.
        largest = max(backend.get_vocab(with_added_tokens=True).values())
        problem = (
            f"the vocabulary has the id {largest}, but ids must be below {MOST_IDS}: correct it"
        )
        require(largest < MOST_IDS, problem, DataError)
        self.vocab_size = largest + 1
        content = backend.to_str()
        read = json.loads(content)
        self.kind = _kind(read)
        model = read["model"]
        unknown = model.get("unk_id", backend.token_to_id(model.get("unk_token") or ""))
        # In GPT-2, the unknown token is also the begin and end token. Treat such a token only as a
        # begin or end token.
        others = {**asdict(self.special_ids), "unk": None}.values()
        self._unknown: int | None = None if unknown in others else unknown
        # The library's file does not contain the roles of special tokens, so add them to the hash.
        specials = repr(sorted(asdict(self.special_ids).items()))
        self.fingerprint = _hashed(_stable(content, read) + specials)

    @property
    def frame(self) -> Frame:
        """See ``Tokenizer``."""
        settings = self.batch_settings
        typed = settings is None or settings.token_types
        return self._frame if typed else self._frame.without_types()

    @cached_property
    def _frame(self) -> Frame:
        return frame_of(self._backend)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """See ``Tokenizer``."""
        encoding = _encode(self._backend, text)
        # The model may have encoded the name of a special token in the text as this token. In this
        # case, encode the text again without such pieces.
        if not self._named_pieces.isdisjoint(encoding.ids):
            encoding = _encode(self._without_named_pieces, text)
        found = encoding.ids, encoding.offsets
        return self.frame.join_offsets(*found) if add_special_tokens else found

    @cached_property
    def _named_pieces(self) -> frozenset[int]:
        """The special tokens that the model may find in a text because of their names."""
        added, model = self._backend.get_added_tokens_decoder().items(), self._backend.model
        return frozenset(
            id
            for id, token in added
            if token.special and id != self._unknown and model.token_to_id(token.content) == id
        )

    @cached_property
    def _without_named_pieces(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but with random names for the pieces of ``_named_pieces``."""
        content: JsonObject = json.loads(self._backend.to_str())
        model = content["model"]
        names = {self._backend.id_to_token(id): id for id in self._named_pieces}
        names.pop(model.get("unk_token"), None)
        others = {name: f"{secrets.token_hex(16)} {id}" for name, id in names.items()}
        # In a unigram model, the vocabulary is a list of pieces with scores; in other models, it is
        # a dict of ids.
        vocab = model["vocab"]
        pieces = vocab.items() if isinstance(vocab, dict) else vocab
        model["vocab"] = type(vocab)((others.get(name, name), value) for name, value in pieces)
        # Drop merges that use or produce a renamed piece.
        model["merges"] = [
            merge
            for merge in model.get("merges", [])
            if others.keys().isdisjoint((*merge, "".join(merge)))
        ]
        # The ids of added tokens are the ids of the model's pieces with the same names, so rename
        # the added tokens in the same way.
        for token in content["added_tokens"]:
            token["content"] = others.get(token["content"], token["content"])
        with library_errors(_FAILED):
            backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        backend.encode_special_tokens = True
        return backend

    def control_tokens(self) -> dict[str, ControlToken]:
        """See ``Tokenizer``; all added tokens except white space and the unknown token."""
        return self._controls

    @cached_property
    def _controls(self) -> dict[str, ControlToken]:
        added = self._backend.get_added_tokens_decoder().items()
        return {
            token.content: ControlToken(id, token.special)
            for id, token in added
            if not token.content.isspace() and id != self._unknown
        }

    def find_controls(self, text: str) -> list[tuple[int, int, int]]:
        """See ``Tokenizer``; the library finds the tokens before and after it normalizes a text."""
        finder, ids = self._finder
        found = _encode(finder, text)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [(*span, ids[id]) for id, span in pairs if id in ids]

    @cached_property
    def _finder(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer that finds control tokens, and a map from its ids to this tokenizer's ids.

        The tokenizer has the same added tokens, and encodes all other text as the unknown token.
        """
        backend, unknown = self.backend(), "\0"
        finder = tokenizers.Tokenizer(models.WordLevel({unknown: 0}, unk_token=unknown))
        # The library searches for some of the added tokens in the normalized text.
        finder.normalizer = backend.normalizer
        finder.add_tokens(list(dict(sorted(backend.get_added_tokens_decoder().items())).values()))
        found = finder.get_added_tokens_decoder().items()
        known = self._controls
        return finder, {id: known[t.content].id for id, t in found if t.content in known}

    def _encode_typed(self, text: str) -> Encoded:
        return _after_line_feed(self._without_added_tokens, text)

    @cached_property
    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        """The same tokenizer without added tokens, so that their names are ordinary text."""
        backend = self._without_named_pieces if self._named_pieces else self._backend
        content = json.loads(backend.to_str())
        content |= {"added_tokens": [], "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    def _encode_written(self, text: str, *, is_first: bool = True) -> Encoded:
        if not is_first:
            return _after_line_feed(self._recognizing, text)
        encoding = _encode(self._recognizing, text)
        return encoding.ids, encoding.offsets

    @cached_property
    def _recognizing(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but the names of special tokens in a text mean these tokens."""
        backend = self.backend()
        backend.encode_special_tokens = False
        return backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        with library_errors(_FAILED):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [encoding.ids for encoding in encodings]
        return [
            row if self._named_pieces.isdisjoint(row) else self.encode(text, False)
            for row, text in zip(rows, texts, strict=True)
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        # Remove sentinels here, because the backend does not treat them as special.
        skipped = self.sentinels if skip_special_tokens else ()
        kept = list(itertools.filterfalse(skipped.__contains__, ids))
        with library_errors(_FAILED):
            text = self._backend.decode(kept, skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self._cleans else text

    def token(self, id: int) -> str:
        """See ``Tokenizer``."""
        piece = self._backend.id_to_token(id)
        if piece is None:
            raise IndexError(f"id {id} is not in a vocabulary of {self.vocab_size}")
        return printable(piece)

    def save_vocabulary(self, folder: str | PathLike[str]) -> None:
        """See ``Tokenizer``; transformers can also read the files."""
        config = self.transformers_config()
        # Also write vocab.txt, the older format, which the class for BERT reads.
        if config["tokenizer_class"] == _BERT:
            pieces = [self._backend.id_to_token(id) or "" for id in range(self.vocab_size)]
            write_file(Path(folder) / "vocab.txt", "\n".join([*pieces, ""]).encode())
        write_file(Path(folder) / "tokenizer.json", self.backend().to_str(pretty=True).encode())
        write_file(
            Path(folder) / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode()
        )

    def backend(self) -> tokenizers.Tokenizer:
        """Returns a copy of the library's tokenizer that treats sentinels as special tokens."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        return _marked(copy, self.sentinels, special=True)

    def transformers_config(self) -> dict[str, object]:
        """Returns the settings for transformers: the tokenizer's class and its special tokens."""
        names: dict[str, object] = dict(self.named_tokens or {})
        names |= {
            f"{role}_token": self._backend.id_to_token(id)
            for role, id in self.special_ids.present.items()
        }
        if self._cleans:
            names |= _CLEANING
        content = json.loads(self._backend.to_str())
        special = self.special_ids
        if not _is_bert(content, self.frame, special):
            return {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        normalizer = content["normalizer"]
        # State that absent roles are null; otherwise the class would add its default tokens.
        absent = {f"{r}_token": None for r in ("pad", "unk", "cls", "sep", "mask")}
        return {
            "tokenizer_class": _BERT,
            **{**absent, **names},
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _stable(content: str, read: JsonObject) -> str:
    """Returns a tokenizer's content, with scores that saving and loading do not change.

    The library may change the last digit of a unigram score on loading, so scores are rounded.
    """
    if read["model"].get("type") != "Unigram":
        return content
    pieces, scores = zip(*read["model"]["vocab"], strict=True)
    with np.errstate(over="ignore"):
        rounded = np.asarray(scores, np.float64).astype(np.float32).tolist()
    read["model"]["vocab"] = list(zip(pieces, rounded, strict=True))
    return json.dumps(read)


def _marked(
    backend: tokenizers.Tokenizer, sentinels: Sequence[int], *, special: bool
) -> tokenizers.Tokenizer:
    """Returns a copy of a tokenizer whose sentinels are marked as special or not special.

    The library finds either all special tokens in a text or none. In flaxzoo, it must find only the
    sentinels.
    """
    if not sentinels:
        return backend
    content: JsonObject = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        if token["id"] in sentinels:
            token["special"] = special
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Encodes a text without adding the special tokens of a frame.

    Raises:
      DataError: The text is not valid Unicode, or the library fails.
    """
    check_unicode(text)
    with library_errors(_FAILED):
        return backend.encode(text, add_special_tokens=False)


def _after_line_feed(backend: tokenizers.Tokenizer, text: str) -> Encoded:
    """Encodes a text as if after a line feed, so that no space is put before it."""
    alone = _encode(backend, "\n").ids
    feed = len(alone)
    found = _encode(backend, "\n" + text)
    if len(found.ids) > feed and found.ids[:feed] == alone and found.offsets[feed][0] >= 1:
        return found.ids[feed:], [(a - 1, b - 1) for a, b in found.offsets[feed:]]
    # If the line feed was merged with the text, encode the text alone.
    found = _encode(backend, text)
    return found.ids, found.offsets


def byte_level_backend(model: models.BPE) -> tokenizers.Tokenizer:
    """Creates a tokenizer from a BPE model, with the splitting and the byte alphabet of GPT-2."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def wordpiece(
    pieces: list[str], lowercase: bool, *, whole_words: bool = False
) -> HuggingFaceTokenizer:
    """Creates a tokenizer with BERT's normalization, splitting and template ``[CLS] … [SEP]``.

    Args:
      pieces: Distinct pieces in the order of their ids, including ``WORDPIECE_SPECIALS``.
      lowercase: Whether text is lowercased and accents are removed.
      whole_words: Whether the pieces are whole words and punctuation marks, and other words are
        encoded as ``[UNK]``. If False, WordPiece divides words into pieces.
    """
    ids = numbered(pieces)
    model = models.WordLevel(ids, unk_token="[UNK]")
    if not whole_words:
        model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD)
    backend = wordpiece_backend(model, lowercase)
    # This decoder does not put spaces before punctuation.
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    backend.add_special_tokens(list(map(AddedToken, WORDPIECE_SPECIALS)))
    roles = {name.strip("[]").lower(): ids[name] for name in WORDPIECE_SPECIALS}
    return HuggingFaceTokenizer(backend, SpecialIds(**roles))


def wordpiece_backend(
    model: models.WordPiece | models.WordLevel, lowercase: bool
) -> tokenizers.Tokenizer:
    """Creates a tokenizer from a model, with BERT's normalization and splitting into words."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def _is_bert(content: JsonObject, frame: Frame, special: SpecialIds) -> bool:
    """Returns whether transformers' class for BERT, given the pieces, is the same tokenizer."""
    # BERT's frame is [CLS] A [SEP] or [CLS] A [SEP] B [SEP], with the token types 0 and 1.
    begin, end = (special.cls,), (special.sep,)
    single = ((begin, end), ((0,), (0,)), (0,))
    pair = ((begin, end, end), ((0,), (0,), (1,)), (0, 1))
    match content:
        case {
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": longest,
            },
            "normalizer": {"type": "BertNormalizer", "clean_text": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
        }:
            return longest == _LONGEST_WORD and astuple(frame) == (single, pair)
    return False


def _kind(content: JsonObject) -> str:
    name: str = content["model"]["type"]
    is_byte_level = '"ByteLevel"' in json.dumps(content["pre_tokenizer"])
    names = {"BPE": "byte-bpe" if is_byte_level else "bpe", "WordLevel": "words"}
    return names.get(name, name.lower())
