"""Packed rows that contain several complete examples, each with an anchor and its documents."""

from dataclasses import dataclass

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..dataset import PickledByFields
from ..orders.distinct import ABSENT, distinct_order
from ..packing.packing import best_fit
from .embedding_examples import EmbeddingExamples


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedExamples(PickledByFields):
    """Rows with several examples. See ``dataset.OrderedExamples`` and ``embedding_data``.

    Attributes:
      examples: The examples, which come from a single data set and have no labels.
      members: The indices of the examples in each row, or ``ABSENT``, int32 [rows, S].
      length: The number of tokens in a row, L.
      notes: Notes for the log.
    """

    examples: EmbeddingExamples
    members: np.ndarray
    length: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, examples: EmbeddingExamples, length: int) -> "PackedExamples":
        """Assigns examples to rows so that no text occurs twice in a row.

        The rows are the same in every epoch. If there are scores, equal texts may be in the same
        row, because the loss allows them.

        Raises:
          DataError: An example is longer than a row.
        """
        sizes = _sizes(examples)
        longest = int(sizes.max())
        require(
            longest <= length,
            f"data.row_length {length} must be at least {longest}, the number of tokens of the "
            "longest example with all of its texts: raise it, or lower data.length",
            DataError,
        )
        rows = _rows(sizes, _keys(examples), length)
        # The shape is [rows, S], where S is the largest number of examples in a row.
        members = np.full((len(rows), max(map(len, rows))), ABSENT, np.int32)
        for row, members_of_row in zip(members, rows, strict=True):
            row[: len(members_of_row)] = members_of_row
        filled = sizes.sum() / (len(rows) * length)
        note = (
            f"packed into {counted(len(rows), 'row')} of {length} tokens, {filled:.0%} full, with "
            f"up to {members.shape[1]} examples; batch_size counts rows"
        )
        return cls(examples=examples, members=members, length=length, notes=(*examples.notes, note))

    @property
    def num_examples(self) -> int:
        """The number of rows."""
        return len(self.members)

    def batches(self, batch_size: int, seed: int, epoch: int) -> np.ndarray | None:
        """See ``dataset.OrderedExamples``. Without scores, the rows of a batch share no text."""
        if "scores" in self.examples.targets:
            return None
        keys = self.examples.text_keys
        # Reshape [rows, S, 1 + C] to [rows, S · (1 + C)].
        absent = self.members[:, :, None] == ABSENT
        return distinct_order(
            np.where(absent, ABSENT, keys[self.members]).reshape(len(self.members), -1),
            batch_size,
            seed,
            epoch,
        )

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one row, which is the same in every epoch."""
        del epoch
        examples, members = self.examples, self.members[index]
        # The index of each text in `queries` or `documents`, [S, 1 + C].
        texts = np.where(members[:, None] == ABSENT, ABSENT, examples.rows[members])
        pad = examples.queries.template.pad
        input_ids = np.full(self.length, pad, np.int32)
        segment_ids = np.zeros(self.length, np.int32)
        end = 0
        # The segment id of a text is its index in the flattened `texts`, counted from 1.
        for segment, text in enumerate(texts.ravel().tolist(), start=1):
            if text == ABSENT:
                continue
            is_anchor = segment % texts.shape[1] == 1
            ids = (examples.queries if is_anchor else examples.documents).tokens(text)
            start, end = end, end + len(ids)
            input_ids[start:end], segment_ids[start:end] = ids, segment
        targets = {}
        for name, values in examples.targets.items():
            # Each target has the shape [S] or [S, C], with 0 for absent examples.
            shape = (-1, *[1] * (values.ndim - 1))
            targets[name] = np.where(members.reshape(shape) == ABSENT, 0, values[members])
        return {
            "input_ids": input_ids,
            "segment_ids": segment_ids,
            "text_mask": (texts != ABSENT).astype(np.int32),
            **targets,
        }


def _sizes(examples: EmbeddingExamples) -> np.ndarray:
    """Returns the total number of tokens in all texts of each example, int64 [n]."""
    anchors, documents = np.split(examples.rows, [1], axis=1)
    queries, others = (np.diff(x.starts) for x in (examples.queries, examples.documents))
    return queries[anchors[:, 0]] + np.where(documents == ABSENT, 0, others[documents]).sum(axis=1)


def _keys(examples: EmbeddingExamples) -> list[set[int]]:
    """Returns, for each example, the keys of the texts that must not occur again in its row."""
    if "scores" in examples.targets:
        return [set()] * len(examples.rows)
    return [{*row} - {ABSENT} for row in examples.text_keys.tolist()]


def _rows(sizes: np.ndarray, keys: list[set[int]], length: int) -> list[list[int]]:
    """Assigns examples to rows of at most `length` tokens; examples in a row share no text."""
    rows: list[list[int]] = []
    left = np.arange(len(sizes))
    while len(left):
        members, starts = best_fit(sizes[left], sizes[left], (length, length), seed=len(rows))
        repeated: list[int] = []
        for row in np.split(left[members], starts[1:-1]):
            present: set[int] = set()
            kept: list[int] = []
            for index in row.tolist():
                if present.isdisjoint(keys[index]):
                    kept.append(index)
                    present |= keys[index]
                else:  # wait for the next round
                    repeated.append(index)
            rows.append(kept)
        left = np.array(repeated, np.int64)
    return rows
