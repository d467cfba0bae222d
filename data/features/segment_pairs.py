"""Makes segment pairs for next-sentence prediction (Devlin et al. 2019, sections 3.1, A.2).

As in google-research/bert ``create_pretraining_data.py``, consecutive sentences of a document are
collected until a target length is reached, and divided into two segments at a random sentence. In
half of the examples, the second segment is then replaced by sentences from a random position in
another document. A tenth of the examples have a random shorter target length. If a pair is too
long, tokens are removed from randomly chosen ends of the longer segment.

There are deliberate differences from the original, which make it possible to make each example
independently:

- The number of examples is fixed: a document of ``n`` tokens has ``ceil(n / target)`` examples. The
  starts of the examples differ between epochs. Example ``k`` begins with the first sentence that
  starts at or after token ``k * target - shift`` of its document. In each epoch, a random ``shift``
  is drawn for each document. It is at most the number of tokens that are missing to fill the last
  example, so the examples still cover the whole document: each sentence is available to one
  example, and no sentence is favored.
- An example has at least two sentences, so the second segment continues the first in half of the
  examples. In the original, this proportion is smaller.
- If a random second segment replaces sentences, these sentences are not used until another epoch.
  In the original, the next example starts with these sentences.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..corpora.sentence_corpus import SentenceCorpus
from ..dataset import PickledByFields
from ..tokenizers.frame import Frame, Layout

# The last word of the seed that draws the shifts. The seeds for the random numbers of examples end
# with other words.
_SHIFTS = 1


class Example(NamedTuple):
    """An example before its tokens are masked.

    Attributes:
      input_ids: The tokens of segment A, and of segment B if the example is a pair, with special
        tokens, int32 [n].
      token_type_ids: The token type of each token, int32 [n].
      label: 0 if B continues A, 1 if B comes from another document or from before A. None without
        B.
      segment_ids: In a row of several texts, the number of the text that contains each token,
        counted from 1, int32 [n]; None in other rows.
    """

    input_ids: np.ndarray
    token_type_ids: np.ndarray
    label: int | None
    segment_ids: np.ndarray | None = None


class Selection(NamedTuple):
    """The sentences of an example, as indices in the corpus.

    Attributes:
      document: The document that contains segment A.
      first: The first sentence of A.
      middle: The first sentence that follows A.
      other: The first sentence of B, or None for a single text.
      end: The first sentence that follows B; without B, the first sentence that follows A.
      short: Whether the example has a random shorter target length.
    """

    document: int
    first: int
    middle: int
    other: int | None
    end: int
    short: bool


@dataclass(frozen=True)
class Segments(PickledByFields):
    """The examples of all epochs, with random access.

    Attributes:
      corpus: The tokenized sentences.
      length: The maximum number of tokens in an example, T.
      frame: The special tokens around one text and around two texts.
      seed: The seed for the start positions of examples.
      next_sentence: Whether examples are pairs instead of single texts.
      short_fraction: The fraction of examples with a random shorter target length.
      jitter: Whether the start positions of examples differ between epochs.
      swap: Whether half of the pairs are in reverse order, instead of coming from two documents
        (Lan et al. 2020, "ALBERT", section 3.1).
    """

    corpus: SentenceCorpus
    length: int
    frame: Frame
    seed: int = 0
    next_sentence: bool = True
    short_fraction: float = 0.1
    jitter: bool = True
    swap: bool = False

    def __post_init__(self) -> None:
        self._layout.room(self.length)
        if self.next_sentence:
            self._check_documents()

    def _check_documents(self) -> None:
        corpus = self.corpus
        require(
            corpus.num_documents >= 2 or self.swap,
            "next sentences need two documents, and the training or validation data have only one: "
            "make documents smaller (text:GLOB#block or #sentences), hold out more, name other "
            "validation data, or set data.next_sentence False",
            DataError,
        )
        require(
            corpus.num_single != corpus.num_documents,
            f"each of {corpus.num_documents:,} documents is a single sentence, so no "
            f"segment continues another: give longer documents (#file, #block), or "
            f"set data.next_sentence False",
            DataError,
        )

    @property
    def target(self) -> int:
        """The number of tokens in a full example, excluding special tokens."""
        return self.length - self._layout.num_added

    @property
    def _layout(self) -> Layout:
        return self.frame.layout(2 if self.next_sentence else 1)

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch."""
        return int(self._example_ends[-1])

    @cached_property
    def _token_starts(self) -> np.ndarray:
        """The token index where each document starts, then the end, int64 [num_documents + 1]."""
        return self.corpus.sentence_starts[self.corpus.document_starts]

    @cached_property
    def _example_ends(self) -> np.ndarray:
        """The number of examples in each document and all earlier ones, int64 [num_documents]."""
        counts = -(-np.diff(self._token_starts) // self.target)
        if self.next_sentence:
            # A pair requires two sentences of the same document.
            counts[np.diff(self.corpus.document_starts) < 2] = 0
        return np.cumsum(counts)

    def example(self, epoch: int, index: int, rng: np.random.Generator) -> Example:
        """Makes one example.

        Args:
          epoch: The epoch, counted from 0.
          index: The index of the example, in ``[0, num_examples)``.
          rng: The source of all randomness except for the start of the example.

        Returns:
          An example with at most ``length`` tokens.
        """
        chosen = self.select(epoch, index, rng)
        a = self._tokens(chosen.first, chosen.middle)
        if chosen.other is None:
            a = _truncate(a, self.target, rng)
            return framed_example(self.frame, a, label=None)
        b = self._tokens(chosen.other, chosen.end)
        size_a, size_b = sizes_of_pair(len(a), len(b), self.target)
        a, b = _truncate(a, size_a, rng), _truncate(b, size_b, rng)
        if self.swap and rng.random() < 0.5:
            return framed_example(self.frame, b, a, label=1)
        return framed_example(self.frame, a, b, label=int(chosen.other != chosen.middle))

    def select(self, epoch: int, index: int, rng: np.random.Generator) -> Selection:
        """Chooses the sentences of an example; see ``example``."""
        # Find the document that contains the example, and the end of its sentences.
        document = int(np.searchsorted(self._example_ends, index, "right"))
        last = int(self.corpus.document_starts[document + 1])
        # The sentences from `first` to `end` form an example of about `target` tokens.
        first = self._begin(epoch, index, document)
        short = bool(rng.random() < self.short_fraction)
        target = int(rng.integers(2, self.target, endpoint=True)) if short else self.target
        end = self._fill(first, last, target)
        if not self.next_sentence:
            return Selection(document, first, end, None, end, short)
        first, end = _at_least_two(first, end, last)
        # Split at a random sentence; B continues A in half of the pairs.
        middle = int(rng.integers(first + 1, end))
        if self.swap or rng.random() < 0.5:
            return Selection(document, first, middle, middle, end, short)
        # Otherwise, B starts at a random sentence of another document. Skip the index of this
        # document, so that all other documents are equally likely.
        other = int(rng.integers(self.corpus.num_documents - 1))
        other += other >= document
        begin, last = self.corpus.document_starts[other : other + 2].tolist()
        start = int(rng.integers(begin, last))
        starts = self.corpus.sentence_starts
        # B fills the room that remains after A.
        end = self._fill(start, last, target - int(starts[middle] - starts[first]))
        return Selection(document, first, middle, start, end, short)

    def _begin(self, epoch: int, index: int, document: int) -> int:
        """Returns the index of the first sentence of an example."""
        before = int(self._example_ends[document - 1]) if document else 0
        count = int(self._example_ends[document]) - before
        start, end = self._token_starts[document : document + 2].tolist()
        token = start + (index - before) * self.target
        if self.jitter:
            # Shift all starts in the document by at most the number of tokens that are missing to
            # fill its last example, so that the examples still cover the document.
            free = count * self.target - (end - start)
            words = [self.seed % 2**64, epoch, document, _SHIFTS]
            token -= int(np.random.default_rng(words).integers(0, free, endpoint=True))
        return self._sentence_from(max(token, start), document)

    def _sentence_from(self, token: int, document: int) -> int:
        """Returns the index of the first sentence that starts at or after a given token.

        If this sentence starts at least `target` tokens later or is in another document, returns
        the previous sentence.
        """
        starts = self.corpus.sentence_starts
        sentence = int(np.searchsorted(starts, token, "left"))
        last = int(self.corpus.document_starts[document + 1])
        if sentence >= last or starts[sentence] - token >= self.target:
            return sentence - 1
        return sentence

    def _fill(self, first: int, last: int, target: int) -> int:
        """Returns the end of the sentences from ``first`` that together reach ``target`` tokens."""
        starts = self.corpus.sentence_starts
        end = int(np.searchsorted(starts, int(starts[first]) + target, "left"))
        return min(max(end, first + 1), last)

    def _tokens(self, first: int, end: int) -> np.ndarray:
        starts = self.corpus.sentence_starts
        return self.corpus.tokens[int(starts[first]) : int(starts[end])]


def framed_example(frame: Frame, *segments: np.ndarray, label: int | None) -> Example:
    """Adds the special tokens of a frame to one or two segments."""
    framed = frame.join(*(segment.tolist() for segment in segments))
    return Example(np.array(framed.ids, np.int32), np.array(framed.types, np.int32), label)


def sizes_of_pair(one: int, other: int, room: int) -> tuple[int, int]:
    """Returns how many tokens to keep from each of two segments so that both fit together.

    The result is the same as in the original code, which removes one token at a time from the
    longer segment, or from the second segment if both are equally long.
    """
    other = min(other, max(room // 2, room - one))
    return min(one, room - other), other


def _truncate(tokens: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Removes tokens until ``size`` remain, each from the start or the end at random."""
    excess = len(tokens) - size
    if excess <= 0:
        return tokens
    # A single binomial draw is equivalent to a coin toss for each removed token.
    front = int(rng.binomial(excess, 0.5))
    return tokens[front : front + size]


def _at_least_two(first: int, end: int, last: int) -> tuple[int, int]:
    """Extends a single sentence by the next sentence; if there is none, by the previous one."""
    if end - first > 1:
        return first, end
    return (first, end + 1) if end < last else (first - 1, end)
