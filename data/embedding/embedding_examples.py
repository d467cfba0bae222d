"""Arrays of anchors and their documents, which ``embedding_data`` describes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..dataset import PickledByFields, zeros
from ..features.bert_inputs import BertInputs, token_specs
from ..orders.by_label import label_order
from ..orders.distinct import ABSENT, distinct_order
from ..orders.mixed import MIXED, Mixing

ScoreForm = Literal["none", "pairs", "documents", "labels"]
"""The type of scores: none, one per pair, one per document, or a label for each text."""
_TARGETS: dict[ScoreForm, tuple[str, ...]] = {
    "none": (),
    "pairs": ("scores",),
    "documents": ("scores",),
    "labels": ("labels",),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingExamples(PickledByFields):
    """Anchors and their documents. See ``dataset.OrderedExamples`` and ``embedding_data``.

    Attributes:
      queries: The distinct anchors.
      documents: The distinct documents.
      rows: For each example, the index of its anchor in `queries`, followed by the index of each of
        its documents in `documents`, or -1 if there is no document, int32 [n, 1 + C].
      targets: The targets for the loss: `scores`, float32 [n] or [n, C], and `labels`, int32 [n],
        if the data contain them.
      text_keys: Like `rows`, but an anchor and a document with the same text have the same index.
      data_sets: The index of the data set of each example, int32 [n].
      names: The names of the data sets, if there are several.
      forms: The type of scores in each data set.
      mixing: The order of the batches of several data sets.
      notes: Notes for the log.
    """

    queries: BertInputs
    documents: BertInputs
    rows: np.ndarray
    targets: Mapping[str, np.ndarray]
    text_keys: np.ndarray
    data_sets: np.ndarray
    names: tuple[str, ...]
    forms: tuple[ScoreForm, ...]
    mixing: Mixing
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of anchors."""
        return len(self.rows)

    def batches(self, batch_size: int, seed: int, epoch: int) -> np.ndarray | None:
        """See ``dataset.OrderedExamples``."""
        if not self.names:
            # A loss on scores allows equal texts in a batch, so any order is possible.
            is_free = self.forms[0] in ("pairs", "documents")
            return None if is_free else self._order(batch_size, seed, epoch)
        # Each data set orders its examples. `rows` contains the indices of these examples among the
        # examples of all data sets.
        orders = [rows[part._order(batch_size, seed, epoch)] for rows, part in self.parts()]
        return MIXED[self.mixing](orders, seed, epoch)

    def _order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Returns the batches for a single data set."""
        if "labels" in self.targets:
            return label_order(self.targets["labels"], batch_size, seed, epoch)
        # The other texts of a batch are negatives only for pairs without scores.
        keys = self.text_keys
        if "scores" in self.targets:
            keys = np.full_like(keys, ABSENT)
        return distinct_order(keys, batch_size, seed, epoch)

    def parts(self) -> Iterator[tuple[np.ndarray, "EmbeddingExamples"]]:
        """Yields the indices, int64 [m], and the examples of each data set."""
        for i, form in enumerate(self.forms):
            rows = np.flatnonzero(self.data_sets == i)
            targets = {name: self.targets[name][rows] for name in _TARGETS[form]}
            if form == "pairs":
                # Convert [m] or [m, C] to [m], because the score of a pair is in the first column.
                targets["scores"] = targets["scores"].reshape(len(rows), -1)[:, 0]
            arrays = {
                name: getattr(self, name)[rows] for name in ("rows", "text_keys", "data_sets")
            }
            yield rows, replace(self, targets=targets, **arrays, names=(), forms=(form,))

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which is the same in every epoch."""
        anchor, *documents = self.rows[index].tolist()
        query = self.queries.example(anchor)
        arrays = arrays_of(documents, self.documents.template.length, self.documents.example)
        del arrays["token_type_ids"]
        targets = {name: x[index] for name, x in self.targets.items()}
        # If there is only one data set, a batch has no array `data_set`.
        if self.names:
            targets["data_set"] = self.data_sets[index]
        anchors = {"anchor_ids": query["input_ids"], "anchor_mask": query["attention_mask"]}
        return {**anchors, **(arrays if documents else {}), **targets}


def arrays_of(
    documents: Sequence[int], length: int, make: Callable[[int], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Returns the arrays of documents, int32 [C, T], with zeros for absent documents.

    Args:
      documents: The index of each document, or ``ABSENT`` if there is no document.
      length: The padded length of a document, T.
      make: A function that returns the arrays of a document, int32 [T].
    """
    arrays = zeros(token_specs(len(documents), length))
    for position, document in enumerate(documents):
        if document != ABSENT:
            for name, row in make(document).items():
                arrays[name][position] = row
    return arrays
