"""Sentencepiece models as tokenizers of the ``tokenizers`` library, where that is exact.

What is said is what sentencepiece does (Kudo & Richardson 2018; its ``unigram_model.cc`` and
``bpe_model.cc``), not what is usually made of its files:

- Pieces that are no text (control, bytes, unknown) are never found in text. The library's
  unigrams look for all pieces, so these score far below any other way to cut; a character
  that only such pieces have is cut off on its own, which changes nothing else.
- Byte pairs merge by the score of what they make, of the same score the left-most first.
- The unknown piece reads as the model says, and is text: it is not skipped.

Two things are left. Sentencepiece adds up scores in float32, the library in float64: of two
ways to cut that are all but equal, as of ``hahaha`` or in very long lines, it may choose the
other. And of bytes that are not UTF-8, which no text gives, the library replaces all that
follow each other.
"""

import re
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from .sentencepiece import SPACE, parse_model

# Kinds of pieces, and of models, as the format numbers them.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
# How many times worse than the worst piece those are that are no text.
_NEVER = 100


def obstacle(model: bytes) -> str | None:
    """Says why a model has no exact counterpart in the library; None where it has one.

    Args:
        model: The bytes of a ``.model`` file.
    """
    proto = parse_model(model)
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    reasons = {
        "it is neither of unigrams nor of byte pairs": trainer.model_type not in (_UNIGRAM, _BPE),
        f"it normalises text ({rules.name or 'by its own rules'})": rules.precompiled_charsmap,
        "it changes text that it decodes": proto.denormalizer_spec.precompiled_charsmap,
        "it puts a space before each text": rules.add_dummy_prefix,
        "it drops repeated spaces": rules.remove_extra_whitespaces,
        "it does not mark spaces": not rules.escape_whitespaces,
        "it marks spaces behind words": trainer.treat_whitespace_as_suffix,
        "it has unused pieces": any(piece.type == _UNUSED for piece in proto.pieces),
        "pieces defined by its user are longer than a character or part of others": _are_parts(
            proto.pieces
        ),
        "unknown characters would be parted": _parts_unknown(proto),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sentencepiece_backend(model: bytes) -> tokenizers.Tokenizer:
    """Makes the library's tokenizer of a model.

    Args:
        model: The bytes of a ``.model`` file without ``obstacle``.

    Returns:
        The tokenizer; control pieces are its special tokens.
    """
    proto = parse_model(model)
    trainer, pieces = proto.trainer_spec, proto.pieces
    unigram = trainer.model_type == _UNIGRAM
    backend = tokenizers.Tokenizer(_unigrams(proto) if unigram else _byte_pairs(proto))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    alone = "".join(map(re.escape, sorted(_only_of_no_text(pieces))))
    if unigram and alone:
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(f"[{alone}]"), "isolated")
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


def _unigrams(proto: Any) -> models.Unigram:
    worst = min((p.score for p in _of(proto.pieces, _NORMAL)), default=0.0)
    never = _NEVER * min(worst, -1.0)
    vocabulary = [
        (p.piece, p.score if p.type in (_NORMAL, _USER_DEFINED) else never) for p in proto.pieces
    ]
    spec = proto.trainer_spec
    return models.Unigram(vocabulary, spec.unk_id, byte_fallback=spec.byte_fallback)


def _byte_pairs(proto: Any) -> models.BPE:
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


def _of(pieces: Iterable[Any], kind: int) -> list[Any]:
    return [piece for piece in pieces if piece.type == kind]


def _only_of_no_text(pieces: Iterable[Any]) -> set[str]:
    """The characters that pieces have that are no text, and no piece of text has."""
    text, rest = set[str](), set[str]()
    for piece in pieces:
        (text if piece.type in (_NORMAL, _USER_DEFINED) else rest).update(piece.piece)
    return rest - text


def _are_parts(pieces: Iterable[Any]) -> bool:
    own = {piece.piece for piece in _of(pieces, _USER_DEFINED)}
    text = {character for piece in _of(pieces, _NORMAL) for character in piece.piece}
    return any(len(piece) > 1 or piece in text for piece in own)


def _parts_unknown(proto: Any) -> bool:
    """Whether what counts as unknown depends on how a text is cut, which the library changes."""
    if proto.trainer_spec.model_type != _UNIGRAM:
        return False
    pieces = {piece.piece for piece in _of(proto.pieces, _NORMAL)}
    if any(character not in pieces for piece in pieces for character in piece):
        return True
    return not proto.trainer_spec.byte_fallback and bool(_only_of_no_text(proto.pieces))
