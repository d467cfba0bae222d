"""Conversion of sentencepiece models to the ``tokenizers`` library, where it is exact.

The result encodes like sentencepiece itself (Kudo & Richardson 2018; ``unigram_model.cc``
and ``bpe_model.cc``), unlike usual conversions of its files:

- Pieces that are not text (control, bytes, unknown) are never found in text. The library's
  unigram model searches for all pieces, so pieces that are not text get a score far
  below every other split. A character that occurs only in such pieces is split off as a separate
  part, which leaves all other splits unchanged.
- BPE merges are ordered by the score of their result, and equal scores from left to right.
- The unknown piece decodes to the text that the model states for it. The piece represents text, so
  decoding does not skip it with the special tokens.

Two differences remain. Sentencepiece adds up scores in float32 and the library in float64, so the
library may choose the other of two nearly equal splits, as in ``hahaha`` or in very long lines.
Where consecutive byte pieces are not UTF-8, which no text produces, the library replaces all of
them.
"""

import re
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from .sentencepiece import SPACE, ModelProto, Piece, parse_model

# Types of pieces and of models, as the format numbers them.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
# The score of pieces that are not text, given as a multiple of the lowest score of a text piece.
_NEVER = 100


def obstacle(model: bytes) -> str | None:
    """Returns why a model has no exact counterpart in the library; None if it has one.

    Args:
      model: The bytes of a ``.model`` file.
    """
    proto = parse_model(model)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    # Each reason with whether it applies; `export_tokenizer` prints the first one that does.
    reasons = {
        "it is neither a unigram nor a BPE model": trainer.model_type not in (_UNIGRAM, _BPE),
        f"it normalizes text ({rules.name or 'by its own rules'})": rules.precompiled_charsmap,
        "it changes the text that it decodes": proto.denormalizer_spec.precompiled_charsmap,
        "it adds a space before each text": rules.add_dummy_prefix,
        "it drops repeated spaces": rules.remove_extra_whitespaces,
        "it does not mark spaces": not rules.escape_whitespaces,
        "it marks spaces after words": trainer.treat_whitespace_as_suffix,
        "it has unused pieces": any(piece.type == _UNUSED for piece in proto.pieces),
        "user-defined pieces are longer than a character or part of others": _are_parts(
            proto.pieces
        ),
        "unknown characters would be split": _splits_unknown(proto),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sentencepiece_backend(model: bytes) -> tokenizers.Tokenizer:
    """Converts a model to a tokenizer of the library.

    Args:
      model: The bytes of a ``.model`` file for which ``obstacle`` returns None.

    Returns:
      The tokenizer. Its special tokens are the control pieces.
    """
    proto = parse_model(model)
    trainer, pieces = proto.trainer_spec, proto.pieces
    unigram = trainer.model_type == _UNIGRAM
    backend = tokenizers.Tokenizer(_unigrams(proto) if unigram else _byte_pairs(proto))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    unmatched = "".join(map(re.escape, sorted(_characters_without_text(pieces))))
    if unigram and unmatched:
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
    backend.add_tokens([AddedToken(p.piece, normalized=False) for p in _of(pieces, _USER_DEFINED)])
    backend.add_special_tokens([AddedToken(p.piece) for p in _of(pieces, _CONTROL)])
    return backend


def _unigrams(proto: ModelProto) -> models.Unigram:
    worst = min((p.score for p in _of(proto.pieces, _NORMAL)), default=0.0)
    never = _NEVER * min(worst, -1.0)
    vocabulary = [
        (p.piece, p.score if p.type in (_NORMAL, _USER_DEFINED) else never) for p in proto.pieces
    ]
    spec = proto.trainer_spec
    return models.Unigram(vocabulary, spec.unk_id, byte_fallback=spec.byte_fallback)


def _byte_pairs(proto: ModelProto) -> models.BPE:
    scores = {p.piece: p.score for p in _of(proto.pieces, _NORMAL)}
    merges = [
        (-score, middle, piece[:middle], piece[middle:])
        for piece, score in scores.items()
        for middle in range(1, len(piece))
        if piece[:middle] in scores and piece[middle:] in scores
    ]
    return models.BPE(
        {p.piece: id for id, p in enumerate(proto.pieces)},
        [(left, right) for _, _, left, right in sorted(merges)],
        unk_token=proto.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _of(pieces: Iterable[Piece], kind: int) -> list[Piece]:
    return [piece for piece in pieces if piece.type == kind]


def _characters_without_text(pieces: Iterable[Piece]) -> set[str]:
    """Returns the characters that occur only in pieces that are not text."""
    text, rest = set[str](), set[str]()
    for piece in pieces:
        (text if piece.type in (_NORMAL, _USER_DEFINED) else rest).update(piece.piece)
    return rest - text


def _are_parts(pieces: Iterable[Piece]) -> bool:
    """Returns whether a user-defined piece is longer than a character or part of a text piece."""
    own = {piece.piece for piece in _of(pieces, _USER_DEFINED)}
    text = {character for piece in _of(pieces, _NORMAL) for character in piece.piece}
    return any(len(piece) > 1 or piece in text for piece in own)


def _splits_unknown(proto: ModelProto) -> bool:
    """Returns whether splitting a text, as the library does, changes what is unknown."""
    if proto.trainer_spec.model_type != _UNIGRAM:
        return False
    pieces = {piece.piece for piece in _of(proto.pieces, _NORMAL)}
    if any(character not in pieces for piece in pieces for character in piece):
        return True
    return not proto.trainer_spec.byte_fallback and bool(_characters_without_text(proto.pieces))
