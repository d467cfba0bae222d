"""Denoising: how a text is spoiled that a model restores as a whole (BART).

Lewis et al. 2020, "BART: denoising sequence-to-sequence pre-training", sections 2.2 and 4: *text
infilling* replaces spans of tokens, whose lengths are drawn from a Poisson distribution (λ = 3),
each by one mask token; a span of length 0 is a mask that is inserted. *Sentence permutation*
shuffles the sentences. The published models mask 30 % of the tokens and permute all sentences.

As in the authors' code, a sentence ends with a token that is a full stop; the number of masked
tokens is rounded up; the last span is cut where there are enough.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..common.fields import Checked, Fraction
from .span_corruption import SpanLength


@dataclass(frozen=True)
class Denoising(Checked):
    """How a text is spoiled.

    Attributes:
      mask_fraction: The fraction of the tokens that is masked.
      mean_span_length: The mean number of tokens of a span, λ.
      sentence_ends: The ids of the tokens that end a sentence; without any, sentences stay in
        their order.

    Raises:
      UserError: A number is out of range.
    """

    mask_fraction: Fraction = 0.3
    mean_span_length: SpanLength = 3.0
    sentence_ends: tuple[int, ...] = ()

    def num_masked(self, size: int) -> int:
        """Returns the number of masked tokens of a text."""
        return math.ceil(round(self.mask_fraction * size, 9))  # 0.1 · 30 is above 3 in float64

    def pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most tokens of the sources and of the targets of texts, with end tokens."""
        return sizes + 1, sizes + 1  # there are no more masks than masked tokens

    def longest_text(self, source_length: int, target_length: int | None = None) -> int:
        """Returns the tokens of the longest text whose source and target surely fit.

        Args:
          source_length: The largest number of tokens of a source.
          target_length: The largest number of tokens of a target, if not that of a source.
        """
        return max(0, min(source_length, target_length or source_length) - 1)

    def span_lengths(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draws the lengths of the masked spans of a text, in no order.

        Args:
          size: Tokens of the text.
          rng: Decides.

        Returns:
          int64 [spans], some of them 0, whose sum is ``num_masked(size)``; not more spans than
          that.
        """
        number = self.num_masked(size)
        lengths: list[int] = []
        missing, spare = number, number
        while missing:
            length = min(int(rng.poisson(self.mean_span_length)), missing)
            # Each masked token may yet need a mask of its own.
            if length or spare > missing:
                lengths.append(length)
                missing, spare = missing - length, spare - 1
        return np.asarray(lengths, np.int64)

    def permuted(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Shuffles the sentences of a text; a last one without its end counts as one."""
        ends = np.flatnonzero(np.isin(tokens, self.sentence_ends)) + 1
        sentences = [part for part in np.split(tokens, ends) if len(part)]
        order = rng.permutation(len(sentences)) if len(sentences) > 1 else range(len(sentences))
        return np.concatenate([sentences[i] for i in order]) if sentences else tokens

    def corrupt(
        self, tokens: np.ndarray, marks: tuple[int, ...], end: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes the source and the target of a text.

        Args:
          tokens: The text, int [n].
          marks: The id of the mask.
          end: The id that ends source and target.
          rng: Chooses the spans and the order of the sentences.

        Returns:
          The spoiled text and the whole one, each with the end token.
        """
        target = np.asarray([*tokens, end], np.int64)
        source = self.permuted(tokens, rng) if self.sentence_ends else tokens
        lengths = self.span_lengths(len(tokens), rng)
        # Each span lies behind a number of kept tokens; spans may touch.
        places = np.sort(rng.integers(0, len(tokens) - lengths.sum() + 1, len(lengths)))
        starts = places + np.cumsum(lengths) - lengths
        kept = np.ones(len(tokens), bool)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            kept[start : start + length] = False
        spoiled = np.insert(source[kept], places, marks[0])
        return np.asarray([*spoiled, end], np.int64), target
