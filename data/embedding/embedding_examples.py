"""Anchors with their documents as arrays. ``embedding_data`` describes the arrays."""

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
"""The kind of scores: none, one for each pair, one for each document, or a label for each text."""
_TARGETS: dict[ScoreForm, tuple[str, ...]] = {
    "none": (),
    "pairs": ("scores",),
    "documents": ("scores",),
    "labels": ("labels",),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingExamples(PickledByFields):
    """Anchors with their documents. See ``dataset.OrderedExamples`` and ``embedding_data``.

    Attributes:
      queries: The different anchors.
      documents: The different documents.
      rows: For each example, the index of its anchor in `queries`, then the index of each of its
        documents in `documents`, or -1, int32 [n, 1 + C].
      targets: The targets of a loss: `scores`, float32 [n] or [n, C], and `labels`, int32 [n], if
        the data have them.
      text_keys: Like `rows`, but equal texts have the same index in all columns.
      data_sets: The index of each example's data set, int32 [n].
      names: The names of the data sets if there are several.
      forms: The kind of scores in each data set.
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
            # A loss on scores accepts equal texts in a batch, so any order is possible.
            is_free = self.forms[0] in ("pairs", "documents")
            return None if is_free else self._order(batch_size, seed, epoch)
        # Each data set orders its examples. `rows` has the indices of its examples among all
        # examples.
        orders = [rows[part._order(batch_size, seed, epoch)] for rows, part in self.parts()]
        return MIXED[self.mixing](orders, seed, epoch)

    def _order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Returns the batches of a single data set."""
        if "labels" in self.targets:
            return label_order(self.targets["labels"], batch_size, seed, epoch)
        # Only pairs without scores use the other texts of a batch as negatives.
        keys = self.text_keys
        if "scores" in self.targets:
            keys = np.full_like(keys, ABSENT)
        return distinct_order(keys, batch_size, seed, epoch)

    def parts(self) -> Iterator[tuple[np.ndarray, "EmbeddingExamples"]]:
        """Yields the indices int64 [m] and the examples of each data set."""
        for i, form in enumerate(self.forms):
            rows = np.flatnonzero(self.data_sets == i)
            targets = {name: self.targets[name][rows] for name in _TARGETS[form]}
            if form == "pairs":
                # [m] or [m, C] to [m]: the score of a pair is in the first column.
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
        # With a single data set, a batch has no array `data_set`.
        if self.names:
            targets["data_set"] = self.data_sets[index]
        anchors = {"anchor_ids": query["input_ids"], "anchor_mask": query["attention_mask"]}
        return {**anchors, **(arrays if documents else {}), **targets}


def arrays_of(
    documents: Sequence[int], length: int, make: Callable[[int], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Returns the arrays of documents, int32 [C, T]; an absent document is all zeros.

    Args:
      documents: The index of each document, or ``ABSENT``.
      length: The padded length of a document, T.
      make: Returns the arrays of a document, int32 [T].
    """
    arrays = zeros(token_specs(len(documents), length))
    for position, document in enumerate(documents):
        if document != ABSENT:
            for name, row in make(document).items():
                arrays[name][position] = row
    return arrays
