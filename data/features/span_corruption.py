"""Span corruption: which tokens of a text are dropped, and the source and target this makes.

Raffel et al. 2020, "Exploring the limits of transfer learning", sections 3.1.4 and 3.3.4: spans of
tokens are replaced by sentinels, each with its own number; the target has the sentinels, each
followed by its span. The numbers of tokens and spans are those of the authors' code
(``random_spans_noise_mask``), in which a text begins with tokens that are kept and ends with a
span.
"""

from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np

from ..common.fields import Checked, Range


class Noise(Protocol):
    """The way in which a source and a target are made of a text."""

    def pair_sizes(self, sizes: np.ndarray, /) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most tokens of the sources and of the targets of texts of some sizes."""
        ...

    def longest_text(self, source_length: int, target_length: int | None = None, /) -> int:
        """Returns the tokens of the longest text whose source and target fit; 0 if none does."""
        ...

    def corrupt(
        self, tokens: np.ndarray, marks: tuple[int, ...], end: int, rng: np.random.Generator, /
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the target of a text, each with the end token."""
        ...


NoiseDensity = Annotated[float, Range(above=0, below=1)]
"""A fraction of the tokens that is dropped."""
SpanLength = Annotated[float, Range(least=1)]
"""A mean number of consecutive tokens."""


@dataclass(frozen=True)
class SpanCorruption(Checked):
    """How much of a text is dropped.

    Attributes:
      noise_density: The fraction of the tokens that is dropped.
      mean_span_length: The mean number of tokens of a span.

    Raises:
      UserError: A number is out of range.
    """

    noise_density: NoiseDensity = 0.15
    mean_span_length: SpanLength = 3.0

    def counts(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of dropped tokens and of spans of some texts.

        Args:
          sizes: Tokens of each text, int [texts], each at least 2.
        """
        # In float32 and with halves rounded to even numbers, as the authors' code does it.
        noise = np.rint(np.float32(self.noise_density) * sizes.astype(np.float32))
        noise = np.clip(noise, 1, sizes - 1).astype(np.int64)
        spans = np.rint(noise.astype(np.float32) / np.float32(self.mean_span_length))
        # There are as many spans that are kept.
        spans = np.clip(spans, 1, np.minimum(noise, sizes - noise)).astype(np.int64)
        return noise, spans

    def pair_sizes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of the sources and of the targets of some texts, with end tokens."""
        noise, spans = self.counts(sizes)
        return sizes - noise + spans + 1, noise + spans + 1

    def longest_text(self, source_length: int, target_length: int | None = None) -> int:
        """Returns the tokens of the longest text whose source and target fit; 0 if none does.

        Args:
          source_length: The largest number of tokens of a source.
          target_length: The largest number of tokens of a target; None: any.
        """
        # Neither side of a longer text is shorter.
        sizes = np.arange(2, 3 + int((source_length + 1) / (1 - self.noise_density)))
        sources, targets = self.pair_sizes(sizes)
        fits = (sources <= source_length) & (targets <= (target_length or targets))
        return int(sizes[fits].max(initial=0))

    def span_lengths(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Draws the lengths of the spans of a text that are kept and dropped, in turns.

        Args:
          size: Tokens of the text, at least 2.
          rng: Decides.

        Returns:
          int64 [2 spans], all positive, whose sum is ``size``.
        """
        (noise,), (spans,) = self.counts(np.asarray([size]))
        lengths = [_segments(size - noise, spans, rng), _segments(noise, spans, rng)]
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
          tokens: The text, int [n], at least 2.
          sentinels: The ids of sentinels, at least one for each span.
          end: The id that ends source and target.
          rng: Chooses the spans.

        Returns:
          The source and the target, each with the end token.
        """
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        edges = np.cumsum(self.span_lengths(len(tokens), rng))[:-1]
        for number, part in enumerate(np.split(tokens, edges)):
            span, is_noise = divmod(number, 2)
            sides[is_noise].append(part)
            # What one side has, the other has a sentinel for.
            if not is_noise:
                sides[0].append(np.asarray([sentinels[span]]))
                sides[1].append(np.asarray([sentinels[span]]))
        source, target = (np.concatenate([*side, [end]]).astype(np.int64) for side in sides)
        return source, target


def _segments(items: int, number: int, rng: np.random.Generator) -> np.ndarray:
    """Cuts a number of items into parts of random sizes, all of them positive."""
    cuts = np.sort(rng.choice(items - 1, number - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=items)
