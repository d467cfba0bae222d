"""Takes sequences of fixed length from random positions of a text, even within sentences.

This is a simplified form of BERT's pretraining. A sequence is either T consecutive tokens that are
divided in the middle, or two halves from different parts of the text, and the model predicts which
of these is the case (MLVU lecture 10, slides 39 and 40). Without next-sentence prediction, a
sequence is a random window. The original form is in ``segment_pairs``; its segments consist of
complete sentences.
"""

from dataclasses import dataclass

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..corpora.sentence_corpus import SentenceCorpus
from ..tokenizers.frame import Frame
from .segment_pairs import Example, framed_example


@dataclass(frozen=True)
class Windows:
    """The examples of all epochs, with random access; see ``segment_pairs.Segments``.

    Every example has exactly T tokens. The first half of a pair consists of A and the special
    tokens before B, and has T // 2 tokens. The second half has the remaining tokens. The number of
    examples in an epoch is the number of sequences that the whole text would fill. In every epoch,
    the positions of examples are drawn from the whole text, so an epoch may use some tokens twice
    and skip others.

    Attributes:
      corpus: The tokenized text. Windows may extend over the ends of sentences and documents.
      length: The number of tokens in an example, T.
      frame: The special tokens around one text and around two texts.
      next_sentence: Whether examples are pairs instead of single windows.
    """

    corpus: SentenceCorpus
    length: int
    frame: Frame
    next_sentence: bool = True

    def __post_init__(self) -> None:
        first, second = self.sizes
        fewest = 2 * self.frame.pair.num_added
        problem = f"length {self.length} leaves no room for tokens: choose at least {fewest}"
        # The second half of a pair is at least as long as the first, so check only the first.
        require(first >= 1, problem, DataError)
        # In a shorter text, if A came from the middle, there would be no room for a B that does not
        # overlap A.
        needed = first + 2 * second
        require(
            len(self.corpus.tokens) >= needed,
            f"random halves or windows for sequences of {self.length} tokens need a text of "
            f"{needed:,} tokens, and the training or validation data have "
            f"{len(self.corpus.tokens):,}: lower data.length, give more text, hold out more, "
            "or name other validation data",
            DataError,
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of tokens in A and in B (0 without pairs), excluding special tokens."""
        if not self.next_sentence:
            return self.length - self.frame.single.num_added, 0
        half, after = self.length // 2, len(self.frame.pair.marks[2])
        first = half - (self.frame.pair.num_added - after)
        return first, self.length - half - after

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch."""
        return max(1, len(self.corpus.tokens) // sum(self.sizes))

    def example(self, epoch: int, index: int, rng: np.random.Generator) -> Example:
        """Makes one example.

        Args:
          epoch: The epoch, counted from 0. The epoch and the index are not used directly, because
            they determine the state of ``rng``.
          index: The index of the example, in ``[0, num_examples)``.
          rng: The source of randomness.

        Returns:
          An example with ``length`` tokens. If examples are pairs, the label is 1 in half of them,
          and then B neither continues nor overlaps A.
        """
        del epoch, index
        first, second = self.sizes
        total = len(self.corpus.tokens)
        is_random = self.next_sentence and bool(rng.random() < 0.5)
        num_tokens = first if is_random else first + second
        start = int(rng.integers(total - num_tokens, endpoint=True))
        one = self.corpus.tokens[start : start + first]
        if not self.next_sentence:
            return framed_example(self.frame, one, label=None)
        other = start + first
        if is_random:
            # B either ends before A, or starts at least one token after the end of A. Count the
            # possible start positions in both cases, and draw one of all positions.
            before = max(0, start - second + 1)
            behind = max(0, total - second - (start + first))
            other = int(rng.integers(before + behind))
            other += start + first + 1 - before if other >= before else 0
        two = self.corpus.tokens[other : other + second]
        return framed_example(self.frame, one, two, label=int(is_random))
