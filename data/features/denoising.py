"""Corrupts texts for denoising (BART): a model learns to restore the complete text.

Lewis et al. 2020, "BART: denoising sequence-to-sequence pre-training", sections 2.2 and 4, describe
two methods. *Text infilling* replaces each of several spans of tokens by one mask token. The
lengths of the spans are drawn from a Poisson distribution (λ = 3), and a span of length 0 inserts a
mask token. *Sentence permutation* shuffles the sentences. For the published models, 30 % of the
tokens are masked and all sentences are permuted.

As in the authors' code, a full-stop token ends a sentence, the number of masked tokens is rounded
up, and the last span is shortened so that exactly this number is masked.
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
      mean_span_length: The mean number of tokens in a span, λ.
      sentence_ends: The ids of the tokens that end a sentence. If empty, sentences are not
        shuffled.

    Raises:
      UserError: A number is out of range.
    """

    mask_fraction: Fraction = 0.3
    mean_span_length: SpanLength = 3.0
    sentence_ends: tuple[int, ...] = ()

    def num_masked(self, size: int) -> int:
        """Returns the number of masked tokens in a text of ``size`` tokens."""
        # Round before taking the ceiling, because products such as 0.1 · 30 exceed the exact value
        # in float64.
        return math.ceil(round(self.mask_fraction * size, 9))

    def pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the maximum number of source tokens and of target tokens, with end tokens."""
        # There are at most as many masks as masked tokens, so the source is not longer than the
        # text.
        return sizes + 1, sizes + 1

    def longest_text(self, source_length: int, target_length: int | None = None) -> int:
        """Returns the maximum text length so that the source and the target always fit.

        Args:
          source_length: The maximum number of tokens in a source.
          target_length: The maximum number of tokens in a target. Defaults to `source_length`.
        """
        return max(0, min(source_length, target_length or source_length) - 1)

    def span_lengths(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draws the lengths of the masked spans of a text, in arbitrary order.

        Args:
          size: The number of tokens in the text.
          rng: The source of randomness.

        Returns:
          The lengths, int64 [spans]. Some may be 0. The sum of the lengths is ``num_masked(size)``,
          which is also the maximum number of spans.
        """
        number = self.num_masked(size)
        lengths: list[int] = []
        # `missing` tokens are not yet assigned to a span, and `spare` masks are still available.
        missing, spare = number, number
        while missing:
            length = min(int(rng.poisson(self.mean_span_length)), missing)
            # Do not insert a mask if all remaining masks may be needed for the masked tokens.
            if length or spare > missing:
                lengths.append(length)
                missing, spare = missing - length, spare - 1
        return np.asarray(lengths, np.int64)

    def permuted(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Shuffles the sentences of a text; the last sentence may be incomplete."""
        # Split after each token that ends a sentence. If the text ends with such a token, remove
        # the empty last part.
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
          marks: The id of the mask token, as a tuple.
          end: The id of the token that ends the source and the target.
          rng: The source of randomness for the spans and the order of the sentences.

        Returns:
          The corrupted and the original text, each with the end token.
        """
        target = np.asarray([*tokens, end], np.int64)
        source = self.permuted(tokens, rng) if self.sentence_ends else tokens
        lengths = self.span_lengths(len(tokens), rng)
        # Place each span after a random number of kept tokens. Spans may be adjacent.
        positions = np.sort(rng.integers(0, len(tokens) - lengths.sum() + 1, len(lengths)))
        # The start of a span is shifted by the lengths of all earlier spans.
        starts = positions + np.cumsum(lengths) - lengths
        kept = np.ones(len(tokens), bool)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            kept[start : start + length] = False
        corrupted = np.insert(source[kept], positions, marks[0])
        return np.asarray([*corrupted, end], np.int64), target
