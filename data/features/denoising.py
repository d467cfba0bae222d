"""Denoising: corrupts a text that a model then restores completely (BART).

Lewis et al. 2020, "BART: denoising sequence-to-sequence pre-training", sections 2.2 and 4: *text
infilling* replaces each span of tokens by one mask token. The lengths are drawn from a Poisson
distribution (λ = 3); a span of length 0 inserts a mask. *Sentence permutation* shuffles the
sentences. The published models mask 30 % of the tokens and permute all sentences.

As in the authors' code, a full-stop token ends a sentence, the number of masked tokens is rounded
up, and the last span is truncated to reach exactly this number.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..common.fields import Checked, Fraction
from .span_corruption import SpanLength


@dataclass(frozen=True)
class Denoising(Checked):
    """The parameters of the corruption.

    Attributes:
      mask_fraction: The fraction of masked tokens.
      mean_span_length: The mean number of tokens of a span, λ.
      sentence_ends: The ids of the tokens that end a sentence; if empty, sentences keep their
        order.

    Raises:
      UserError: A number is out of range.
    """

    mask_fraction: Fraction = 0.3
    mean_span_length: SpanLength = 3.0
    sentence_ends: tuple[int, ...] = ()

    def num_masked(self, size: int) -> int:
        """Returns the number of masked tokens of a text."""
        # Round first: 0.1 · 30 is above 3 in float64.
        return math.ceil(round(self.mask_fraction * size, 9))

    def pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the maximum numbers of source and of target tokens, including end tokens."""
        # A text has at most as many masks as masked tokens, so the source is not longer.
        return sizes + 1, sizes + 1

    def longest_text(self, source_length: int, target_length: int | None = None) -> int:
        """Returns the number of tokens of the longest text whose source and target always fit.

        Args:
          source_length: The maximum number of tokens of a source.
          target_length: The maximum number of tokens of a target. Defaults to `source_length`.
        """
        return max(0, min(source_length, target_length or source_length) - 1)

    def span_lengths(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draws the lengths of the masked spans of a text, in arbitrary order.

        Args:
          size: The number of tokens of the text.
          rng: The source of randomness.

        Returns:
          int64 [spans], with some zeros. The sum of the lengths is ``num_masked(size)``, which is
          also the maximum number of spans.
        """
        number = self.num_masked(size)
        lengths: list[int] = []
        # Masked tokens still to assign, and masks still available.
        missing, spare = number, number
        while missing:
            length = min(int(rng.poisson(self.mean_span_length)), missing)
            # Skip an inserted mask if all remaining masks may be needed for the masked tokens.
            if length or spare > missing:
                lengths.append(length)
                missing, spare = missing - length, spare - 1
        return np.asarray(lengths, np.int64)

    def permuted(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Shuffles the sentences of a text; an incomplete last sentence is a sentence as well."""
        # Split behind each end token; a text that ends with such a token has an empty last part.
        ends = np.flatnonzero(np.isin(tokens, self.sentence_ends)) + 1
        sentences = list(filter(len, np.split(tokens, ends)))
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
          rng: The source of randomness for the spans and the order of the sentences.

        Returns:
          The corrupted and the original text, each with the end token.
        """
        target = np.asarray([*tokens, end], np.int64)
        source = self.permuted(tokens, rng) if self.sentence_ends else tokens
        lengths = self.span_lengths(len(tokens), rng)
        # Place each span after a random number of kept tokens; spans may touch.
        positions = np.sort(rng.integers(0, len(tokens) - lengths.sum() + 1, len(lengths)))
        # Earlier spans shift a span by their lengths.
        starts = positions + np.cumsum(lengths) - lengths
        kept = np.ones(len(tokens), bool)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            kept[start : start + length] = False
        corrupted = np.insert(source[kept], positions, marks[0])
        return np.asarray([*corrupted, end], np.int64), target
