"""Sequences of fixed length from random positions of a text, wherever its sentences end.

The simple form in which BERT's pretraining is often told: T tokens from a random position are one
text, split in the middle, or two halves come from two different parts of the text, and the model
predicts which (MLVU lecture 10, slides 39 and 40). Without next sentences a sequence is a random
window. The form of the original code, whose segments are whole sentences, is ``segment_pairs``.
"""

from dataclasses import dataclass

import numpy as np

from ..common.errors import DataError
from ..corpora.sentence_corpus import SentenceCorpus
from ..tokenizers.frame import Frame
from .segment_pairs import Example, framed_example


@dataclass(frozen=True)
class Windows:
    """The examples of all epochs, at random access; see ``segment_pairs.Segments``.

    Every example has exactly T tokens. The first half of a pair, A with the special tokens before
    B, has T // 2 of them, the second half has the others. An epoch has as many examples as fill the
    text; their positions are drawn anew from all of it, so some tokens are read twice and others
    wait for another epoch.

    Attributes:
      corpus: The text as tokens; windows reach over the ends of sentences and documents.
      length: The tokens of an example, T.
      frame: The special tokens of one text and of two.
      next_sentence: Whether examples are pairs; otherwise single windows.
    """

    corpus: SentenceCorpus
    length: int
    frame: Frame
    next_sentence: bool = True

    def __post_init__(self) -> None:
        first, second = self.sizes
        if first < 1 or (self.next_sentence and second < 1):
            added = self.frame.layout(2 if self.next_sentence else 1).num_added
            raise DataError(
                f"length {self.length} leaves no room for tokens: choose at least {2 * added}"
            )
        # With fewer tokens, an A from the middle would leave no place for another part.
        needed = first + 2 * second
        if len(self.corpus.tokens) < needed:
            raise DataError(
                f"random halves or windows for sequences of {self.length} tokens need a text of "
                f"{needed:,}, and the training or validation data have "
                f"{len(self.corpus.tokens):,}: lower data.length, give more text, hold out more, "
                "or name other validation data"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """The tokens of A and of B without special tokens; of a single window, and 0."""
        if not self.next_sentence:
            return self.length - self.frame.single.num_added, 0
        half, after = self.length // 2, len(self.frame.pair.marks[2])
        first = half - (self.frame.pair.num_added - after)
        return first, self.length - half - after

    @property
    def num_examples(self) -> int:
        """The number of examples of an epoch."""
        return max(1, len(self.corpus.tokens) // sum(self.sizes))

    def example(self, epoch: int, index: int, rng: np.random.Generator) -> Example:
        """Makes one example.

        Args:
          epoch: From 0; both it and the index decide only the state of ``rng``.
          index: In ``[0, num_examples)``.
          rng: The generator of all random choices.

        Returns:
          ``length`` tokens; with next sentences the label is 1 in half of the examples, whose B
          is neither the continuation of A nor has a token of A.
        """
        del epoch, index
        first, second = self.sizes
        total = len(self.corpus.tokens)
        is_random = self.next_sentence and bool(rng.random() < 0.5)
        whole = first if is_random else first + second
        start = int(rng.integers(total - whole, endpoint=True))
        one = self.corpus.tokens[start : start + first]
        if not self.next_sentence:
            return framed_example(self.frame, one, label=None)
        other = start + first
        if is_random:
            # B begins where it ends before A, or one token or more behind the end of A.
            before = max(0, start - second + 1)
            behind = max(0, total - second - (start + first))
            other = int(rng.integers(before + behind))
            other += start + first + 1 - before if other >= before else 0
        two = self.corpus.tokens[other : other + second]
        return framed_example(self.frame, one, two, label=int(is_random))
