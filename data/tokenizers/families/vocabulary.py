"""Represents the vocabulary that the files of a folder contain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ..folder import Settings, Token


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary that was read from any of the supported files.

    Attributes:
      ids: The id of each piece.
      merges: The merges of a BPE model, in rank order.
      scores: The pieces of a unigram model and their scores, in the order of their ids.
      charsmap: The normalization rules of a sentencepiece model; None if there are none.
      controls: The control and user-defined pieces of a sentencepiece file; None for other files.
      unknown: The id of the unknown piece in a sentencepiece file; 1 for other files.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    merges: Sequence[tuple[str, str]] = ()
    scores: Sequence[tuple[str, float]] = ()
    charsmap: bytes | None = None
    controls: Sequence[AddedToken] | None = None
    unknown: int = 1


def controls(vocabulary: Vocabulary, settings: Settings) -> list[Token]:
    """Returns the special tokens that have no role according to the files."""
    if vocabulary.controls is not None:
        return list(vocabulary.controls)
    return settings.tokens("additional_special_tokens")


def make_tokenizer(
    model: models.Model,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    decoder: decoders.Decoder,
) -> tokenizers.Tokenizer:
    """Creates a tokenizer from its parts, but without added tokens and without a template."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    return backend
