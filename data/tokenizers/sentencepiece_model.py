"""Converts the sentencepiece models that flaxzoo trains to the ``tokenizers`` library.

Unlike other conversions, the result encodes text in the same way as sentencepiece itself (Kudo &
Richardson 2018; ``unigram_model.cc`` and ``bpe_model.cc``):

- Pieces that are not text (control, bytes, unknown) are never found in text. The library's unigram
  model searches for all pieces, so the score of these pieces is set far below the score of every
  other split. A character that occurs only in such pieces is split off as a separate part, so that
  all other splits are unchanged.
- BPE merges are ordered by the score of their result. Merges with equal scores are applied from
  left to right.
- The unknown piece is decoded to the text that the model states for it. The piece represents text,
  so decoding does not skip it when it skips special tokens.

Two differences remain. Sentencepiece adds up scores in float32 and the library in float64, so if
the scores of two splits are nearly equal, the library may choose a different one, as in ``hahaha``
or in very long lines. If consecutive byte pieces are not valid UTF-8, the library replaces all of
them; this never happens with encoded text.

``transformers_backend`` is a different conversion. It gives the same ids as transformers 5 gives
for a ``tokenizer.model``.
"""

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ..common.errors import DataError
from ..common.fields import require
from ..common.numbering import numbered
from .base import END_OF_TEXT, SPACE

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""The types of pieces. Control pieces are never found in text, and user-defined pieces always are.
"""
UNIGRAM, _BPE = 1, 2  # the types of models, as numbered in the format
T = TypeVar("T")
# The score of pieces that are not text is this multiple of the lowest score of a piece.
_NEVER = 100
# The maximum length of a piece. It is limited because trying all splits takes quadratic time.
_LONGEST_PIECE = 4096


class Piece(Protocol):
    """A piece of a model: its text, its type (a number that the format defines), and its score."""

    piece: str
    type: int
    score: float


class TrainerSpec(Protocol):
    """The settings that a model was trained with."""

    model_type: int
    unk_id: int
    unk_piece: str
    bos_id: int
    bos_piece: str
    eos_id: int
    eos_piece: str
    unk_surface: str
    byte_fallback: bool
    treat_whitespace_as_suffix: bool
    user_defined_symbols: Sequence[str]


class NormalizerSpec(Protocol):
    """The rules that a model applies to text."""

    name: str
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool


class ModelProto(Protocol):
    """The fields of a ``.model`` file that flaxzoo uses."""

    @property
    def pieces(self) -> Sequence[Piece]: ...  # noqa: D102

    trainer_spec: TrainerSpec
    normalizer_spec: NormalizerSpec


def parse_model(model: bytes) -> ModelProto:
    """Parses a ``.model`` file, which contains the pieces and the training settings."""
    messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = messages.ModelProto()
    proto.ParseFromString(model)
    return proto


def is_trained_here(proto: ModelProto) -> bool:
    """Returns whether a model has the settings that flaxzoo uses for training.

    Such a model does not change text, encodes each line independently, and has an exact equivalent
    in the library.
    """
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    settings = (
        *(rules.name, rules.add_dummy_prefix, rules.remove_extra_whitespaces),
        *(rules.escape_whitespaces, trainer.treat_whitespace_as_suffix, trainer.byte_fallback),
        *(trainer.bos_piece, list(trainer.user_defined_symbols)),
    )
    usual = ("identity", False, False, True, False, True, END_OF_TEXT, ["\n"])
    return settings == usual and trainer.model_type in (UNIGRAM, _BPE)


def sentencepiece_backend(proto: ModelProto) -> tokenizers.Tokenizer:
    """Converts a model to a tokenizer of the library.

    Args:
      proto: A model that satisfies ``is_trained_here``.

    Returns:
      The tokenizer. Its special tokens are the control pieces.
    """
    trainer, pieces = proto.trainer_spec, proto.pieces
    unigram = trainer.model_type == UNIGRAM
    backend = tokenizers.Tokenizer(
        _unigrams(proto) if unigram else _byte_pairs(proto, [p.piece for p in pieces])
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    # Split off characters that occur only in pieces that are not text; see the module docstring.
    unmatched = "".join(map(re.escape, sorted(_characters_without_text(pieces))))
    if unmatched:
        pattern = tokenizers.Regex(f"[{unmatched}]")
        backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(trainer.unk_piece, trainer.unk_surface),
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
    )
    backend.add_tokens([AddedToken(p.piece, normalized=False) for p in _of(pieces, USER_DEFINED)])
    backend.add_special_tokens([AddedToken(p.piece) for p in _of(pieces, CONTROL)])
    return backend


def _unigrams(proto: ModelProto) -> models.Unigram:
    # This score is so low that the best split of a text never includes such a piece.
    never = _NEVER * min(-1.0, *(piece.score for piece in proto.pieces))
    vocabulary = [
        (p.piece, p.score if p.type in (NORMAL, USER_DEFINED) else never) for p in proto.pieces
    ]
    spec = proto.trainer_spec
    return models.Unigram(vocabulary, spec.unk_id, byte_fallback=spec.byte_fallback)


def _of(pieces: Iterable[Piece], kind: int) -> list[Piece]:
    return [piece for piece in pieces if piece.type == kind]


def _characters_without_text(pieces: Iterable[Piece]) -> set[str]:
    """Returns the characters that occur only in pieces that are not text."""
    text, others = set[str](), set[str]()
    for piece in pieces:
        (text if piece.type in (NORMAL, USER_DEFINED) else others).update(piece.piece)
    return others - text


def transformers_backend(
    proto: ModelProto, names: Mapping[int, str], *, legacy: bool
) -> tokenizers.Tokenizer:
    """Converts a model in the same way as transformers 5 does for a folder that states no class.

    Source: ``SpmConverter.build_tokenizer_from_spm_proto`` (``convert_slow_tokenizer.py``).

    Args:
      proto: The model.
      names: New names for pieces of a BPE model, by id. These are the folder's added tokens.
      legacy: Whether a space is put before each part of a text between added tokens. If False, a
        space is put only before the first part.
    """
    spec, rules = proto.trainer_spec, proto.normalizer_spec
    pieces = [piece.piece for piece in proto.pieces]
    is_bpe = spec.model_type != UNIGRAM
    # If a piece already has a name, it keeps the name, unless the piece itself is renamed.
    if is_bpe:
        kept = {piece for id, piece in enumerate(pieces) if id not in names}
        pieces = [
            piece if (name := names.get(id, piece)) in kept else name
            for id, piece in enumerate(pieces)
        ]
    of_each = zip(pieces, proto.pieces, strict=True)
    user_defined = [name for name, piece in of_each if piece.type == USER_DEFINED]
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    model = (
        _byte_pairs(proto, pieces, ignore_merges=bool(user_defined))
        if is_bpe
        else models.Unigram(scores, spec.unk_id, byte_fallback=spec.byte_fallback)
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(_transformers_rules(rules, legacy))
    # User-defined pieces are not split; if several begin at a position, the longest is used.
    pattern = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
    # A legacy tokenizer puts a space before each part of a text, other tokenizers only before the
    # first part.
    scheme = "always" if legacy else "first"
    splits: list[pre_tokenizers.PreTokenizer] = [
        *when(
            rules.add_dummy_prefix,
            pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False),
        ),
        *when(user_defined, pre_tokenizers.Split(Regex(pattern), "isolated")),
    ]
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    # Decoding restores spaces and bytes, and then removes the space that was put before the text.
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            *when(spec.byte_fallback, decoders.ByteFallback()),
            *when(spec.byte_fallback or rules.add_dummy_prefix, decoders.Fuse()),
            *when(rules.add_dummy_prefix, decoders.Strip(content=" ", left=1)),
        ]
    )
    return backend


def when(condition: object, *steps: T) -> tuple[T, ...]:
    """Returns the steps of a tokenizer if the condition is true, and otherwise no steps."""
    return steps if condition else ()


def precompiled(charsmap: bytes | None) -> list[normalizers.Normalizer]:
    """Returns the normalizer of a sentencepiece model, if it has one."""
    return [normalizers.Precompiled(charsmap)] if charsmap else []


def _transformers_rules(rules: NormalizerSpec, legacy: bool) -> list[normalizers.Normalizer]:
    return [
        *precompiled(rules.precompiled_charsmap),
        *when(
            rules.remove_extra_whitespaces,
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ),
        *when(rules.escape_whitespaces, normalizers.Replace(" ", SPACE)),
        # If a text begins with a space, Metaspace puts no other space before it, so add one here.
        *when(
            rules.add_dummy_prefix and legacy,
            normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2),
        ),
    ]


def _byte_pairs(
    proto: ModelProto, pieces: Sequence[str], *, ignore_merges: bool = False
) -> models.BPE:
    ranks = {
        name: (-piece.score, id)
        for id, (name, piece) in enumerate(zip(pieces, proto.pieces, strict=True))
        if piece.type == NORMAL
    }
    return models.BPE(
        numbered(pieces),
        merges_by_rank(ranks),
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=ignore_merges,
    )


def merges_by_rank(ranks: Mapping[str, tuple[float, ...]]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE vocabulary, which sentencepiece files do not have.

    Args:
      ranks: The rank of each piece. A merge has the rank of its result, and merges with the same
        result are ordered by the length of their left piece. If the ranks are the ids, the merges
        are the same as with ``generate_merges`` of transformers, which the classes of Llama and
        Gemma use.

    Raises:
      DataError: A piece is too long.
    """
    longest = max(map(len, ranks), default=0)
    problem = f"a piece of {longest} characters is longer than {_LONGEST_PIECE}"
    require(longest <= _LONGEST_PIECE, problem, DataError)
    splits = ((piece[:i], piece[i:]) for piece in ranks for i in range(1, len(piece)))
    known = ((left, right) for left, right in splits if left in ranks and right in ranks)
    return sorted(known, key=lambda pair: (*ranks["".join(pair)], len(pair[0]), *pair))
