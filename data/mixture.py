"""Mixtures: several sources of examples, each with a fixed share of the tokens or documents.

The source of example ``g`` of a run, and the index of this example among the examples of that
source, are pure functions of ``g``. At any point of a run, each source has its share of the
examples, with an error of one or two examples. When all examples of a source have been used, its
next epoch begins, in another order.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from .dataset import DataSplit, ExampleSource, PickledByFields

MixtureUnit = Literal["tokens", "documents"]
"""The unit of the weights of a mixture."""
# Shares are whole numbers with about this sum, because whole numbers give exact positions.
_SCALE = 1 << 40
# A source is measured on at most this number of examples, which bounds the time.
_MEASURED = 2048


@dataclass(frozen=True)
class MixedPart:
    """A source of a mixture.

    Attributes:
      name: The name of the source.
      weight: The weight as given; only the ratio to the other weights matters.
      examples: The examples.
      units: The mean number of tokens, or of documents, in an example.
    """

    name: str
    weight: float
    examples: ExampleSource
    units: float

    @classmethod
    def of(cls, name: str, weight: float, split: DataSplit, unit: MixtureUnit) -> "MixedPart":
        """Measures the examples of a source.

        Args:
          name: The name of the source.
          weight: Its weight.
          split: Its examples.
          unit: The unit of the weight.
        """
        tokens, documents = _measure(split.examples)
        if split.documents_per_token is not None:
            # A document may be cut into several sequences, so count it by its tokens.
            documents = tokens * split.documents_per_token
        return cls(name, weight, split.examples, {"tokens": tokens, "documents": documents}[unit])


@dataclass(frozen=True)
class MixedExamples(PickledByFields):
    """The examples of several sources; see ``dataset.ExampleSource``.

    As an example source, a mixture concatenates its sources: an epoch has each of their examples
    once. ``locate`` gives the order in training.

    Attributes:
      parts: The sources.
      unit: The unit of their weights.
    """

    parts: tuple[MixedPart, ...]
    unit: MixtureUnit

    @property
    def num_examples(self) -> int:
        """The number of examples of all sources."""
        return self._ends[-1]

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns an example of one of the sources."""
        # `index` counts the examples of all sources, and each source counts its examples from 0.
        part = bisect_right(self._ends, index)
        return self.parts[part].examples.example(epoch, index - self.start(part))

    def start(self, part: int) -> int:
        """Returns the index of the first example of a source."""
        return self._ends[part] - self.parts[part].examples.num_examples

    def locate(self, number: int) -> tuple[int, int]:
        """Returns the source of an example, and its index among the examples of this source.

        Args:
          number: The index of the example in the whole run.
        """
        # The first source takes its rounded share of all examples, the second source takes its
        # rounded share of the remaining examples, and so on. A source takes this example if its
        # rounded share of `number + 1` examples is one larger than of `number` examples.
        for part, weight, rest in self._shares:
            before, after = _num_taken(number, weight, rest), _num_taken(number + 1, weight, rest)
            if after > before:
                return part, before
            # The sources after this one share the remaining examples.
            number -= before
        raise AssertionError("the last source takes all remaining examples")

    def counts(self, number: int) -> list[int]:
        """Returns how many of the first `number` examples of a run are from each source."""
        counts: list[int] = []
        # Divide the examples as `locate` does.
        for _, weight, rest in self._shares:
            counts.append(_num_taken(number, weight, rest))
            number -= counts[-1]
        return counts

    def positions(self, number: int) -> list[dict[str, str | int]]:
        """Returns the next example of each source after the first `number` examples of a run.

        Returns:
          For each source, its name, the epoch, and the index of the example in the order of this
          epoch.
        """
        found: list[dict[str, str | int]] = []
        for part, count in zip(self.parts, self.counts(number), strict=True):
            epoch, example = divmod(count, part.examples.num_examples)
            found.append({"source": part.name, "epoch": epoch, "example": example})
        return found

    def lines(self, number: int) -> Iterator[tuple[str, str]]:
        """Yields each source's name, and its share of the first `number` examples of a run."""
        counts = self.counts(number)
        amounts = [x * part.units for x, part in zip(counts, self.parts, strict=True)]
        for part, count, amount in zip(self.parts, counts, amounts, strict=True):
            epochs = count / part.examples.num_examples
            share = amount / max(sum(amounts), 1e-9)
            read = f"{amount:,.0f} {self.unit}, {count:,} sequences, {epochs:.2f} epochs"
            yield part.name, f"{share:.1%} of all {self.unit}: {read}"

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.examples.num_examples for part in self.parts))

    @cached_property
    def _shares(self) -> list[tuple[int, int, int]]:
        """Each source with its share of the examples, and the sum of this and all later shares."""
        # A source with long documents needs few examples for its weight in tokens.
        rates = [part.weight / part.units for part in self.parts]
        # A share of at least 1 keeps a source with a tiny weight in the run.
        shares = [max(1, round(_SCALE * rate / sum(rates))) for rate in rates]
        # Sum from the end: the last source, whose share equals its sum, takes all that remain.
        rests = list(accumulate(reversed(shares)))[::-1]
        return list(zip(range(len(shares)), shares, rests, strict=True))


@dataclass(frozen=True)
class MixedContent:
    """Statistics of a mixture.

    Attributes:
      token_counts: The expected occurrences of each token in a run, up to a factor, float64 [V].
    """

    token_counts: np.ndarray


def mix(
    parts: Mapping[str, tuple[float, DataSplit]], unit: MixtureUnit, fingerprint: str
) -> DataSplit:
    """Mixes the training examples of several sources.

    Args:
      parts: The weight and the examples of each source, by its name.
      unit: The unit of the weights.
      fingerprint: A hash of the weights and sources, which the result's hash extends.

    Returns:
      A split whose examples are ``MixedExamples``.
    """
    examples = MixedExamples(
        tuple(MixedPart.of(name, *one, unit) for name, one in parts.items()), unit
    )
    # The log has the share of each source, then the notes of the source.
    total = sum(part.weight for part in examples.parts)
    summary = f"{len(parts)} sources, mixed by {unit}"
    notes: list[str] = []
    for part, (_, split) in zip(examples.parts, parts.values(), strict=True):
        notes.append(f"{part.weight / total:.1%} {part.name}: {split.summary}")
        notes += split.notes
    # The mixture has token counts only if every source has token counts.
    counts = [getattr(split.content, "token_counts", None) for _, split in parts.values()]
    shares = examples.counts(_SCALE)
    known = [
        # The counts cover all examples of a source, but the mixture takes only n examples.
        x * (n / part.examples.num_examples)
        for x, n, part in zip(counts, shares, examples.parts, strict=True)
        if x is not None
    ]
    content = MixedContent(np.sum(known, axis=0)) if len(known) == len(counts) else None
    return DataSplit(examples, content, fingerprint, summary, tuple(notes))


def _num_taken(number: int, weight: int, rest: int) -> int:
    """Returns how many of the first `number` examples a source takes: its share, rounded."""
    # Round number · weight / rest in whole numbers, because floats are not exact in long runs.
    return (2 * number * weight + rest) // (2 * rest)


def _measure(examples: ExampleSource) -> tuple[float, float]:
    """Returns the mean numbers of tokens and of documents in an example."""
    number = examples.num_examples
    # Measure examples at equal distances, because neighbors may come from the same document.
    indices = np.unique(np.linspace(0, number - 1, min(number, _MEASURED)).astype(np.int64))
    rows = [examples.example(0, index) for index in indices.tolist()]
    tokens, documents = np.mean(list(map(_amounts, rows)), axis=0)
    return float(tokens), float(documents)


def _amounts(row: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Returns the numbers of tokens and of documents in an example."""
    # Segments are numbered from 1, so the largest number is the number of documents.
    if (segments := row.get("segment_ids")) is not None:
        return int(np.count_nonzero(segments)), int(np.max(segments))
    # Without segment ids, masks mark the tokens of the source and of the target.
    masks = [np.count_nonzero(array) for name, array in row.items() if name.endswith("mask")]
    return max(1, int(sum(masks))), 1
