"""Makes inputs from pairs of texts, to predict whether the second text continues the first."""

from dataclasses import dataclass

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..common.files import input_lines
from .bert_inputs import BertInputs
from .predictions import Prediction, output, softmax


@dataclass(frozen=True, eq=False)
class SentencePairExamples:
    """Pairs of texts as examples without masked tokens; see ``dataset.ExampleSource``.

    Attributes:
      tokens: The tokens of the pairs, including special tokens.
      texts: The texts of the pairs.
      max_predictions: The length of the array of masked positions, M.
    """

    tokens: BertInputs
    texts: tuple[tuple[str, str], ...]
    max_predictions: int

    @property
    def num_examples(self) -> int:
        """The number of pairs."""
        return len(self.tokens)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which is the same in every epoch."""
        # The model requires masked positions, but their predictions are not used.
        nothing = np.zeros(self.max_predictions, np.int32)
        return {**self.tokens.example(index), "masked_positions": nothing}

    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Returns ``{"text", "text_b", "is_next", "probability"}`` for each pair.

        Args:
          predictions: ``seq_relationship_logits``, float [n, 2]. Index 0 means that the second text
            continues the first.
        """
        logits = output(predictions, "seq_relationship_logits", len(self.tokens))
        return [
            {"text": one, "text_b": other, "is_next": p > 0.5, "probability": p}
            for (one, other), p in zip(self.texts, softmax(logits)[:, 0].tolist(), strict=True)
        ]


def read_pairs(path: str) -> dict[str, tuple[str, str]]:
    """Reads lines of two texts separated by a tab from files, or from standard input for ``-``.

    Returns:
      The pairs, keyed by their locations, such as ``a.tsv line 7``.

    Raises:
      DataError: A line does not contain two texts, or the file is empty.
    """
    pairs = {}
    for file, number, line in input_lines(path):
        texts = line.split("\t")
        location = f"{file} line {number}"
        problem = f"{location} has {len(texts)} texts: write two texts, separated by a tab"
        require(len(texts) == 2, problem, DataError)
        pairs[location] = texts[0], texts[1]
    require(pairs, f"nothing to predict in {path}: it is empty", DataError)
    return pairs
