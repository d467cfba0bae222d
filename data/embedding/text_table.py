"""Tables of the distinct texts of examples, so that each text is tokenized only once."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..orders.distinct import ABSENT
from ..tokenizers.base import Tokenizer
from .columns import EmbeddingExample


class TextTable:
    """A set of distinct texts. Each new text gets the next index."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.locations: list[str] = []

    def add(self, text: str, location: str) -> int:
        """Returns the index of a text. A new text is stored with its location, for messages."""
        index = self.numbers.setdefault(text, len(self.numbers))
        if index == len(self.locations):
            self.locations.append(location)
        return index


@dataclass(frozen=True)
class NumberedTexts:
    """The distinct texts of examples, with an index for each text.

    Attributes:
      queries: The distinct anchors.
      documents: The distinct documents.
      rows: For each example, the index of its anchor in `queries`, followed by the index of each
        document in `documents` or ``ABSENT``, int32 [n, 1 + C].
      keys: Like ``rows``, but an anchor and a document with the same text have the same index.
    """

    queries: TextTable
    documents: TextTable
    rows: np.ndarray
    keys: np.ndarray

    @classmethod
    def of(cls, examples: Sequence[EmbeddingExample]) -> "NumberedTexts":
        """Assigns an index to each distinct text of the examples."""
        most = max(len(example.documents) for example in examples)
        # In `rows`, anchors and documents are numbered separately. In `keys`, they are numbered
        # together.
        queries, documents, texts = TextTable(), TextTable(), TextTable()
        rows, keys = np.full((2, len(examples), 1 + most), ABSENT, np.int32)
        for i, example in enumerate(examples):
            rows[i, 0] = queries.add(example.anchor, example.location)
            for j, text in enumerate(example.documents, start=1):
                rows[i, j] = documents.add(text, example.location)
            for j, text in enumerate(example.texts):
                keys[i, j] = texts.add(text, example.location)
        return cls(queries, documents, rows, keys)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """The tokens of many texts without special tokens, as flat arrays, which are quick to pickle.

    Attributes:
      ids: The tokens of all texts, int32.
      starts: The start of each text in ``ids``, then the end, int64 [n + 1].
    """

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, texts: TextTable, tokenizer: Tokenizer) -> "TokenRows":
        """Tokenizes texts."""
        ids, starts = array("i"), array("q", [0])
        for row in tokenizer.encode_batch(list(texts.numbers)):
            ids.extend(row)
            starts.append(len(ids))
        return cls(np.array(ids, np.int32), np.array(starts, np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        """Returns the tokens of a text."""
        return self.ids[self.starts[index] : self.starts[index + 1]].tolist()

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each text, int64 [n]."""
        return np.diff(self.starts)
