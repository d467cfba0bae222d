"""Prepares data for denoising: a model restores original texts from corrupted texts (BART).

``features.denoising`` implements the corruption of Lewis et al. 2020, "BART: denoising
sequence-to-sequence pre-training", section 2.2. Documents are cut into texts that fill a sequence;
shorter texts share a sequence, with different segment ids. Every epoch has the same texts, but with
different corruption.

A batch has the same arrays as in translation, with S = T; see ``packed_pairs.arrays_of_pairs``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from ..common.errors import DataError, counted
from ..common.fields import Fraction, Range, require
from ..features.denoising import Denoising
from ..features.span_corruption import SpanLength
from ..tokenizers.base import Tokenizer
from .span_corruption import CorruptedData, SpanCorruptionExamples, tokenizer_with_sentinels

_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？")


def mask_of(tokenizer: Tokenizer) -> int:
    """Returns the id of the token that masks a span: the mask token, or else the first sentinel.

    Raises:
      DataError: The vocabulary has neither a mask token nor a sentinel.
    """
    mask = tokenizer.special_ids.mask
    if mask is not None:
        return mask
    require(
        tokenizer.sentinels,
        f"this {tokenizer.kind} tokenizer has no mask token and no sentinel: train one "
        "(data.tokenizer.kind sentencepiece-unigram)",
        DataError,
    )
    return tokenizer.sentinels[0]


def sentence_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of all tokens that end with a full stop, "!" or "?"."""
    size = tokenizer.vocab_size
    # Check the text of each token, because a token may contain other characters before the stop.
    return tuple(id for id in range(size) if tokenizer.token(id).endswith(_SENTENCE_ENDS))


class DenoisingExamples(SpanCorruptionExamples):
    """The examples of training epochs or of an evaluation; see ``SpanCorruptionExamples``."""

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The id of the mask, which is the only token that replaces spans."""
        return (mask_of(self.tokenizer),)

    @property
    def fill(self) -> str:
        """Describes how well the targets fill the sequences; the sizes of the sources vary."""
        tokens, (_, length) = self.num_tokens[1], self.lengths
        padding = 1 - tokens / (length * self.num_examples)
        return (
            f"{tokens:,} tokens in {counted(self.num_examples, 'sequence')} of {length} + "
            f"{length}, {padding:.1%} of the targets padding"
        )


@dataclass(frozen=True, kw_only=True)
class DenoisingData(CorruptedData):
    """Documents that are corrupted, so that a model learns to restore them completely (BART)."""

    kind: ClassVar[str] = "denoising"
    examples_type: ClassVar[type[SpanCorruptionExamples]] = DenoisingExamples

    length: Annotated[int, Range(least=3)]
    """The number of tokens in a sequence of sources and in a sequence of targets, S = T. A sequence
    may contain several texts."""
    mask_fraction: Fraction = 0.3
    """The fraction of tokens that are masked."""
    mean_span_length: SpanLength = 3.0
    """The mean number of consecutive tokens that a mask replaces (Poisson)."""
    permute_sentences: bool = True
    """Whether to shuffle the sentences of a text."""

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; adds a sentinel to a vocabulary without a mask token."""
        return tokenizer_with_sentinels(self, 1)

    def noise(self, tokenizer: Tokenizer) -> Denoising:
        """See ``CorruptedData``; the vocabulary must have a mask token or a sentinel."""
        mask_of(tokenizer)
        ends = sentence_ends(tokenizer) if self.permute_sentences else ()
        return Denoising(self.mask_fraction, self.mean_span_length, ends)
