"""Drops spans of a text, to make a source and a target for span corruption (T5).

In the source, numbered sentinels replace the dropped spans of tokens. The target consists of the
sentinels, each followed by its span (Raffel et al. 2020, "Exploring the limits of transfer
learning", sections 3.1.4 and 3.3.4). The numbers of dropped tokens and spans are the same as in the
authors' code (``random_spans_noise_mask``). A text begins with kept tokens and ends with a dropped
span.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from ..common.fields import Checked, Range


class Noise(Protocol):
    """A rule that makes a source and a target from a text."""

    def pair_sizes(self, sizes: np.ndarray, /) -> tuple[np.ndarray, np.ndarray]:
        """Returns the maximum number of source and of target tokens for texts of given sizes."""
        ...

    def longest_text(self, source_length: int, target_length: int | None = None, /) -> int:
        """Returns the maximum text length for which source and target fit, or 0 if none fits."""
        ...

    def corrupt(
        self, tokens: np.ndarray, marks: tuple[int, ...], end: int, rng: np.random.Generator, /
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the target of a text, each with the end token."""
        ...


NoiseDensity = Annotated[float, Range(above=0, below=1)]
"""The fraction of tokens that are dropped."""
SpanLength = Annotated[float, Range(least=1)]
"""The mean number of tokens in a span."""


@dataclass(frozen=True)
class SpanCorruption(Checked):
    """The parameters of span corruption.

    Attributes:
      noise_density: The fraction of dropped tokens.
      mean_span_length: The mean number of tokens in a span.

    Raises:
      UserError: A number is out of range.
    """

    noise_density: NoiseDensity = 0.15
    mean_span_length: SpanLength = 3.0

    def counts(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of dropped tokens and the number of spans for each text.

        Args:
          sizes: The number of tokens in each text, int [texts], each at least 2.
        """
        # Compute in float32 and round half to even, as in the authors' code.
        noise = np.rint(np.float32(self.noise_density) * sizes.astype(np.float32))
        noise = np.clip(noise, 1, sizes - 1).astype(np.int64)
        spans = np.rint(noise.astype(np.float32) / np.float32(self.mean_span_length))
        # Kept and dropped spans alternate, so there must be at least one kept and one dropped token
        # for each span.
        spans = np.clip(spans, 1, np.minimum(noise, sizes - noise)).astype(np.int64)
        return noise, spans

    def pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of source tokens and of target tokens, including end tokens."""
        noise, spans = self.counts(sizes)
        # The source and the target each contain one sentinel per span, and an end token.
        return sizes - noise + spans + 1, noise + spans + 1

    def longest_text(self, source_length: int, target_length: int | None = None) -> int:
        """Returns the maximum text length for which source and target fit, or 0 if none fits.

        Args:
          source_length: The maximum number of tokens in a source.
          target_length: The maximum number of tokens in a target. If None, any number fits.
        """
        # The source and the target grow with the text, so compute their lengths for all text
        # lengths, and use the longest text for which both fit.
        sizes = np.arange(2, 3 + int((source_length + 1) / (1 - self.noise_density)))
        sources, targets = self.pair_sizes(sizes)
        fits = (sources <= source_length) & (targets <= (target_length or targets))
        return int(sizes[fits].max(initial=0))

    def span_lengths(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draws the lengths of the spans of a text, which are alternately kept and dropped.

        Args:
          size: The number of tokens in the text, at least 2.
          rng: The source of randomness.

        Returns:
          The lengths, int64 [2 * spans]. All lengths are positive, and their sum is ``size``.
        """
        (noise,), (spans,) = self.counts(np.asarray([size]))
        lengths = [_segments(size - noise, spans, rng), _segments(noise, spans, rng)]
        # Interleave: kept, dropped, kept, dropped, …
        return np.stack(lengths, axis=1).reshape(-1)

    def corrupt(
        self,
        tokens: np.ndarray,
        sentinels: tuple[int, ...],
        end: int,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Makes the source and the target of a text.

        Args:
          tokens: The text, int [n], n at least 2.
          sentinels: The ids of the sentinels, at least one for each span.
          end: The id of the token that ends the source and the target.
          rng: The source of randomness.

        Returns:
          The source and the target, each with the end token.
        """
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        edges = np.cumsum(self.span_lengths(len(tokens), rng))[:-1]
        for number, part in enumerate(np.split(tokens, edges)):
            span, is_noise = divmod(number, 2)
            sides[is_noise].append(part)
            # A sentinel replaces the next dropped span in the source, and precedes this span in the
            # target.
            if not is_noise:
                sides[0].append(np.asarray([sentinels[span]]))
                sides[1].append(np.asarray([sentinels[span]]))
        source, target = (np.concatenate([*side, [end]]).astype(np.int64) for side in sides)
        return source, target


def _segments(items: int, number: int, rng: np.random.Generator) -> np.ndarray:
    """Divides a number of items into ``number`` parts of random positive sizes."""
    cuts = np.sort(rng.choice(items - 1, number - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=items)
