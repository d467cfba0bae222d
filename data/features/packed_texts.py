"""Makes rows of several texts without padding between them, each text with special tokens.

ModernBERT is trained on such rows (Warner et al. 2024, "Smarter, better, faster, longer", section
2.1.3). The texts in a row do not attend to each other, and the positions of each text begin at 0.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..corpora.sentence_corpus import SentenceCorpus
from ..dataset import PickledByFields
from ..tokenizers.frame import Frame
from .segment_pairs import Example


@dataclass(frozen=True)
class PackedTexts(PickledByFields):
    """The examples of all epochs, with random access; see ``segment_pairs.Segments``.

    A row contains consecutive documents from a random position on. The first and the last document
    may be incomplete. The number of examples in an epoch is the number of rows that the whole text
    would fill. In rare cases, a row ends with padding, because it has no room for the special
    tokens of another text.

    Attributes:
      corpus: The tokenized documents.
      length: The number of tokens in an example, T.
      frame: The special tokens around a text.
    """

    corpus: SentenceCorpus
    length: int
    frame: Frame

    def __post_init__(self) -> None:
        self.frame.single.room(self.length)

    @cached_property
    def _ends(self) -> np.ndarray:
        """The end of each document in the array of tokens, int64 [num_documents]."""
        return self.corpus.sentence_starts[self.corpus.document_starts[1:]]

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch."""
        return max(1, len(self.corpus.tokens) // (self.length - self.frame.single.num_added))

    def example(self, epoch: int, index: int, rng: np.random.Generator) -> Example:
        """Makes one example.

        Args:
          epoch: The epoch, counted from 0. The epoch and the index are not used directly, because
            they determine the state of ``rng``.
          index: The index of the example, in ``[0, num_examples)``.
          rng: The source of randomness.
        """
        del epoch, index
        tokens, added = self.corpus.tokens, self.frame.single.num_added
        # Begin at a random token, and add texts until the row is full.
        at, room, framed = int(rng.integers(len(tokens))), self.length, []
        while room > added:
            # The document that contains token `at` ends at the first end after this token.
            end = int(self._ends[np.searchsorted(self._ends, at, "right")])
            size = min(end - at, room - added)
            # Shorten the text if it would leave too little room for another text.
            rest = room - added - size
            if 0 < rest <= added:
                size = max(1, size - (added + 1 - rest))
            framed.append(self.frame.join(tokens[at : at + size].tolist()))
            room -= size + added
            at = (at + size) % len(tokens)
        # Join the texts into a row of at most T tokens, and number the texts of the row from 1.
        sizes = [len(text.ids) for text in framed]
        return Example(
            np.concatenate([text.ids for text in framed]).astype(np.int32),
            np.concatenate([text.types for text in framed]).astype(np.int32),
            None,
            np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes),
        )
