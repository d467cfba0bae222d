"""Mixes several sources of examples so that each has a fixed share of the tokens or documents.

The source of example ``g`` of a run and the index of the example within this source are pure
functions of ``g``. At any point of a run, each source has provided its share of the examples, up to
one or two examples. When all examples of a source have been used, the next epoch of this source
begins, in another order.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from .dataset import DataSplit, ExampleSource, PickledByFields

MIXTURE = "mixture"
"""The key of the data iterator's state that holds the position of each source of a mixture."""
MixtureUnit = Literal["tokens", "documents"]
"""The unit of the weights of a mixture."""
# Shares are integers whose sum is about this number, because integers give exact positions.
_SCALE = 1 << 40
# At most this number of examples of a source is measured, which bounds the time.
_MEASURED = 2048


@dataclass(frozen=True)
class MixedPart:
    """One source of a mixture.

    Attributes:
      name: The name of the source.
      weight: The weight that the user gave; only its ratio to the other weights matters.
      examples: The examples.
      units: The mean number of tokens or documents in an example.
    """

    name: str
    weight: float
    examples: ExampleSource
    units: float

    @classmethod
    def of(cls, name: str, weight: float, split: DataSplit, unit: MixtureUnit) -> "MixedPart":
        """Creates a part after measuring the examples of its source.

        Args:
          name: The name of the source.
          weight: The weight of the source.
          split: The examples of the source.
          unit: The unit of the weight.
        """
        tokens, documents = _measure(split.examples)
        if split.documents_per_token is not None:
            # A document may span several sequences, so compute the documents from the tokens.
            documents = tokens * split.documents_per_token
        return cls(name, weight, split.examples, {"tokens": tokens, "documents": documents}[unit])


@dataclass(frozen=True)
class MixedExamples(PickledByFields):
    """The examples of several sources; see ``dataset.ExampleSource``.

    As an example source, a mixture is the concatenation of its sources: an epoch contains each of
    their examples once. ``locate`` determines the order in training.

    Attributes:
      parts: The sources.
      unit: The unit of the weights.
      skipped: The number of examples of each source that the mixture skips, because an earlier
        stage of the run has read them. Empty if it skips none.
    """

    parts: tuple[MixedPart, ...]
    unit: MixtureUnit
    skipped: tuple[int, ...] = ()

    @property
    def num_examples(self) -> int:
        """The total number of examples in all sources."""
        return self._ends[-1]

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns an example of one of the sources."""
        # `index` counts the examples of all sources, but each source counts its examples from 0.
        part = bisect_right(self._ends, index)
        return self.parts[part].examples.example(epoch, index - self.start(part))

    def start(self, part: int) -> int:
        """Returns the index of the first example of a source."""
        return self._ends[part] - self.parts[part].examples.num_examples

    def locate(self, number: int) -> tuple[int, int]:
        """Returns the source of an example, and the index of the example within this source.

        Args:
          number: The index of the example in all examples of the mixture.
        """
        # The first source takes its rounded share of all examples, the second source takes its
        # rounded share of the remaining examples, and so on. A source takes this example if its
        # rounded share of `number + 1` examples is larger by one than its share of `number`
        # examples.
        for part, weight, rest in self._shares:
            before, after = _num_taken(number, weight, rest), _num_taken(number + 1, weight, rest)
            if after > before:
                return part, self._skipped[part] + before
            # The sources after this one share the remaining examples.
            number -= before
        raise AssertionError("the last source takes all remaining examples")

    def counts(self, number: int) -> list[int]:
        """Returns how many of the first `number` examples come from each source."""
        counts: list[int] = []
        # Divide the examples as `locate` does.
        for _, weight, rest in self._shares:
            counts.append(_num_taken(number, weight, rest))
            number -= counts[-1]
        return counts

    def positions(self, number: int) -> list[dict[str, str | int]]:
        """Returns the position of each source after the first `number` examples.

        Returns:
          For each source, its name, the epoch, and the index of the next example in the order of
          this epoch.
        """
        found: list[dict[str, str | int]] = []
        for part, skipped, count in zip(
            self.parts, self._skipped, self.counts(number), strict=True
        ):
            epoch, example = divmod(skipped + count, part.examples.num_examples)
            found.append({"source": part.name, "epoch": epoch, "example": example})
        return found

    def lines(self, number: int) -> Iterator[tuple[str, str]]:
        """Yields the name of each source, and its share of the first `number` examples."""
        counts = self.counts(number)
        amounts = [x * part.units for x, part in zip(counts, self.parts, strict=True)]
        for part, count, amount in zip(self.parts, counts, amounts, strict=True):
            epochs = count / part.examples.num_examples
            share = amount / max(sum(amounts), 1e-9)
            read = f"{amount:,.0f} {self.unit}, {count:,} sequences, {epochs:.2f} epochs"
            yield part.name, f"{share:.1%} of all {self.unit}: {read}"

    @property
    def _skipped(self) -> tuple[int, ...]:
        return self.skipped or (0,) * len(self.parts)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.examples.num_examples for part in self.parts))

    @cached_property
    def _shares(self) -> list[tuple[int, int, int]]:
        """The index and share of each source, and the sum of this and all later shares."""
        # A source whose examples have more tokens or documents needs fewer examples for its weight.
        rates = [part.weight / part.units for part in self.parts]
        # A source with a tiny weight gets a share of at least 1, so that it stays in the run.
        shares = [max(1, round(_SCALE * rate / sum(rates))) for rate in rates]
        # Add up from the end. The sum of the last source is its share, so this source takes all
        # remaining examples.
        rests = list(accumulate(reversed(shares)))[::-1]
        return list(zip(range(len(shares)), shares, rests, strict=True))


@dataclass(frozen=True)
class MixedContent:
    """Statistics of a mixture.

    Attributes:
      token_counts: The expected number of occurrences of each token in a run, up to a constant
        factor, float64 [V].
    """

    token_counts: np.ndarray


def mix(
    parts: Mapping[str, tuple[float, DataSplit]], unit: MixtureUnit, fingerprint: str
) -> DataSplit:
    """Mixes the training examples of several sources.

    Args:
      parts: Maps the name of each source to its weight and its examples.
      unit: The unit of the weights.
      fingerprint: A hash of the weights and sources, which becomes the fingerprint of the split.

    Returns:
      A split whose examples are ``MixedExamples``.
    """
    examples = MixedExamples(
        tuple(MixedPart.of(name, *one, unit) for name, one in parts.items()), unit
    )
    # The log shows the share of each source, followed by the notes of this source.
    total = sum(part.weight for part in examples.parts)
    summary = f"{len(parts)} sources, mixed by {unit}"
    notes: list[str] = []
    for part, (_, split) in zip(examples.parts, parts.values(), strict=True):
        notes.append(f"{part.weight / total:.1%} {part.name}: {split.summary}")
        notes += split.notes
    # The mixture has token counts only if all of its sources have token counts.
    counts = [getattr(split.content, "token_counts", None) for _, split in parts.values()]
    shares = examples.counts(_SCALE)
    known = [
        # The counts cover all examples of a source, but the mixture takes n examples.
        x * (n / part.examples.num_examples)
        for x, n, part in zip(counts, shares, examples.parts, strict=True)
        if x is not None
    ]
    content = MixedContent(np.sum(known, axis=0)) if len(known) == len(counts) else None
    return DataSplit(examples, content, fingerprint, summary, tuple(notes))


def _num_taken(number: int, weight: int, rest: int) -> int:
    """Returns a source's rounded share of the first `number` examples."""
    # Round number · weight / rest in integer arithmetic, because floats are inexact in long runs.
    return (2 * number * weight + rest) // (2 * rest)


def _measure(examples: ExampleSource) -> tuple[float, float]:
    """Returns the mean number of tokens and the mean number of documents in an example."""
    number = examples.num_examples
    # Measure evenly spaced examples, because neighbors may come from the same document.
    indices = np.unique(np.linspace(0, number - 1, min(number, _MEASURED)).astype(np.int64))
    rows = [examples.example(0, index) for index in indices.tolist()]
    tokens, documents = np.mean(list(map(_amounts, rows)), axis=0)
    return float(tokens), float(documents)


def _amounts(row: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Returns the number of tokens and the number of documents in an example."""
    # Segments are numbered from 1, so the largest number is the number of documents.
    if (segments := row.get("segment_ids")) is not None:
        return int(np.count_nonzero(segments)), int(np.max(segments))
    # Without segment ids, the masks mark the source tokens and the target tokens.
    masks = [np.count_nonzero(array) for name, array in row.items() if name.endswith("mask")]
    return max(1, int(sum(masks))), 1
